"""What the ``hardware`` section means to a Trainer: each selection of devices, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lockstep.errors import ConfigError, DeviceError, UnsupportedError
from lockstep.hardware.detect import Device
from lockstep.hardware.resolve import resolve_hardware
from lockstep.hardware.world import World
from lockstep.lightning.cluster import SharedDDPStrategy, shared_ddp
from lockstep.lightning.configured import Hardware
from lockstep.lightning.settings import resolve

PRECISIONS = ("32", "16-mixed", "bf16-mixed")
MACHINE = [
    Device("cpu", "cpu", "a CPU", 64.0, precisions=PRECISIONS),
    *(Device(f"gpu:{index}", "gpu", "a GPU", 24.0, precisions=PRECISIONS) for index in range(3)),
]
DEFAULTS = {"accelerator": "auto", "devices": "auto", "strategy": "auto", "precision": None}


def resolved(
    selected: list[str] | None, wanted: Any = "32", machine: list[Device] = MACHINE, **trainer: Any
) -> dict[str, Any]:
    found = resolve(Hardware(selected, wanted), {**DEFAULTS, **trainer}, DEFAULTS, World(), machine)
    return {**found.trainer, "ranks": found.ranks}


@pytest.mark.parametrize("selected", [["gpu:0"], ["gpu:0", "gpu:1"], ["cpu"], ["gpu:0", "cpu"], ["gpu:2"]])
def test_a_selection_is_what_resolve_hardware_says(selected: list[str]) -> None:
    expected = resolve_hardware(selected, MACHINE)
    found = resolved(selected)
    assert {name: found[name] for name in expected} == expected
    assert found["ranks"] == (len(expected["devices"]) if expected["accelerator"] == "gpu" else 1)


@pytest.mark.parametrize(
    ("selected", "machine", "accelerator", "devices"),
    [
        (None, MACHINE, "gpu", [0]),
        (None, MACHINE[:1], "cpu", 1),
        (["all"], MACHINE, "gpu", [0, 1, 2]),
        (["cpu", "cpu"], MACHINE, "cpu", 2),
    ],
)
def test_defaults_and_what_trainers_lack(selected: Any, machine: Any, accelerator: str, devices: Any) -> None:
    found = resolved(selected, machine=machine)
    assert (found["accelerator"], found["devices"]) == (accelerator, devices)


def test_the_precision_goes_along() -> None:
    assert resolved(["gpu:1"], "bf16-mixed")["precision"] == "bf16-mixed"


@pytest.mark.parametrize(("machine", "accelerator", "devices"), [(MACHINE, "gpu", [0]), (MACHINE[:1], "cpu", 1)])
def test_a_precision_of_the_trainer_s_own_chooses_no_devices(machine: Any, accelerator: str, devices: Any) -> None:
    found = resolved(None, machine=machine, precision="16-true")
    assert (found["accelerator"], found["devices"], found["ranks"]) == (accelerator, devices, 1)
    assert "precision" not in found, "the trainer's stays"


@pytest.mark.parametrize(
    "trainer", [{"accelerator": "cpu"}, {"devices": 2}, {"strategy": "ddp"}, {"precision": "16-mixed"}]
)
@pytest.mark.parametrize(("selected", "wanted"), [(["gpu:0"], "32"), (None, "bf16-mixed")])
def test_both_sections_are_one_too_many(trainer: dict[str, Any], selected: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.{next(iter(trainer))}="):
        resolved(selected, wanted, **trainer)


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ({"devices": 2, "accelerator": "cpu", "strategy": "ddp"}, 2),
        ({"devices": "auto", "accelerator": "cpu"}, 1),
        ({"devices": -1}, 3),
        ({"devices": "0,2"}, 2),
        ({"devices": "2,"}, 1),
        ({"devices": "2"}, 2),
        ({"devices": [0, 1]}, 2),
        ({"devices": 1, "strategy": "ddp_spawn"}, 1),
        ({"devices": 4, "accelerator": "tpu"}, 1),
    ],
)
def test_settings_of_the_trainer_alone_stay(trainer: dict[str, Any], ranks: int) -> None:
    assert resolved(None, **trainer) == {"ranks": ranks}


@pytest.mark.parametrize("trainer", [{"devices": 2}, {"precision": "16-true"}, {}])
def test_several_nodes_need_a_launcher(trainer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="num_nodes is 2"):
        resolved(None, num_nodes=2, **trainer)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(DeviceError, match="gpu:7"):
        resolved(["gpu:7"])
    with pytest.raises(DeviceError, match="no device is selected"):
        resolved([])
    with pytest.raises(UnsupportedError, match="named twice"):
        resolved(["gpu:0", "gpu:0"])
    with pytest.raises(UnsupportedError, match="ddp_fork would start processes"):
        resolved(None, accelerator="cpu", devices=2, strategy="ddp_fork")


@pytest.mark.parametrize(
    ("strategy", "ranks", "becomes"),
    [
        ("ddp", 2, SharedDDPStrategy),
        ("ddp_find_unused_parameters_true", 2, SharedDDPStrategy),
        ("auto", 2, SharedDDPStrategy),
        ("auto", 1, str),
        ("ddp_spawn", 1, str),
        ("fsdp", 2, str),
        (DDPStrategy(), 2, DDPStrategy),
    ],
)
def test_lightnings_ddp_by_name_is_made_for_unequal_shares(strategy: Any, ranks: int, becomes: type) -> None:
    assert type(shared_ddp(strategy, ranks)) is becomes
