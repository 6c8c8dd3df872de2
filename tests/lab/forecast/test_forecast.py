"""The verb on real ranks, the run that is held against its forecast, and a GPU that is not here."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.errors import UsageError
from lockstep.hardware.detect import usable_cores
from lockstep.lab.bench.trials import Subject
from lockstep.lab.forecast.collectives import measured_cluster
from lockstep.lab.forecast.measured import MEETINGS, contention, counts_beside, jitter, meeting
from lockstep.lab.forecast.project import forecast
from lockstep.lab.forecast.scaling import Setting, Wish
from tests.toys import Toy

H100 = "NVIDIA H100 80GB HBM3"


def subject(**more: Any) -> Subject:
    return Subject("autoencoder", {"hardware": {"selected_devices": ["cpu"]}, **more})


@pytest.mark.timeout(500)
@pytest.mark.drill
def test_two_ranks_from_one(run_cli: Any, tmp_path: Path) -> None:
    wish = ("--devices", "cpu,cpu", "--gpus", "1,2", "--interconnect", "measured", "--steps", "5", "--repeats", "1")
    result = run_cli("forecast", "autoencoder", *wish, "--save-dir", "foreseen", timeout_s=300)
    assert result.code == 0, result.err
    assert "efficiency" in result.out
    assert "take" in result.out, "what ranks of one machine do to each other is said"
    found = json.loads((tmp_path / "foreseen" / "report.json").read_text())
    one, two = found["rows"]
    assert (one["gpus"], two["gpus"]) == (1, 2)
    assert one["parts_ms"]["communication"] == 0
    assert two["parts_ms"]["communication"] > 0
    assert sum(two["parts_ms"].values()) == pytest.approx(two["step_ms"])
    assert two["samples_per_s_low"] <= two["samples_per_s"] <= two["samples_per_s_high"]


def test_a_gpu_that_is_not_here() -> None:
    wish = Wish((512, 8), interconnect="pcie,25gbe", gpu=H100, memory=80e9)
    report = forecast(subject(), wish)
    assert [row["gpus"] for row in report.rows] == [8, 512]
    assert report.rows[1]["efficiency"] < report.rows[0]["efficiency"] < 1
    assert any("modelled" in note for note in report.notes)
    assert any("25 Gb/s" in note for note in report.notes)
    assert report.extra["advice"]


def test_a_batch_has_no_more_samples_than_there_are() -> None:
    huge = subject(training={"batch_size": 1_000_000})
    report = forecast(huge, Wish((8,), gpu=H100))
    samples = huge.base.plan.task.train_samples
    assert report.settings["batch_size"] == samples
    assert report.rows[0]["samples_per_s"] * report.rows[0]["step_ms"] / 1e3 == pytest.approx(8 * samples)
    assert any(f"only {samples} samples" in note for note in report.notes)


def test_a_model_that_does_not_fit_is_sharded() -> None:
    whole = forecast(subject(), Wish((64,), gpu=H100, memory=80e9)).settings["strategy"]
    # Without a model's state a GPU's own allowance is 0.8 GB: just above it ddp's state is what does not fit.
    large = subject(task={"hidden": [4096, 4096, 4096], "code": 4096})
    split = forecast(large, Wish((64,), gpu=H100, memory=2.4e9)).settings["strategy"]
    assert (whole, split) == ("ddp", "fsdp")


@pytest.mark.parametrize(
    ("wish", "word"),
    [
        (Wish(()), "numbers of GPUs"),
        (Wish((0,)), "numbers of GPUs"),
        (Wish((10**17,)), "numbers of GPUs"),
        (Wish((8,), gpu=H100, strategy="single"), "cannot use strategy single"),
        (Wish((2,), interconnect="measured"), "nothing can be measured"),
        (Wish((2,), interconnect="measured", gpu=H100), "nothing can be measured"),
        (Wish((2,), interconnect="string"), "--interconnect"),
        (Wish((2,), gpu="Riva TNT2"), "data sheet"),
        (Wish((2,), gpu=H100, interconnect="string"), "--interconnect"),
        (Wish((2,), gpu=H100, per_node=0), "GPUs a node"),
    ],
)
def test_wishes_that_cannot_be(wish: Wish, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        forecast(subject(), wish)


def test_a_forecast_holds_the_batch_of_a_device() -> None:
    with pytest.raises(UsageError, match="cannot hold the global batch at 64"):
        forecast(subject(training={"global_batch_size": 64}), Wish((8,), gpu=H100))


@pytest.mark.parametrize(
    ("moment", "cpus", "signum", "code"),
    [
        ("workers: ", 1, signal.SIGTERM, 143),
        pytest.param("messages ", 2, signal.SIGINT, 130, marks=pytest.mark.drill),
    ],
)
@pytest.mark.slow
def test_a_stop_ends_the_forecast_too(moment: str, cpus: int, signum: int, code: int) -> None:
    def say(line: str) -> None:
        if line.startswith(moment):
            os.kill(os.getpid(), signum)

    links = "measured" if cpus > 1 else "nvlink"
    toy = Subject(Toy, {"hardware": {"selected_devices": ["cpu"] * cpus}})
    report = forecast(toy, Wish((8,), interconnect=links, steps=2, repeats=1), say=say)
    assert report.partial
    assert report.exit_code == code
    assert report.rows == []


@pytest.mark.parametrize(
    ("gpus", "devices", "counts"),
    [((1, 2), 2, [2]), ((8, 64, 512), 2, [2]), ((1,), 2, [2]), ((2, 3, 8), 4, [2, 3, 4])],
)
def test_devices_are_measured_beside_each_other(gpus: tuple[int, ...], devices: int, counts: list[int]) -> None:
    """For more than there are, what all of them do to each other holds."""
    assert counts_beside(gpus, devices) == counts
    cluster = measured_cluster(1e-6, 1e-9, devices, 0.1)
    setting = Setting(cluster, contention={count: 1.0 + count for count in counts})
    assert setting.slowed(max(gpus)) == (1.0 + min(max(gpus), devices) if max(gpus) > 1 else 1.0)


def test_ranks_that_wait_in_mid_step_take_turns_on_cores() -> None:
    turns = [{"alone_ms": 10.0, "beside_ms": 15.0}]
    ranks = 2 * usable_cores() + 1
    assert contention(turns, ranks, waits=False) == 1.5
    assert contention(turns, ranks, waits=True) == 3
    assert contention(turns, 0, waits=True) == 1.5


def test_steps_that_differ_alike_on_all_ranks_are_no_jitter() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.uniform(50, 150, 400)  # of the batches: the steps of a run, the same in every repetition
    rows = [{"times_ms": (lengths + rng.normal(0, 2.0, 400)).tolist()} for _ in range(3)]
    assert jitter(rows, alike=True) == pytest.approx(2e-3, rel=0.15)
    assert jitter(rows, alike=False) > 20e-3
    steady = [{"times_ms": rng.normal(50, 2.0, 400).tolist()} for _ in range(3)]
    assert jitter(steady, alike=False) == pytest.approx(2e-3, rel=0.15)


def test_what_a_message_costs_ranks_that_share_cores_is_told_by_steps_with_messages() -> None:
    turn = {"alone_ms": 10.0, "beside_ms": 12.0, "met_ms": 12.0 + 3 * MEETINGS}
    assert meeting([turn], 2, 0.001) == pytest.approx(0.002), "3 ms, of which the message takes one"
    assert meeting([turn], 2, 0.004) == 0.0
    assert meeting([{**turn, "met_ms": None}], 2, 0.001) == 0.0, "not measured"
    assert contention([turn], 2, waits=True) == pytest.approx(1.2)
    ranks = 2 * usable_cores() + 1  # a step takes three turns, which is no cost of a message
    assert meeting([turn], ranks, 0.0) == pytest.approx((12e-3 + 3e-3 * MEETINGS - 30e-3) / MEETINGS)
