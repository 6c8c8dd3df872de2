"""``lockstep sweep`` and ``lockstep.sweep``: real trials, each in a process, a stop in the middle, and the rest."""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import sys
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
from tests.ray_cluster import running_cluster, wait_until

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
    process = start_and_wait(command, tmp_path, cli_environment())
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


def start_and_wait(command: tuple[str, ...], folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a sweep, and wait until one of its trials has made a step."""
    process = commands.start("-m", "lockstep", *command, cwd=folder, env=environment, merged=True)
    deadline = time.monotonic() + 120
    while not any((beat := run.progress()) and beat.step for run, _ in read_runs(folder / "runs")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    return process


@pytest.mark.slow
def test_bad_trials_of_a_search_end_early(tmp_path: Path, run_cli: RunCli) -> None:
    """A stopped search resumes from its file; its trials are worse than those that the file has besides."""
    import optuna

    (tmp_path / "line.py").write_text(TASK)
    settings = ("--set", "optimizer.lr=1e-3..1e-2", "--set", "task.pause_s=0.2", "--epochs", "60", "--devices", "cpu")
    command = ("sweep", "line.py:Line", *settings, "--search", "optuna", "--trials", "7", "--save-dir", "runs/search")
    process = start_and_wait(command, tmp_path, cli_environment())
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 143, output
    storage = optuna.storages.journal.JournalFileBackend(str(tmp_path / "runs" / "search" / "optuna.log"))
    study = optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(storage))
    [stopped] = study.trials
    good = optuna.trial.create_trial(
        params=stopped.params,
        distributions=stopped.distributions,
        value=0.0,
        intermediate_values=dict.fromkeys(range(60), 0.0),
    )
    for _ in range(5):  # Optuna's median needs five
        study.add_trial(good)

    done = run_cli(*command, "--resume", "--json")
    assert done.code == 0, done.err
    pruned = [trial for trial in study.get_trials() if trial.state == optuna.trial.TrialState.PRUNED]
    assert pruned[0].params == stopped.params
    runs = {run.config().optimizer.lr: run for run, _ in read_runs(tmp_path / "runs")}
    assert runs.keys() == {trial.params["optimizer.lr"] for trial in pruned} and len(runs) == 2
    for trial in pruned:
        run = runs[trial.params["optimizer.lr"]]
        assert run.status() == "stopped"
        scores = [row["val_loss"] for row in run.epochs()]
        reported = list(trial.intermediate_values.values())
        assert scores[: len(reported)] == reported and 2 <= len(scores) < 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_sweep_on_ray_trains_what_is_left(tmp_path: Path) -> None:
    """With the losses of trials here; no two trials reserve the same resources."""
    pytest.importorskip("ray")
    (tmp_path / "line.py").write_text(TASK)
    settings = (
        "--set",
        "task.width=2,3,4",
        "--set",
        "task.pause_s=0.5",
        "--devices",
        "cpu",
        "--save-dir",
        "runs/widths",
    )
    command = ("sweep", "line.py:Line", *settings, "--on", "ray")
    with running_cluster(nodes=1, cpus=2) as cluster:
        process = start_and_wait(command, tmp_path, cluster.environment)
        process.kill()
        process.communicate()
        wait_until(lambda: all(run.status() != "running" for run, _ in read_runs(tmp_path / "runs")))
        before = {record.id: record.attempt for _, record in read_runs(tmp_path / "runs")}
        assert 1 <= len(before) <= 2
        exclusive = ("--parallel", "2", "--ray-resource", "CPU=2", "--resume", "--json")
        done = run([sys.executable, "-m", "lockstep", *command, *exclusive], tmp_path, cluster.environment)
        too_large = run(
            [sys.executable, "-m", "lockstep", *command, "--ray-resource", "CPU=3", "--resume"],
            tmp_path,
            cluster.environment,
        )
    assert done.returncode == 1, done.stderr
    assert too_large.returncode == 2 and "3 CPU" in too_large.stderr
    result = json.loads(done.stdout)
    assert result["failed"] == ["width=3 seed=42"]
    runs = {run.config().task.settings["width"]: run for run, _ in read_runs(tmp_path / "runs") if run.epochs()}
    assert runs.keys() == {2, 4}
    for width, trial in runs.items():
        local = lockstep.train(
            f"{tmp_path / 'line.py'}:Line",
            {"task": {"width": width}},
            devices="cpu",
            save_dir=tmp_path / f"local-{width}",
        )
        assert [row["val_loss"] for row in trial.epochs()] == [row["val_loss"] for row in local.history]
        record = trial.read()
        assert (record.status, record.attempt) == ("completed", before.get(record.id, 0) + 1)
    first, second = sorted((record.started_at, record.completed_at) for record in (run.read() for run in runs.values()))
    assert first[1] <= second[0]


def run(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


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
