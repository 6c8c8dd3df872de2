"""Device names: their form, and what a selection of them becomes."""

from __future__ import annotations

import pytest

from lockstep.errors import DeviceError
from lockstep.hardware.device import MAX_DEVICES, choose_default, parse, select
from tests.hardware.machines import CPU, MPS, broken_gpu, machine


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cuda:1", "write gpu:1"),
        ("GPU:0", "write gpu:0"),
        ("gpu0", "write gpu:0"),
        ("gpu", "write gpu:0"),
        ("3", "gpu:3 is one GPU"),
        ("gpu:01", "write gpu:1"),
        ("CPU", "write cpu"),
        ("gpu:-1", "lockstep devices"),
        ("tpu:0", "lockstep devices"),
        ("", "lockstep devices"),
        ("gpu:0;rm", "lockstep devices"),
        ("gpu:٣", "write gpu:3"),
        ("gpu:99999", "lockstep devices"),
    ],
)
def test_a_malformed_name_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(DeviceError, match="is not a device") as caught:
        parse([name])
    assert hint in caught.value.fix
    assert "cpu or gpu:<index>" in caught.value.why


def test_nothing_selected_is_an_error() -> None:
    with pytest.raises(DeviceError, match="no device is selected"):
        parse([])


def test_all_stands_alone() -> None:
    assert parse(["all"]) == ("all",)
    with pytest.raises(DeviceError, match="cannot be combined"):
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
    with pytest.raises(DeviceError, match="there is no gpu:2") as caught:
        select(("gpu:0", "gpu:2"), machine(2))
    assert "gpu:1 (NVIDIA Test)" in caught.value.why
    assert "cpu (Test CPU)" in caught.value.fix


def test_a_gpu_is_never_replaced_by_the_cpu() -> None:
    with pytest.raises(DeviceError, match="there is no gpu:0"):
        select(("gpu:0",), machine(0))


def test_an_unusable_gpu_is_refused_with_its_reason_and_not_offered() -> None:
    here = [CPU, broken_gpu(0)]
    with pytest.raises(DeviceError, match="cannot be used") as caught:
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
