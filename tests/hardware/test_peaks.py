"""The table of peak speeds: consistent, sourced, and silent about what it does not know."""

from __future__ import annotations

import pytest

from lockstep.hardware.peaks import PEAKS, peak_flops


@pytest.mark.parametrize("name", list(PEAKS))
def test_every_row_is_consistent(name: str) -> None:
    single, source = peak_flops(name, "32")
    half, _ = peak_flops(name, "16-mixed")
    assert single is not None
    assert half is not None
    assert 5e12 < single < half < 5e15
    assert 100 < PEAKS[name].memory < 10_000
    assert "data sheet" in source or "white paper" in source
    tf32, _ = peak_flops(name, "32", tf32=True)
    assert tf32 is not None
    assert single <= tf32 <= half
    # On every tensor core so far TF32 runs at half the speed of the 16-bit formats.
    assert tf32 == single or abs(tf32 / half - 0.5) < 0.02


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "expected"),
    [
        ("NVIDIA H200", "bf16-mixed", False, 989.4e12),
        ("NVIDIA H100 PCIe", "16-mixed", False, 756e12),
        ("NVIDIA A100-SXM4-80GB", "32", False, 19.5e12),
        ("NVIDIA A100-SXM4-80GB", "32", True, 156e12),
        ("Tesla T4", "32", True, 8.1e12),
        ("Tesla T4", "bf16-mixed", False, None),
    ],
)
def test_figures(name: str, precision: str, tf32: bool, expected: float | None) -> None:
    value, reason = peak_flops(name, precision, tf32=tf32)
    assert value == expected
    assert reason


@pytest.mark.parametrize(
    "name", ["", "NVIDIA H100", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "AMD EPYC"]
)
def test_an_unknown_gpu_has_no_figure(name: str) -> None:
    value, reason = peak_flops(name, "32")
    assert value is None
    assert "no data sheet figure" in reason
