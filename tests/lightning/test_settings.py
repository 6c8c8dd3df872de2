"""What the sections ``hardware`` and ``trainer`` mean for a run: each selection of devices, and what is refused."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from lockstep.config import DistributedConfig, HardwareConfig
from lockstep.errors import ConfigError, DeviceError, UnsupportedError
from lockstep.hardware.detect import Device
from lockstep.hardware.resolve import Placement, resolve_placement
from lockstep.hardware.world import World
from lockstep.lightning.settings import Hardware, hardware_settings
from lockstep.precisions import PRECISIONS

ALL = tuple(PRECISIONS)
MACHINE = [
    Device("cpu", "cpu", "a CPU", 64.0, precisions=ALL),
    *(Device(f"gpu:{index}", "gpu", "a GPU", 24.0, precisions=ALL) for index in range(3)),
]


def placed(
    selected: list[str] | None, precision: Any = "32", machine: list[Device] = MACHINE, **trainer: Any
) -> Placement:
    settings = hardware_settings(trainer, Hardware(selected, precision), machine)
    return resolve_placement(HardwareConfig(**settings), DistributedConfig(), World(), machine)


@pytest.mark.parametrize(
    ("selected", "machine", "devices"),
    [
        (None, MACHINE, ("gpu:0",)),
        (None, MACHINE[:1], ("cpu",)),
        (["all"], MACHINE, ("gpu:0", "gpu:1", "gpu:2")),
        (["gpu:0", "cpu"], MACHINE, ("gpu:0",)),
        (["cpu", "cpu"], MACHINE, ("cpu", "cpu")),
    ],
)
def test_the_hardware_section_decides(selected: Any, machine: Any, devices: Any) -> None:
    placement = placed(selected, "bf16-mixed", machine)
    assert (placement.devices, placement.precision) == (devices, "bf16-mixed")


@pytest.mark.parametrize(("machine", "device"), [(MACHINE, "gpu:0"), (MACHINE[:1], "cpu")])
def test_a_precision_of_the_trainer_chooses_no_devices(machine: Any, device: str) -> None:
    placement = placed(None, machine=machine, precision="16")
    assert (placement.devices, placement.precision) == ((device,), "16-mixed")


@pytest.mark.parametrize(
    "trainer", [{"accelerator": "cpu"}, {"devices": 2}, {"strategy": "ddp"}, {"precision": "16-mixed"}]
)
@pytest.mark.parametrize(("selected", "precision"), [(["gpu:0"], "32"), (None, "bf16-mixed")])
def test_both_sections_are_one_too_many(trainer: dict[str, Any], selected: Any, precision: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.{next(iter(trainer))}="):
        hardware_settings(trainer, Hardware(selected, precision), MACHINE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trainer", "devices"),
    [
        ({"devices": 2, "accelerator": "cpu", "strategy": "ddp"}, ("cpu", "cpu")),
        ({"accelerator": "cpu"}, ("cpu",)),
        ({"devices": -1}, ("gpu:0", "gpu:1", "gpu:2")),
        ({"devices": "0,2"}, ("gpu:0", "gpu:2")),
        ({"devices": "2,"}, ("gpu:2",)),
        ({"devices": "2"}, ("gpu:0", "gpu:1")),
        ({"devices": [0, 1]}, ("gpu:0", "gpu:1")),
    ],
)
def test_the_trainer_section_alone_decides(trainer: dict[str, Any], devices: Any) -> None:
    assert placed(None, **trainer).devices == devices


@pytest.mark.parametrize("trainer", [{"devices": 2}, {"precision": "16-true"}, {}])
def test_several_nodes_need_a_launcher(trainer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"num_nodes .*\b2\b"):
        placed(None, num_nodes=2, **trainer)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(DeviceError, match="gpu:7"):
        placed(["gpu:7"])
    with pytest.raises(DeviceError, match="--devices"):
        placed([])
    for trainer in ({"strategy": "ddp_fork", "devices": 2}, {"strategy": "fsdp"}, {"accelerator": "tpu"}):
        with pytest.raises(UnsupportedError):
            placed(None, **trainer)


def test_every_precision_is_one_of_lightnings_command() -> None:
    assert get_args(get_type_hints(Hardware)["precision"]) == ALL
