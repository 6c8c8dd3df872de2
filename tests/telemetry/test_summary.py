"""One summary of a run for every reader."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.events import RunStarted, StepLogged
from lockstep.studio.commands import Starts
from lockstep.studio.home import Home
from lockstep.studio.index import RunIndex
from lockstep.telemetry.console import ConsoleSink
from lockstep.telemetry.heartbeat import announce, seconds_left
from lockstep.telemetry.rundir import RunDir, new_run_id
from lockstep.telemetry.summary import live_state, summarize
from tests.telemetry.runs import make_run


def half_done(folder: Path) -> RunDir:
    """A running run: 30 of 90 steps, of which this process has done 20 in 10 seconds."""
    run = make_run(folder, name="first try")
    run.begin_attempt({"epochs": 3}, {"devices": ["cpu", "cpu"], "strategy": "ddp"})
    run.update(status="running", best_metric={"val_loss": math.nan})
    run.write_epochs([{"epoch": 1, "step": 30, "attempt": 1, "samples_per_s": 50.0}])
    beat = announce(run.heartbeat_file, 30, 90)
    beat = beat.model_copy(update={"began": beat.updated - 10, "began_at": 10})
    run.heartbeat_file.write_text(beat.model_dump_json())
    return run


def test_every_reader_gives_the_same_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = half_done(tmp_path / "runs" / "my folder")
    expected = {
        "id": "run-00000001", "location": "my folder", "name": "first try", "status": "running", "epoch": 1,
        "epochs": 3, "step": 30, "total_steps": 90, "eta_s": 30.0, "devices": ["cpu", "cpu"], "samples_per_s": 50.0,
    }  # fmt: skip
    home = Home(tmp_path / "runs")
    home.make()
    (page,) = RunIndex(home, Starts(home)).summaries()
    assert main(["runs", "--runs-dir", str(tmp_path / "runs"), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    assert main(["show", str(run.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    for found in (summarize(run), page, listed, shown, live_state(run)["run"]):
        assert {key: found[key] for key in expected} == expected
    assert main(["runs", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert "my folder" in capsys.readouterr().out, "the folder is listed where it is not named like the id"
    assert main(["show", str(run.path)]) == 0
    assert "time left 30.0 s" in " ".join(capsys.readouterr().out.split())


def test_the_bar_estimates_as_the_other_readers(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    sink = ConsoleSink(sys.stdout, "plain", clock=lambda: now[0])
    sink.emit(RunStarted(Path("run"), 2, 10, 90, {}))
    now[0] = 110.0
    sink.emit(StepLogged(2, 30, 1, 320, 0.5, 1e-3, 1.0, 100.0, 0.0, 0))
    assert seconds_left(20, 10.0, 60) == 30.0
    assert "30.0 s left" in capsys.readouterr().out
    assert seconds_left(0, 10.0, 60) is None


def test_a_folder_named_like_an_id_gives_the_id(tmp_path: Path) -> None:
    assert new_run_id(tmp_path / "run-0a1b2c3d") == "run-0a1b2c3d"
    assert new_run_id(tmp_path / "mine") != new_run_id(tmp_path / "mine")
