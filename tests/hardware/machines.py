"""Machines for tests: what detection would say on them."""

from __future__ import annotations

from lockstep.hardware.detect import Device
from lockstep.hardware.nvml import GpuUser

ALL_PRECISIONS = ("32", "16-mixed", "bf16-mixed", "bf16-true")

CPU = Device("cpu", "cpu", "Test CPU", 64.0, 32.0, precisions=ALL_PRECISIONS, cores=8)
MPS = Device("mps:0", "mps", "Apple GPU", 0.0, precisions=(), supported=False, note="mps is not supported yet")


def gpu(index: int, *, precisions: tuple[str, ...] = ALL_PRECISIONS, users: tuple[GpuUser, ...] = ()) -> Device:
    return Device(f"gpu:{index}", "gpu", "NVIDIA Test", 80.0, 79.0, users, precisions, f"GPU-{index}")


def broken_gpu(index: int) -> Device:
    return Device(
        f"gpu:{index}", "gpu", "NVIDIA Old", 8.0, precisions=(), supported=False, note="the driver is too old"
    )


def machine(gpus: int) -> list[Device]:
    """A CPU and so many equal GPUs."""
    return [CPU, *(gpu(index) for index in range(gpus))]
