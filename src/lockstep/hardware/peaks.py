"""Peak arithmetic and memory speed of GPUs, from their makers' data sheets; dense figures.

GPUs are identified by the driver's exact name, since variants (PCIe, NVL, laptop, MIG slice) differ by more than a
rounding. An unknown name has no figure rather than a wrong one.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.precisions import PRECISIONS


@dataclass(frozen=True, slots=True)
class Peaks:
    """TFLOP/s by format (``half``: fp16, and bf16 if the tensor cores support it), memory in GB/s, and the source."""

    half: float
    tf32: float | None
    fp32: float
    memory: float
    source: str
    bf16: bool = True


_A100_40 = "NVIDIA A100 Tensor Core GPU data sheet, 40 GB"
_A100_80 = "NVIDIA A100 80GB Tensor Core GPU data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet"
_ADA = "NVIDIA Ada GPU Architecture white paper, appendix A"

PEAKS: dict[str, Peaks] = {
    # Blackwell. NVIDIA DGX B200 data sheet: eight GPUs, 64 TB/s; NVIDIA Blackwell Architecture Technical Brief.
    "NVIDIA B200": Peaks(2250, 1125, 75, 8000, "NVIDIA DGX B200 data sheet, an eighth"),
    # GB202: NVIDIA RTX Blackwell GPU Architecture white paper, appendix A (fp16 with fp32 accumulation).
    "NVIDIA GeForce RTX 5090": Peaks(209.5, 104.8, 104.8, 1792, "NVIDIA RTX Blackwell white paper, appendix A"),
    # Hopper. The H200 computes as the H100 SXM does, with faster memory.
    "NVIDIA H200": Peaks(989.4, 494.7, 66.9, 4800, _H200),
    "NVIDIA H200 NVL": Peaks(835.5, 417.5, 60, 4800, _H200),
    "NVIDIA H100 80GB HBM3": Peaks(989.4, 494.7, 66.9, 3350, _H100),
    "NVIDIA H100 NVL": Peaks(835.5, 417.5, 60, 3900, _H100),
    "NVIDIA H100 PCIe": Peaks(756, 378, 51, 2000, _H100),
    # Ada
    "NVIDIA L40S": Peaks(362.1, 183, 91.6, 864, "NVIDIA L40S data sheet"),
    "NVIDIA L40": Peaks(181.1, 90.5, 90.5, 864, "NVIDIA L40 data sheet"),
    "NVIDIA L4": Peaks(121, 60, 30.3, 300, "NVIDIA L4 Tensor Core GPU data sheet"),
    "NVIDIA RTX 6000 Ada Generation": Peaks(364.2, 182.1, 91.1, 960, "NVIDIA RTX 6000 Ada Generation data sheet"),
    "NVIDIA GeForce RTX 4090": Peaks(165.2, 82.6, 82.6, 1008, _ADA),
    "NVIDIA GeForce RTX 4080": Peaks(97.5, 48.7, 48.7, 716.8, _ADA),
    # Ampere
    "NVIDIA A100-SXM4-40GB": Peaks(312, 156, 19.5, 1555, _A100_40),
    "NVIDIA A100-PCIE-40GB": Peaks(312, 156, 19.5, 1555, _A100_40),
    "NVIDIA A100-SXM4-80GB": Peaks(312, 156, 19.5, 2039, _A100_80),
    "NVIDIA A100 80GB PCIe": Peaks(312, 156, 19.5, 1935, _A100_80),
    "NVIDIA A40": Peaks(149.7, 74.8, 37.4, 696, "NVIDIA A40 data sheet"),
    "NVIDIA A30": Peaks(165, 82, 10.3, 933, "NVIDIA A30 Tensor Core GPU data sheet"),
    "NVIDIA A10": Peaks(125, 62.5, 31.2, 600, "NVIDIA A10 Tensor Core GPU data sheet"),
    "NVIDIA RTX A6000": Peaks(154.8, 77.4, 38.7, 768, "NVIDIA Ampere GA102 white paper, appendix B"),
    "NVIDIA GeForce RTX 3090": Peaks(71, 35.6, 35.6, 936, "NVIDIA Ampere GA102 white paper, appendix A"),
    # Turing and Volta: fp16 only
    "Tesla T4": Peaks(65, None, 8.1, 320, "NVIDIA T4 Tensor Core GPU data sheet", bf16=False),
    "Tesla V100-SXM2-16GB": Peaks(125, None, 15.7, 900, _V100, bf16=False),
    "Tesla V100-SXM2-32GB": Peaks(125, None, 15.7, 900, _V100, bf16=False),
    "Tesla V100-PCIE-16GB": Peaks(112, None, 14, 900, _V100, bf16=False),
    "Tesla V100-PCIE-32GB": Peaks(112, None, 14, 900, _V100, bf16=False),
    # CDNA 3; tf32 is the matrix cores' xf32
    "AMD Instinct MI300X": Peaks(1307.4, 653.7, 163.4, 5300, "AMD Instinct MI300X Accelerator data sheet"),
}


def peak_flops(name: str, precision: str, *, tf32: bool = False) -> tuple[float | None, str]:
    """Return the peak FLOP/s of a GPU by the driver's name, or ``None``, and the source of the figure.

    ``tf32``: matrix products in precision ``32`` may use TF32.
    """
    peaks = PEAKS.get(name)
    if peaks is None:
        return None, f"no data sheet figure for {name!r}: MFU and roofline are left out"
    if PRECISIONS[precision].is_half:
        if precision.startswith("bf16") and not peaks.bf16:
            return None, f"{name} has no bf16 arithmetic"
        return peaks.half * 1e12, f"{peaks.source}: dense, 16 bit with 32-bit accumulation"
    if tf32 and peaks.tf32 is not None:
        return peaks.tf32 * 1e12, f"{peaks.source}: dense TF32"
    return peaks.fp32 * 1e12, f"{peaks.source}: fp32"
