"""``lockstep sweep`` and ``lockstep.sweep``: real trials, each in a process, a stop in the middle, and the rest."""

from __future__ import annotations

import json
import math
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.cli.main import main
from lockstep.errors import ConfigError, DeviceError, UsageError
from lockstep.lab.sweep.searches import OptunaSearch
from lockstep.lab.sweep.space import Range, split_sets
from lockstep.lab.sweep.sweep import divided
from lockstep.rundir.folder import RunDir
from lockstep.rundir.summary import find_runs, read_runs
from tests import commands
from tests.conftest import RunCli, cli_environment

TASK = """
import torch
from torch import nn
from lockstep import ArrayDataset, Datasets, Loss, Task

class Line(Task):
    defaults = {"training.epochs": 2, "training.batch_size": 8, "data.num_workers": 0}

    def __init__(self, width: int = 2, pause_s: float = 0.0):
        super().__init__()
        self.width, self.pause_s = width, pause_s

    def datasets(self):
        inputs = torch.linspace(-1, 1, 64).reshape(16, 4)
        data = ArrayDataset(inputs, inputs.sum(1, keepdim=True))
        return Datasets(data, data)

    def model(self):
        if self.width == 3:
            raise ValueError("three is too wide")
        return nn.Sequential(nn.Linear(4, self.width), nn.Linear(self.width, 1))

    def loss(self, model, batch):
        if model.training:
            import time
            time.sleep(self.pause_s)
        return Loss((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))
"""
SWEEP = ("sweep", "line.py:Line", "--seeds", "2", "--devices", "cpu", "--parallel", "2")


@pytest.mark.slow
def test_a_stopped_sweep_trains_what_is_left(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "line.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    command = (*SWEEP, "--set", "task.pause_s=1.5", "--save-dir", "runs/widths")
    process = commands.start("-m", "lockstep", *command, cwd=tmp_path, env=cli_environment(), merged=True)
    deadline = time.monotonic() + 90
    while not any((beat := run.progress()) and beat.step for run, _ in read_runs(Path("runs"))):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 143, output
    assert "--save-dir runs/widths" in output and "--resume" in output
    before = {record.id: record.status for _, record in read_runs(Path("runs"))}
    assert "stopped" in before.values()

    again = run_cli(*command)
    assert again.code == 2 and "--resume" in again.err
    done = run_cli(*command, "--resume", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["failed"] == []

    runs = [RunDir(Path("runs") / run_id) for run_id in result["groups"][0]["runs"]]
    scores = [run.epochs()[-1]["val_loss"] for run in runs]
    attempts = {"completed": 1, "stopped": 2}
    assert [run.read().attempt for run in runs] == [attempts[before.get(run.path.name, "completed")] for run in runs]
    assert [run.config().training.seed for run in runs] == [42, 43]
    assert result["groups"] == [
        {
            "settings": {},
            "mean": pytest.approx(statistics.fmean(scores)),
            "std": pytest.approx(statistics.stdev(scores)),
            "scores": pytest.approx(scores),
            "best": True,
            "runs": [run.path.name for run in runs],
        }
    ]
    assert {run.path.name for run in find_runs("widths", Path("runs"))} == {run.path.name for run in runs}

    capsys.readouterr()
    assert main(["compare", "widths", "--by", "training.seed", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert [group["mean"] for group in groups] == sorted(scores)
    assert [(group["settings"]["training.seed"], group["best"]) for group in groups] == [
        (42 + scores.index(score), score == min(scores)) for score in sorted(scores)
    ]
    conditions = ("--where", "tag=widths", "--where", "training.seed>=43", "--sort", "val_loss")
    assert main(["runs", *conditions, "--json"]) == 0
    assert [run["id"] for run in json.loads(capsys.readouterr().out)["runs"]] == [runs[1].path.name]
    assert main(["runs", "--sort", "val_loss:desc", "--limit", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[0] == runs[scores.index(max(scores))].path.name and lines[2].startswith("1 of 2 runs")
    assert main(["runs", "--where", "val_los<1"]) == 2


def test_a_class_in_python_and_a_trial_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(TASK, namespace)  # as in a script or a notebook: it is sent by value
    monkeypatch.chdir(tmp_path)
    sweep = lockstep.sweep(namespace["Line"], {"task.width": [2, 3]}, parallel=2, devices="cpu", epochs=1)
    assert (sweep.exit_code, sweep.failed) == (1, ["width=3 seed=42"])
    assert [run.config().task.settings["width"] for run in sweep.runs] == [2]
    space = {"optimizer.lr": "log:1e-3..1e-1"}
    sweep = lockstep.sweep(namespace["Line"], space, search="optuna", trials=1, devices="cpu", epochs=1)
    best = sweep.groups().groups[0]
    assert best.mean == sweep.runs[0].epochs()[-1]["val_loss"]
    assert 1e-3 <= sweep.runs[0].config().optimizer.lr <= 1e-1


def test_a_bad_trial_is_pruned_and_an_open_one_repeated(tmp_path: Path) -> None:
    space = {"optimizer.lr": Range(1e-5, 1e-2, is_log=True), "optimizer.betas": [[0.9, 0.95], [0.8, 0.9]]}
    search = OptunaSearch(space, tmp_path, seed=1, trials=7, mode="min")
    for _ in range(5):  # Optuna's median needs five
        trial = search.next_trial()
        assert trial is not None and trial.values["optimizer.betas"] in space["optimizer.betas"]
        assert not search.should_prune(trial, [1.0, 0.5])
        search.finish(trial, "completed", 0.5)
    bad, opened = search.next_trial(), search.next_trial()
    assert bad is not None and opened is not None and search.next_trial() is None
    assert not search.should_prune(bad, [0.9])
    assert search.should_prune(bad, [0.9, 0.8])
    search.finish(bad, "pruned", 0.8)
    resumed = OptunaSearch(space, tmp_path, seed=1, trials=7, mode="min")
    again = resumed.next_trial()
    assert again is not None and (again.values, again.run_id("s")) == (opened.values, opened.run_id("s"))
    resumed.finish(again, "completed", math.nan)
    assert resumed.next_trial() is None


def test_values_of_the_command_line() -> None:
    space, fixed = split_sets(
        ["a.b=1e-4,1", "c=[1,2]", "d=[1,2],[3]", "e=log:1e-5..1e-2", "f=1..8", "g=x", "h=../a..b"]
    )
    assert space == {"a.b": [1e-4, 1], "d": [[1, 2], [3]], "e": Range(1e-5, 1e-2, is_log=True), "f": Range(1, 8)}
    assert fixed == ["c=[1,2]", "g=x", "h=../a..b"]
    with pytest.raises(ConfigError):
        split_sets(["lr=log:0..1"])


def test_devices_of_trials() -> None:
    gpus = ["gpu:0", "gpu:1", "gpu:2", "gpu:3"]
    assert divided(gpus, None) == [("gpu:0",), ("gpu:1",), ("gpu:2",), ("gpu:3",)]
    assert divided(gpus, 2) == [("gpu:0", "gpu:1"), ("gpu:2", "gpu:3")]
    assert divided(["gpu:0", "gpu:0"], None) == [("gpu:0",), ("gpu:0",)]
    assert divided(["cpu", "cpu"], None) == [("cpu", "cpu")]
    assert divided(["cpu"], 3) == [("cpu",)] * 3
    for devices, parallel in ((["gpu:0"], 2), (gpus, 3)):
        with pytest.raises(DeviceError):
            divided(devices, parallel)


@pytest.mark.parametrize(
    ("space", "options", "error"),
    [
        ({}, {}, UsageError),
        ({"optimizer.lr": []}, {}, UsageError),
        ({"training.seed": [1, 2]}, {}, UsageError),
        ({"optimizer.lr": [1, "fast"]}, {}, ConfigError),
        ({"optimizer.lr": "1..2"}, {}, ConfigError),
        ({"optimizer.lr": [1, 2]}, {"search": "optuna", "seeds": 2}, UsageError),
        ({"optimizer.lr": [1, 2]}, {"trials": 2}, UsageError),
    ],
)
def test_wrong_sweeps_start_nothing(
    space: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error):
        lockstep.sweep("har", space, devices="cpu", **options)
    assert not [run for run, _ in read_runs(Path("runs"))]
