"""The monitor: the right GPUs by UUID, a host without any, and a thread that ends whatever happens."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from lockstep.hardware.detect import TorchBuild, find_devices
from lockstep.hardware.monitor import NO_GPU, USERS_EVERY, Monitor, SystemSource
from lockstep.hardware.nvml import GpuUser, NvmlGpu
from tests.fakes import FakeNvml, FakeSource

GPUS = [
    NvmlGpu(f"GPU-{letter}", "NVIDIA Test", (9, 0), 80_000_000_000, 70_000_000_000, (GpuUser(7, "python", 9.5),))
    for letter in "abc"
]
READINGS = {
    "GPU-c": {
        **{"utilisation": 0.97, "memory_gb": 71.2, "memory_total_gb": 80.0, "power_w": 640.5, "power_limit_w": 700.0},
        **{"temperature_c": 61, "sm_clock_mhz": 1980, "memory_clock_mhz": 2619, "throttled": ["power cap", "hot"]},
    },
    "GPU-a": {"utilisation": 0.25},
}


def source(devices: list[str] | None, visible: str | None = None) -> SystemSource:
    """A machine with three GPUs, of which ``CUDA_VISIBLE_DEVICES`` shows some."""
    nvml = FakeNvml(GPUS, readings=READINGS)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return SystemSource(
        devices,
        detect=lambda: find_devices(environ, TorchBuild(cuda="13.0"), nvml, list),
        open_driver=lambda: nvml,
    )


def test_a_sample_in_full() -> None:
    with source(["cpu", "gpu:2"]) as opened:
        sample = opened.sample()
    assert sample["devices"] == [
        {
            "id": "gpu:2",
            "name": "NVIDIA Test",
            "utilisation": 0.97,
            "memory_gb": 71.2,
            "memory_total_gb": 80.0,
            "power_w": 640.5,
            "power_limit_w": 700.0,
            "temperature_c": 61,
            "sm_clock_mhz": 1980,
            "memory_clock_mhz": 2619,
            "throttled": ["power cap", "hot"],
            "users": [{"pid": 7, "name": "python", "memory_gb": 9.5}],
        }
    ]
    host = sample["host"]
    assert host["name"] == socket.gethostname()
    assert 0 <= host["cpu"] <= 1
    assert 0 < host["memory_gb"] <= host["memory_total_gb"]
    assert "note" not in sample


@pytest.mark.parametrize("visible", ["2,0", "GPU-c,GPU-a"])
def test_devices_are_those_that_this_process_sees(visible: str) -> None:
    with source(["gpu:0"], visible) as opened:
        (device,) = opened.sample()["devices"]
    assert (device["id"], device["utilisation"]) == ("gpu:0", 0.97), "GPU-c is gpu:0 here"
    with source(None, visible) as opened:
        found = opened.sample()["devices"]
    assert [(device["id"], device["utilisation"]) for device in found] == [("gpu:0", 0.97), ("gpu:1", 0.25)]


def test_users_are_asked_for_now_and_then() -> None:
    with source(["gpu:0"]) as opened:
        samples = [opened.sample() for _ in range(USERS_EVERY + 1)]
    assert ["users" in sample["devices"][0] for sample in samples] == [True, *[False] * (USERS_EVERY - 1), True]


def test_what_the_driver_does_not_say_is_null() -> None:
    with source(["gpu:1"]) as opened:
        (device,) = opened.sample()["devices"]
    assert {device[key] for key in ("utilisation", "memory_gb", "power_w", "temperature_c", "sm_clock_mhz")} == {None}


def test_a_host_without_nvidia_says_so_once() -> None:
    with SystemSource(["cpu"], open_driver=lambda: None) as opened:
        first, second = opened.sample(), opened.sample()
    assert first["note"] == NO_GPU
    assert "note" not in second
    assert first["devices"] == []
    assert first["host"]["memory_gb"] > 0


def test_the_monitor_samples_until_it_is_stopped_and_once_more() -> None:
    samples = [{"time": float(number)} for number in range(1000)]
    got: list[Mapping[str, Any]] = []
    enough = threading.Event()

    def write(sample: Mapping[str, Any]) -> None:
        got.append(sample)
        if len(got) == 3:
            enough.set()

    with Monitor(FakeSource(samples), write, interval_s=0.001) as monitor:
        assert enough.wait(30)
    assert got == samples[: len(got)]
    assert monitor.error is None
    assert monitor.cpu_s > 0
    assert not [thread for thread in threading.enumerate() if thread.name == "lockstep-monitor"]


def test_a_short_run_has_one_sample() -> None:
    got: list[Mapping[str, Any]] = []
    with Monitor(FakeSource([{"time": 1.0}]), got.append):
        pass
    assert got == [{"time": 1.0}]


def test_a_writer_that_fails_ends_the_monitor_and_nothing_else() -> None:
    def refuse(sample: Mapping[str, Any]) -> None:
        raise RuntimeError("no space left")

    with Monitor(FakeSource([{"time": 1.0}]), refuse, interval_s=0.001) as monitor:
        pass
    assert str(monitor.error) == "no space left"


@pytest.mark.gpu
def test_a_real_gpu_is_sampled() -> None:
    with SystemSource(["gpu:0"]) as opened:
        (device,) = opened.sample()["devices"]
    assert device["id"] == "gpu:0"
    assert device["memory_total_gb"] > 1
    assert 0 <= device["utilisation"] <= 1


class Flaky:
    """Fails as often as it is told to, then gives a sample."""

    def __init__(self, failures: int) -> None:
        self.left = failures

    def __enter__(self) -> Flaky:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def sample(self) -> dict[str, Any]:
        self.left -= 1
        if self.left >= 0:
            raise OSError("the driver is busy")
        return {"time": 0.0}


@pytest.mark.parametrize(("failures", "ends"), [(3, False), (10**6, True)])
def test_a_sample_that_fails_is_left_out_and_many_end_the_monitor_with_a_note(failures: int, ends: bool) -> None:
    samples: list[Any] = []
    monitor = Monitor(Flaky(failures), samples.append, interval_s=0.001)
    with monitor:
        deadline = time.monotonic() + 30
        while not samples and time.monotonic() < deadline:
            time.sleep(0.01)
    assert ("the driver is busy" in samples[-1].get("note", "")) == ends
    assert (monitor.error is not None) == ends
