"""One summary of a run for every reader; runs are listed, and found by what people call them."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.errors import RunFolderError
from lockstep.events import RunStarted, StepLogged
from lockstep.rundir.folder import RunDir, new_run_id
from lockstep.rundir.heartbeat import announce, seconds_left
from lockstep.rundir.summary import compare, find_run, live_state, read_runs, summarize
from lockstep.studio.commands import Starts
from lockstep.studio.home import Home
from lockstep.studio.index import RunIndex
from lockstep.telemetry.console import ConsoleSink
from tests.rundir.runs import make_run


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
    state = {"step_s": 0.05, "wait_s": 0.002, "memory_gb": 1.5, "peak_gb": 2.0}
    ranks = [{"rank": 0, "own_s": None, **state}, {"rank": 1, "own_s": 0.045, **state}]
    row = {"attempt": 1, "step": 30, "epoch": 1, "ranks": ranks, "slow_rank": 1}
    run.ranks_file.write_text(json.dumps(row) + "\n")
    assert main(["show", str(run.path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "time left 30.0 s" in printed
    assert "rank 0 50.0 ms 2.0 ms 1.5 GB 2.0 GB rank 1 50.0 ms 45.0 ms 2.0 ms 1.5 GB 2.0 GB slow" in printed


def test_the_best_evaluation_is_compared_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    for run in runs:
        run.update(best_metric={"val_loss": 0.25}, final_metrics={"val_loss": 0.25, "test_loss": 0.5})
    losses = [{"epoch": epoch, "step": 10 * epoch, "attempt": 1, "val_loss": 0.125 + 0.125 * epoch} for epoch in (1, 2)]
    runs[1].write_epochs(losses)
    results = compare(runs).results
    assert (results["best val_loss"], results["final test_loss"]) == ([0.25, 0.25], [0.5, 0.5])
    assert results["last val_loss"] == [None, 0.375], "the newest evaluation stands beside the best"
    assert "final val_loss" not in results
    assert main(["show", str(runs[0].path)]) == 0
    assert capsys.readouterr().out.count("val_loss") == 1


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


# Finding runs.


def test_runs_are_listed_newest_first_and_only_their_own_files_are_read(tmp_path: Path) -> None:
    for n in range(5):
        run = make_run(tmp_path / f"run-{n}", f"run-{n:08x}")
        run.update(created_at=f"2030-01-0{(n * 2) % 5 + 1}T00:00:00Z")
        os.mkfifo(run.metrics_file)
        os.mkfifo(run.steps_file)
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / ".run-x.tmp-1").mkdir()
    (tmp_path / "notes.txt").write_text("")
    listed = [run for run, _ in read_runs(tmp_path)]
    assert [run.read().created_at.day for run in listed] == [5, 4, 3, 2, 1]
    assert {run.status() for run in listed} == {"pending"}
    assert read_runs(tmp_path / "nowhere") == []


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for day, run_id in enumerate(["run-aaaa0000", "run-aaaa1111", "run-bbbb0000"], start=1):
        make_run(tmp_path / "runs" / run_id, run_id).update(created_at=f"2030-01-0{day}T00:00:00Z")
    make_run(tmp_path / "runs" / "baseline", "run-cccc0000").update(created_at="2029-01-01T00:00:00Z")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("ref", "found"),
    [
        ("last", "run-bbbb0000"),
        ("run-aaaa1111", "run-aaaa1111"),
        ("run-aaaa1", "run-aaaa1111"),
        ("bbbb", "run-bbbb0000"),
        ("baseline", "run-cccc0000"),
        ("run-cccc0000", "run-cccc0000"),
    ],
)
def test_a_run_is_found_by_id_beginning_folder_or_last(runs: Path, ref: str, found: str) -> None:
    assert find_run(ref, runs).read().id == found


def test_a_run_is_found_by_path(runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_run(str(runs / "baseline"), tmp_path).read().id == "run-cccc0000"
    monkeypatch.chdir(runs)
    assert find_run("baseline", tmp_path / "elsewhere").read().id == "run-cccc0000"


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("run-aaaa", ": run-aaaa1111, run-aaaa0000"),
        ("run-bbbb0001", "'run-bbbb0001'"),
        ("", "no run was named"),
        ("a\0b", "no run was named"),
        ("../runs", "not a run folder"),
        ("some/where", "no run folder"),
    ],
)
def test_a_wrong_reference_says_what_there_is(runs: Path, ref: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    with pytest.raises(RunFolderError, match=re.escape(says)) as caught:
        find_run(ref, runs)
    assert caught.value.fix


def test_last_of_no_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="'last'") as caught:
        find_run("last", tmp_path)
    assert "no runs" in caught.value.why
