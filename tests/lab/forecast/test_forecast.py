"""The verb on real ranks, the run that is held against its forecast, and a GPU that is not here."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.lab.bench.trials import Subject
from lockstep.lab.forecast.memory import Counting
from lockstep.lab.forecast.project import Wish, forecast, step_of
from tests.toys import Toy

H100 = "NVIDIA H100 80GB HBM3"


def subject(**more: Any) -> Subject:
    return Subject("autoencoder", {"hardware": {"selected_devices": ["cpu"]}, **more})


@pytest.mark.long
def test_a_gpu_that_is_not_here() -> None:
    wish = Wish((512, 8), interconnect="pcie,25gbe", gpu=H100, memory=80e9)
    report = forecast(subject(), wish)
    assert [row["gpus"] for row in report.rows] == [8, 512]
    assert report.rows[1]["efficiency"] < report.rows[0]["efficiency"] < 1
    assert any("modelled" in note for note in report.notes)
    assert any("25 Gb/s" in note for note in report.notes)
    assert report.extra["advice"]
    rate = report.extra["input_samples_per_s"]
    needed = report.rows[1]["samples_per_s"] / 512
    assert any(f"{rate:,.0f} samples/s" in note and f"{needed:,.0f}" in note for note in report.notes)


@pytest.mark.long
def test_activations_that_are_computed_again_take_a_forward_more() -> None:
    wish = Wish((8,), gpu=H100, strategy="ddp")
    plain = forecast(subject(), wish).rows[0]["step_ms"]
    again = {"activation_checkpointing": True}
    assert forecast(subject(training=again), wish).rows[0]["step_ms"] > plain
    assert forecast(subject(fsdp=again), wish).rows[0]["step_ms"] == plain, "it is a setting of fsdp alone"


@pytest.mark.long
def test_a_batch_has_no_more_samples_than_there_are() -> None:
    huge = subject(training={"batch_size": 1_000_000})
    report = forecast(huge, Wish((8,), gpu=H100))
    samples = huge.base.plan.task.train_samples
    assert report.settings["batch_size"] == samples
    assert report.rows[0]["samples_per_s"] * report.rows[0]["step_ms"] / 1e3 == pytest.approx(8 * samples)
    assert any(f"only {samples} samples" in note for note in report.notes)


@pytest.mark.long
def test_a_model_that_does_not_fit_is_sharded() -> None:
    whole = forecast(subject(), Wish((64,), gpu=H100, memory=80e9)).settings["strategy"]
    # Without a model's state a GPU's own allowance is 0.8 GB: just above it ddp's state is what does not fit.
    large = subject(task={"hidden": [4096, 4096, 4096], "code": 4096})
    split = forecast(large, Wish((64,), gpu=H100, memory=2.4e9)).settings["strategy"]
    assert (whole, split) == ("ddp", "fsdp")


@pytest.mark.parametrize(
    ("wish", "word"),
    [
        (Wish(()), "GPUs"),
        (Wish((0,)), "GPUs"),
        (Wish((10**17,)), "GPUs"),
        (Wish((8,), gpu=H100, strategy="single"), r"\bsingle\b"),
        (Wish((2,), interconnect="nvlink"), r"\bCPU\b"),
        (Wish((2,), strategy="fsdp", gpu=H100), "fsdp.sharding=hybrid"),
        (Wish((2,), gpu="Riva TNT2"), "Riva TNT2"),
        (Wish((2,), gpu=H100, interconnect="string"), "--interconnect"),
        (Wish((2,), gpu=H100, per_node=0), "GPUs a node"),
    ],
)
def test_wishes_that_cannot_be(wish: Wish, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        forecast(subject(fsdp={"sharding": "hybrid"}), wish)


def test_a_forecast_holds_the_batch_of_a_device() -> None:
    with pytest.raises(UsageError, match=r"(?s)\b64\b.*training\.global_batch_size"):
        forecast(subject(training={"global_batch_size": 64}), Wish((8,), gpu=H100))


@pytest.mark.slow
@pytest.mark.long
def test_a_measured_step_is_predicted_on_several_devices() -> None:
    report = forecast(subject(), Wish((1, 8), steps=3, repeats=2))
    single, several = report.rows
    assert report.settings["interconnect"] == "25gbe", "between CPUs"
    assert (single["gpus"], several["gpus"]) == (1, 8)
    assert single["parts_ms"]["communication"] == 0 < several["parts_ms"]["communication"]
    for row in report.rows:
        assert sum(row["parts_ms"].values()) == pytest.approx(row["step_ms"])
        assert row["samples_per_s_low"] <= row["samples_per_s"] <= row["samples_per_s_high"]
    plan = subject().base.plan
    assert single["epoch_s"] * single["samples_per_s"] == pytest.approx(plan.task.train_samples)
    assert single["run_s"] == pytest.approx(plan.epochs * single["epoch_s"])


def test_a_stop_ends_the_forecast_too() -> None:
    def say(line: str) -> None:
        if "steps of one device" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    toy = Subject(Toy, {"hardware": {"selected_devices": ["cpu"]}})
    report = forecast(toy, Wish((8,), steps=2, repeats=1), say=say)
    assert (report.partial, report.exit_code, report.rows) == (True, 143, [])


def test_differences_between_steps_are_jitter_unless_all_ranks_have_the_same() -> None:
    parts = dict.fromkeys(("data", "forward", "backward", "optimizer", "other"), 2.0)
    row = {"mean_ms": 10.0, "step_ms_low": 10 - 0.6745, "step_ms_high": 10 + 0.6745, "parts_ms": parts}
    footprint = Counting(subject()).footprint(8, True)
    assert step_of(footprint, [row], ignores_jitter=False).jitter_s == pytest.approx(1e-3, rel=1e-3)
    step = step_of(footprint, [row, {**row, "mean_ms": 14.4}], ignores_jitter=True)
    assert (step.jitter_s, step.seconds) == (0.0, pytest.approx(0.01))
    assert step.spread == pytest.approx(0.2)
