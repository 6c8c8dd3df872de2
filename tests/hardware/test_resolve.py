"""Device names and selections; from a selection to a placement: the tables of the design, row by row."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import DistributedConfig, HardwareConfig
from lockstep.errors import ConfigError, DeviceError, UnsupportedError, UsageError
from lockstep.hardware.detect import Device
from lockstep.hardware.nvml import GpuUser
from lockstep.hardware.resolve import (
    CONTEXT,
    MAX_DEVICES,
    Placement,
    choose_default,
    divide_if_needed,
    parse,
    resolve_hardware,
    resolve_placement,
    select,
)
from lockstep.hardware.world import World
from tests.hardware.machines import CPU, MPS, broken_gpu, gpu, machine

REASONS = {"accelerator", "devices", "strategy", "backend", "world_size", "precision"}


def place(
    devices: str | None,
    gpus: int | list[Device] = 0,
    *,
    world: World | None = None,
    backend: str = "auto",
    **hardware: Any,
) -> Placement:
    config = HardwareConfig.model_validate({"selected_devices": devices, **hardware})
    detected = machine(gpus) if isinstance(gpus, int) else gpus
    placement = resolve_placement(
        config, DistributedConfig.model_validate({"backend": backend}), world or World(), detected
    )
    assert set(placement.reasons) == REASONS
    assert all(placement.reasons.values())
    return placement


def ranks(size: int, local: int | None = None, launcher: Any = "torchrun", rank: int = 0) -> World:
    local = local or size
    return World(rank, size, rank % local, local, rank // local, launcher)


# (selection, GPUs here) → (accelerator, devices, strategy, backend, world size)
TABLE: list[tuple[str | None, int, tuple[Any, ...]]] = [
    # the selection rules
    ("gpu:0", 1, ("gpu", ["gpu:0"], "single", None, 1)),
    ("gpu:0,gpu:1", 2, ("gpu", ["gpu:0", "gpu:1"], "ddp", "nccl", 2)),
    ("cpu", 0, ("cpu", ["cpu"], "single", None, 1)),
    ("cpu", 2, ("cpu", ["cpu"], "single", None, 1)),
    ("gpu:0,cpu", 1, ("gpu", ["gpu:0"], "single", None, 1)),
    ("gpu:0,gpu:1,cpu", 2, ("gpu", ["gpu:0", "gpu:1"], "ddp", "nccl", 2)),
    # its default
    (None, 2, ("gpu", ["gpu:0"], "single", None, 1)),
    (None, 0, ("cpu", ["cpu"], "single", None, 1)),
    # the words of the design: repeated devices are ranks, `all`
    ("cpu,cpu", 0, ("cpu", ["cpu", "cpu"], "ddp", "gloo", 2)),
    ("cpu,cpu,cpu", 1, ("cpu", ["cpu"] * 3, "ddp", "gloo", 3)),
    ("gpu:0,gpu:0", 1, ("gpu", ["gpu:0", "gpu:0"], "ddp", "gloo", 2)),
    ("gpu:0,gpu:0,gpu:1", 2, ("gpu", ["gpu:0", "gpu:0", "gpu:1"], "ddp", "gloo", 3)),
    ("all", 4, ("gpu", ["gpu:0", "gpu:1", "gpu:2", "gpu:3"], "ddp", "nccl", 4)),
    ("all", 1, ("gpu", ["gpu:0"], "single", None, 1)),
    ("all", 0, ("cpu", ["cpu"], "single", None, 1)),
    # any order, not only the first GPUs
    ("gpu:3,gpu:1", 4, ("gpu", ["gpu:3", "gpu:1"], "ddp", "nccl", 2)),
]


@pytest.mark.parametrize(("selection", "gpus", "expected"), TABLE, ids=lambda value: str(value))
def test_table(selection: str | None, gpus: int, expected: tuple[Any, ...]) -> None:
    accelerator, devices, strategy, backend, world_size = expected
    placement = place(selection, gpus)
    assert placement.accelerator == accelerator
    assert placement.devices == tuple(devices)
    assert placement.strategy == strategy
    assert placement.backend == backend
    assert placement.world_size == world_size
    assert placement.nodes == 1


@pytest.mark.parametrize(("selection", "dropped"), [("gpu:0,cpu", True), ("cpu,gpu:0", True), ("gpu:0", False)])
def test_the_cpu_beside_a_gpu_is_dropped_with_a_note(selection: str, dropped: bool) -> None:
    assert any(note.key == "cpu_ignored" for note in place(selection, 1).notes) is dropped


@pytest.mark.parametrize("selection", ["", "gpu:1", "gpu:0,gpu:7", "cuda:0", "all,cpu", "gpu:0,tpu"])
def test_selections_that_are_refused(selection: str) -> None:
    with pytest.raises(DeviceError) as caught:
        place(selection, 1)
    assert caught.value.fix


# strategy

STRATEGIES = [
    ("auto", "gpu:0", "single", None, 1),
    ("auto", "gpu:0,gpu:1", "ddp", "nccl", 2),
    ("single", "gpu:1", "single", None, 1),
    ("single", "cpu", "single", None, 1),
    ("ddp", "gpu:0,gpu:1", "ddp", "nccl", 2),
    ("ddp", "cpu,cpu", "ddp", "gloo", 2),
    ("ddp", "gpu:0", "single", None, 1),
    ("ddp", "cpu", "single", None, 1),
    ("dp", "gpu:0,gpu:1", "dp", None, 1),
    ("dp", "gpu:0,gpu:1,cpu", "dp", None, 1),
    ("dp", "all", "dp", None, 1),
    ("dp", "gpu:1", "single", None, 1),
]


@pytest.mark.parametrize(("strategy", "selection", "resolved", "backend", "world_size"), STRATEGIES)
def test_strategies(strategy: str, selection: str, resolved: str, backend: str | None, world_size: int) -> None:
    placement = place(selection, 2, strategy=strategy)
    assert (placement.strategy, placement.backend, placement.world_size) == (resolved, backend, world_size)
    if strategy in {"dp", "ddp"} and resolved == "single":
        assert any(strategy in note.text for note in placement.notes)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_models_are_divided_among_the_ranks_that_are_selected(strategy: str) -> None:
    several = place("gpu:0,gpu:1", 2, strategy=strategy)
    assert (several.strategy, several.backend, several.world_size) == (strategy, "nccl", 2)
    one = place("gpu:0", 2, strategy=strategy)
    assert (one.strategy, one.world_size) == ("single", 1)
    assert any(note.key == "strategy_unused" for note in one.notes)


@pytest.mark.parametrize(
    ("strategy", "selection", "error", "text"),
    [
        ("dp", "cpu", UnsupportedError, "ddp"),
        ("dp", "cpu,cpu", UnsupportedError, "--devices cpu,cpu"),
        ("dp", "gpu:0,gpu:0", UnsupportedError, "ddp"),
        ("single", "gpu:0,gpu:1", ConfigError, "2 devices"),
        ("single", "cpu,cpu", ConfigError, "2 devices"),
        ("fsdp", "gpu:0,gpu:0", UnsupportedError, "once"),
    ],
)
def test_strategies_that_are_refused(strategy: str, selection: str, error: type[UsageError], text: str) -> None:
    with pytest.raises(error) as caught:
        place(selection, 2, strategy=strategy)
    assert text in str(caught.value)


# backend


@pytest.mark.parametrize(
    ("backend", "selection", "resolved"),
    [
        ("gloo", "gpu:0,gpu:1", "gloo"),
        ("nccl", "gpu:0,gpu:1", "nccl"),
        ("gloo", "cpu,cpu", "gloo"),
        ("gloo", "gpu:0,gpu:0", "gloo"),
    ],
)
def test_a_backend_that_is_set_is_used(backend: str, selection: str, resolved: str) -> None:
    placement = place(selection, 2, backend=backend)
    assert placement.backend == resolved
    assert placement.reasons["backend"] == "as set"


@pytest.mark.parametrize(
    ("selection", "text"), [("cpu,cpu", "ranks on a CPU"), ("gpu:0,gpu:0", "one GPU"), ("gpu:0,gpu:0,gpu:1", "one GPU")]
)
def test_nccl_is_refused_where_it_cannot_connect(selection: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        place(selection, 2, backend="nccl")
    assert "gloo" in caught.value.fix


@pytest.mark.parametrize(("selection", "strategy"), [("gpu:0", "auto"), ("cpu", "auto"), ("gpu:0,gpu:1", "dp")])
def test_a_backend_without_ranks_is_ignored_with_a_note(selection: str, strategy: str) -> None:
    placement = place(selection, 2, backend="nccl", strategy=strategy)
    assert placement.backend is None
    assert any(note.key == "backend_unused" for note in placement.notes)


# precision


@pytest.mark.parametrize("precision", ["32", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("selection", ["cpu", "cpu,cpu", "gpu:0", "gpu:0,gpu:1"])
def test_precisions_that_the_devices_have(precision: str, selection: str) -> None:
    assert place(selection, 2, precision=precision).precision == precision


def test_a_precision_that_one_chosen_device_lacks_is_refused_by_name() -> None:
    here = [CPU, gpu(0), gpu(1, precisions=("32", "16-mixed"))]
    assert place("gpu:0", here, precision="bf16-mixed").precision == "bf16-mixed"
    with pytest.raises(DeviceError, match=r"bf16-mixed .*\bgpu:1\b") as caught:
        place("gpu:0,gpu:1", here, precision="bf16-mixed")
    assert "32, 16-mixed" in caught.value.why
    assert "16-mixed" in caught.value.fix


def test_single_precision_says_when_bf16_would_be_faster() -> None:
    assert "bf16-mixed" in place("gpu:0", 1).reasons["precision"]
    assert "bf16" not in place("gpu:0", [CPU, gpu(0, precisions=("32",))]).reasons["precision"]
    assert "bf16" not in place("cpu", 1).reasons["precision"]


# notes and reasons


def test_a_busy_gpu_is_noted() -> None:
    here = [CPU, gpu(0, users=(GpuUser(123, "python", 20.1), GpuUser(7, "Xorg", None)))]
    (note,) = place("gpu:0", here).notes
    assert (note.key, note.text) == ("device_in_use", "gpu:0 is in use: python (pid 123, 20.1 GB), Xorg (pid 7)")
    assert place("cpu", here).notes == ()


def test_the_reason_for_the_cpu_names_accelerators_that_cannot_be_used() -> None:
    assert "mps:0" in place(None, [CPU, MPS]).reasons["accelerator"]
    assert "gpu:0" in place("all", [CPU, broken_gpu(0)]).reasons["accelerator"]
    assert place(None, 0).reasons["accelerator"] == "there is no GPU"


# ranks that a launcher has started


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
@pytest.mark.parametrize(
    ("selection", "gpus", "world", "devices", "backend"),
    [
        (None, 4, (2, 2), ["gpu:0", "gpu:1"], "nccl"),
        (None, 2, (2, 2), ["gpu:0", "gpu:1"], "nccl"),
        (None, 0, (2, 2), ["cpu", "cpu"], "gloo"),
        (None, 4, (8, 4), ["gpu:0", "gpu:1", "gpu:2", "gpu:3"], "nccl"),
        (None, 1, (2, 1), ["gpu:0"], "nccl"),
        ("gpu:1,gpu:0", 2, (2, 2), ["gpu:1", "gpu:0"], "nccl"),
        ("gpu:0,gpu:0", 1, (2, 2), ["gpu:0", "gpu:0"], "gloo"),
        ("gpu:2,gpu:3", 4, (4, 2), ["gpu:2", "gpu:3"], "nccl"),
        ("cpu", 2, (2, 2), ["cpu", "cpu"], "gloo"),
        ("cpu", 0, (6, 3), ["cpu"] * 3, "gloo"),
        ("cpu,cpu", 0, (2, 2), ["cpu", "cpu"], "gloo"),
        ("all", 2, (2, 2), ["gpu:0", "gpu:1"], "nccl"),
        ("all", 0, (2, 2), ["cpu", "cpu"], "gloo"),
        ("gpu:0,gpu:1,cpu", 2, (2, 2), ["gpu:0", "gpu:1"], "nccl"),
    ],
)
def test_given_ranks(
    launcher: str, selection: str | None, gpus: int, world: tuple[int, int], devices: list[str], backend: str
) -> None:
    for rank in range(world[0]):
        placement = place(selection, gpus, world=ranks(*world, launcher=launcher, rank=rank))
        assert placement.devices == tuple(devices)
        assert placement.strategy == "ddp"
        assert placement.backend == backend
        assert placement.world_size == world[0]
        assert placement.nodes == world[0] // world[1]
        assert launcher in placement.reasons["world_size"]


@pytest.mark.parametrize(
    ("selection", "gpus", "local", "words"),
    [
        (None, 1, 2, ["2 processes", "1 GPU", "gpu:0,gpu:0", "--devices cpu"]),
        (None, 2, 3, ["3 processes", "2 GPUs", "gpu:0,gpu:1,gpu:0"]),
        ("gpu:0", 1, 2, ["1 device", "2 processes"]),
        ("gpu:0,gpu:1", 2, 4, ["2 devices", "4 processes"]),
        ("cpu,cpu,cpu", 0, 2, ["3 devices", "2 processes"]),
        ("all", 4, 2, ["4 devices", "2 processes"]),
        ("gpu:0,gpu:1", 2, 1, ["2 devices", "1 process "]),
    ],
)
def test_given_ranks_that_do_not_fit(selection: str | None, gpus: int, local: int, words: list[str]) -> None:
    with pytest.raises(DeviceError) as caught:
        place(selection, gpus, world=ranks(local))
    assert [word for word in words if word not in str(caught.value)] == []


def test_given_ranks_and_strategies() -> None:
    assert place(None, 2, world=ranks(2), strategy="ddp").strategy == "ddp"
    for strategy in ("single", "dp"):
        with pytest.raises(ConfigError, match=r"torchrun .*\b2\b"):
            place(None, 2, world=ranks(2), strategy=strategy)


def test_one_given_process_is_one_device_and_may_use_dp() -> None:
    assert place(None, 2, world=ranks(1)).devices == ("gpu:0",)
    assert place(None, 2, world=ranks(1)).strategy == "single"
    assert place("all", 2, world=ranks(1), strategy="dp").devices == ("gpu:0", "gpu:1")


def test_lockstep_own_ranks_resolve_as_their_launcher_did() -> None:
    world = World(1, 2, 1, 2, 0, "lockstep")
    assert place("gpu:0,gpu:0", 1, world=world) == place("gpu:0,gpu:0", 1)


# any selection

NAMES = st.sampled_from(["cpu", "gpu:0", "gpu:1", "gpu:2", "gpu:9", "all", "cuda:0", "mps:0", "", "gpu:x", "GPU:0"])
WORLDS = st.one_of(
    st.just(World()),
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from(["torchrun", "slurm"])).map(
        lambda parts: ranks(parts[0] * parts[1], parts[0], parts[2])
    ),
)


@given(
    names=st.none() | st.lists(NAMES, max_size=5),
    detected=st.integers(0, 3).map(machine) | st.just([CPU, broken_gpu(0), gpu(1, precisions=("32",)), MPS]),
    world=WORLDS,
    strategy=st.sampled_from(["auto", "single", "dp", "ddp", "fsdp", "pipeline"]),
    precision=st.sampled_from(["32", "16-mixed", "bf16-mixed"]),
    backend=st.sampled_from(["auto", "nccl", "gloo"]),
)
def test_any_selection_resolves_or_says_what_and_how_to_mend(
    names: list[str] | None, detected: list[Device], world: World, strategy: Any, precision: Any, backend: Any
) -> None:
    config = HardwareConfig(
        selected_devices=None if names is None else tuple(names), strategy=strategy, precision=precision
    )
    try:
        placement = resolve_placement(config, DistributedConfig(backend=backend), world, detected)
    except UsageError as error:
        assert error.what
        assert error.fix
        return
    usable = {device.id: device for device in detected if device.supported}
    assert set(placement.devices) <= set(usable)
    assert all(precision in usable[device].precisions for device in placement.devices)
    assert ("cpu" in placement.devices) == (placement.accelerator == "cpu") == (set(placement.devices) == {"cpu"})
    assert (placement.backend is None) == (placement.world_size == 1) == (placement.strategy in {"single", "dp"})
    if placement.backend == "nccl":
        assert len(set(placement.devices)) == len(placement.devices)
        assert placement.accelerator == "gpu"
    if world.from_outside:
        assert placement.world_size == world.size
    if placement.strategy == "ddp":
        assert len(placement.devices) * placement.nodes == placement.world_size
    assert json.loads(json.dumps(placement.as_dict())) == placement.as_dict()


# resolve_hardware: document 000, section 8


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        (["gpu:0"], {"accelerator": "gpu", "devices": [0], "strategy": "auto"}),
        (["gpu:0", "gpu:1"], {"accelerator": "gpu", "devices": [0, 1], "strategy": "ddp"}),
        (["cpu"], {"accelerator": "cpu", "devices": 1, "strategy": "auto"}),
        (["gpu:0", "cpu"], {"accelerator": "gpu", "devices": [0], "strategy": "auto"}),
        (["cpu", "gpu:1", "gpu:0"], {"accelerator": "gpu", "devices": [1, 0], "strategy": "ddp"}),
    ],
)
def test_resolve_hardware(selected: list[str], expected: dict[str, Any]) -> None:
    assert resolve_hardware(selected, machine(2)) == expected


@pytest.mark.parametrize("selected", [[], ["gpu:5"], ["gpu:0", "gpu:0"], ["cpu", "cpu"], ["gpu:"], ["auto"], ["mps:0"]])
def test_resolve_hardware_refuses(selected: list[str]) -> None:
    with pytest.raises(DeviceError) as caught:
        resolve_hardware(selected, [*machine(2), MPS])
    assert caught.value.fix


def test_nothing_selected_is_a_value_error_too() -> None:
    with pytest.raises(ValueError):
        resolve_hardware([])


def test_resolve_hardware_looks_at_this_machine() -> None:
    assert resolve_hardware(["cpu"]) == {"accelerator": "cpu", "devices": 1, "strategy": "auto"}
    with pytest.raises(DeviceError, match="gpu:900"):
        resolve_hardware(["gpu:900"])


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


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cuda:1", "gpu:1"),
        ("GPU:0", "gpu:0"),
        ("gpu0", "gpu:0"),
        ("gpu", "gpu:0"),
        ("3", "gpu:3 is one GPU"),
        ("gpu:01", "gpu:1"),
        ("CPU", "write cpu"),
        ("gpu:-1", "lockstep devices"),
        ("tpu:0", "lockstep devices"),
        ("", "lockstep devices"),
        ("gpu:0;rm", "lockstep devices"),
        ("gpu:٣", "gpu:3"),
        ("gpu:99999", "lockstep devices"),
    ],
)
def test_a_malformed_name_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(DeviceError) as caught:
        parse([name])
    assert hint in caught.value.fix
    assert "gpu:<index>" in caught.value.why


def test_nothing_selected_is_an_error() -> None:
    with pytest.raises(DeviceError):
        parse([])


def test_all_stands_alone() -> None:
    assert parse(["all"]) == ("all",)
    with pytest.raises(DeviceError):
        parse(["all", "cpu"])


def test_absurdly_many_are_refused() -> None:
    assert len(parse(["cpu"] * MAX_DEVICES)) == MAX_DEVICES
    with pytest.raises(DeviceError):
        parse(["cpu"] * (MAX_DEVICES + 1))


@pytest.mark.parametrize(
    ("names", "gpus", "devices", "noted"),
    [
        (("gpu:0",), 1, ("gpu:0",), False),
        (("gpu:0", "gpu:1"), 2, ("gpu:0", "gpu:1"), False),
        (("gpu:1", "gpu:0"), 2, ("gpu:1", "gpu:0"), False),
        (("cpu",), 0, ("cpu",), False),
        (("cpu",), 2, ("cpu",), False),
        (("gpu:0", "cpu"), 1, ("gpu:0",), True),
        (("cpu", "gpu:0", "gpu:1"), 2, ("gpu:0", "gpu:1"), True),
        (("all",), 3, ("gpu:0", "gpu:1", "gpu:2"), False),
        (("all",), 0, ("cpu",), False),
    ],
)
def test_selections(names: tuple[str, ...], gpus: int, devices: tuple[str, ...], noted: bool) -> None:
    selection = select(names, machine(gpus))
    assert selection.devices == devices
    assert selection.reason
    assert (selection.notes != ()) is noted


def test_an_absent_gpu_is_an_error_that_lists_what_is_here() -> None:
    with pytest.raises(DeviceError, match="gpu:2") as caught:
        select(("gpu:0", "gpu:2"), machine(2))
    assert "gpu:1 (NVIDIA Test)" in caught.value.fix
    assert "cpu (Test CPU)" in caught.value.fix


def test_a_gpu_is_never_replaced_by_the_cpu() -> None:
    with pytest.raises(DeviceError, match="gpu:0"):
        select(("gpu:0",), machine(0))


def test_an_unusable_gpu_is_refused_with_its_reason_and_not_offered() -> None:
    here = [CPU, broken_gpu(0)]
    with pytest.raises(DeviceError) as caught:
        select(("gpu:0",), here)
    assert caught.value.why == "the driver is too old"
    assert "gpu:0" not in caught.value.fix
    assert choose_default(here).devices == ("cpu",)
    assert select(("all",), here).devices == ("cpu",)


def test_default_is_the_first_gpu_else_the_cpu() -> None:
    assert choose_default(machine(2)).devices == ("gpu:0",)
    assert choose_default(machine(0)).devices == ("cpu",)
    assert choose_default([CPU, MPS]).devices == ("cpu",)
    assert choose_default([CPU, broken_gpu(0), machine(2)[2]]).devices == ("gpu:1",)
