"""When `strategy: auto` divides a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.config import DistributedConfig, HardwareConfig
from lockstep.hardware.device import Device
from lockstep.hardware.fits_memory import CONTEXT, divide_if_needed
from lockstep.hardware.resolve import Placement, resolve_placement
from lockstep.hardware.world import World

GPUS = [Device(f"gpu:{index}", "gpu", "NVIDIA A100-SXM4-40GB", 40.0) for index in range(2)]


def placed(*devices: str) -> Placement:
    detected = [*GPUS, Device("cpu", "cpu", "CPU", 64.0)]
    return resolve_placement(HardwareConfig(selected_devices=devices), DistributedConfig(), World(), detected)


def test_a_state_larger_than_a_gpu_is_divided() -> None:
    found = divide_if_needed(placed("gpu:0", "gpu:1"), 50e9, GPUS)
    assert found.strategy == "fsdp"
    assert found.world_size == 2
    assert found.reasons["strategy"].startswith("auto: ")
    assert "50.0 GB" in found.reasons["strategy"]
    assert "25.0 GB each" in found.reasons["strategy"]


@pytest.mark.parametrize(
    ("devices", "state"),
    [
        (("gpu:0", "gpu:1"), 40e9 - CONTEXT),
        (("gpu:0",), 50e9),
        (("gpu:0", "gpu:0"), 50e9),
        (("cpu", "cpu"), 500e9),
    ],
)
def test_otherwise_the_placement_stays(devices: tuple[str, ...], state: float) -> None:
    before = placed(*devices)
    assert divide_if_needed(before, state, GPUS) is before


def test_a_gpu_whose_memory_is_not_known_decides_nothing() -> None:
    before = placed("gpu:0", "gpu:1")
    assert divide_if_needed(before, 500e9, [replace(gpu, memory_gb=0.0) for gpu in GPUS]) is before
