"""``data.num_workers: auto``: measured once, before the first step, and without a trace in the run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.cli.main import main
from lockstep.telemetry.rundir import RunDir
from tests.dist.staged import Staged
from tests.toys import Toy


class Unsendable(Toy):
    """A task that lives in a process and cannot leave it."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.lock = threading.Lock()


def train(folder: Path, trained: Any = Toy, workers: Any = "auto", **settings: Any) -> tuple[RunDir, str]:
    """A run of four steps on one device, and why it has as many workers as it has."""
    config: dict[str, Any] = {
        "save_dir": str(folder),
        "hardware": {"selected_devices": "cpu"},
        "data": {"num_workers": workers},
        "telemetry": {"progress": "silent", "tensorboard": "off", "log_interval": 1, "monitor": False},
    }
    config["training"] = {"threads": 1, "max_steps": 4, **settings.pop("training", {})}
    run = RunDir(lockstep.train(trained, {**config, **settings}).run_dir)
    return run, next(choice["reason"] for choice in run.plan()["choices"] if choice["name"] == "loader")


def test_the_plan_says_what_was_measured_and_the_run_is_the_same(tmp_path: Path) -> None:
    slow = {"dataset": "plain", "pause_s": 0.02, "dropout": 0.5}
    measured, reason = train(tmp_path / "auto", "tests.toys:Toy", task=slow)
    assert reason.startswith("measured: ")
    assert "training waits for data" in reason
    given, why = train(tmp_path / "given", "tests.toys:Toy", 0, task=slow)
    assert why == "as configured"
    losses = [[row["loss"] for row in run.steps()] for run in (measured, given)]
    assert losses[0] == losses[1], "nothing that the measurement drew is missing in the run"
    assert measured.config().data.num_workers == "auto", "a resume measures again"


@pytest.mark.parametrize(
    ("task", "settings", "why"),
    [
        (Toy, {"training": {"reproducibility": "exact"}}, "exact mode measures nothing"),
        (Toy, {"debug": {"fast_dev_run": True}}, "a run for debugging measures nothing"),
        (Unsendable, {}, "not measured: the task Unsendable cannot be sent to other processes"),
        (
            Staged,
            {"hardware": {"selected_devices": "cpu,cpu", "strategy": "pipeline"}, "pipeline": {"in_process": True}},
            "the step of strategy pipeline is not that of one device",
        ),
    ],
    ids=["exact", "debug", "unsendable", "pipeline"],
)
def test_what_cannot_be_measured_follows_the_rule(
    task: type[Toy], settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    _, reason = train(tmp_path / "run", task, **settings)
    assert reason == f"the data set gives whole batches from memory (auto: {why})"


def test_planning_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tests.toys:Toy", "--devices", "cpu", "--num-workers", "auto"]) == 0
    assert "(auto: measured when training starts)" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["many", "-1", "1.5"])
def test_anything_else_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tests.toys:Toy", "--devices", "cpu", "--num-workers", value]) == 2
    assert "it must be `auto` or a number from 0" in capsys.readouterr().err
