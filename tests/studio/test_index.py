"""The page's list of runs: one id per run, and none that was deleted."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.studio.commands import Starts
from lockstep.studio.home import Home
from lockstep.studio.index import RunIndex
from tests.rundir.runs import make_run


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "runs")
    made.make()
    return made


def test_a_run_is_found_by_its_id_and_by_its_folder(home: Home) -> None:
    make_run(home.runs_dir / "mine", "run-0000aaaa").update(status="completed")
    index = RunIndex(home, Starts(home))
    for ref in ("run-0000aaaa", "mine"):
        assert (index.summary(ref)["id"], index.run(ref).path.name) == ("run-0000aaaa", "mine")
    with pytest.raises(LockstepError, match="'run-0000bbbb'"):
        index.summary("run-0000bbbb")


def test_a_copied_folder_has_its_own_id(home: Home) -> None:
    run = make_run(home.runs_dir / "run-0000aaaa", "run-0000aaaa")
    run.update(status="completed")
    shutil.copytree(run.path, home.runs_dir / "run-0000aaaa copy")
    index = RunIndex(home, Starts(home))
    assert {one["id"]: one["location"] for one in index.summaries()} == {
        "run-0000aaaa": "run-0000aaaa",
        "run-0000aaaa copy": "run-0000aaaa copy",
    }
    shutil.rmtree(run.path)
    assert [one["location"] for one in index.summaries()] == ["run-0000aaaa copy"]


def test_a_run_that_was_deleted_in_a_terminal_does_not_come_back_as_failed(home: Home) -> None:
    starts = Starts(home)
    index = RunIndex(home, starts)
    for name in ("run-0000aaaa", "run-0000bbbb"):  # both commands end with an error
        starts.begin(name, ["no-such-command"], task="har", attempt_before=0, devices=["cpu"])
    run = make_run(home.runs_dir / "run-0000aaaa", "run-0000aaaa")
    deadline = time.monotonic() + 60
    while any(one["starting"] for one in index.summaries()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.update(status="completed")
    assert {one["id"]: one["status"] for one in index.summaries()} == {
        "run-0000aaaa": "completed",
        "run-0000bbbb": "failed",
    }
    shutil.rmtree(run.path)
    assert [one["id"] for one in index.summaries()] == ["run-0000bbbb"]
    with pytest.raises(LockstepError):
        index.summary("run-0000aaaa")


def test_a_change_of_an_ended_run_is_seen_at_the_next_look(home: Home) -> None:
    run = make_run(home.runs_dir / "run-0000aaaa", "run-0000aaaa")
    run.heartbeat_file.unlink()
    run.update(status="completed")
    index = RunIndex(home, Starts(home))
    before, _ = index.watched()
    assert index.watched()[0][0] is before[0], "the page is sent what is another object"
    run.update(status="stopped")  # as by a resume in a terminal
    assert [summary["status"] for summary in index.watched()[0]] == ["stopped"]


def test_a_run_whose_files_are_gone_leaves_the_list_at_once(home: Home) -> None:
    run = make_run(home.runs_dir / "run-0000aaaa", "run-0000aaaa")
    run.update(status="completed")
    index = RunIndex(home, Starts(home))
    assert len(index.watched()[0]) == 1
    run.run_file.unlink()
    with pytest.raises(LockstepError):
        index.summary("run-0000aaaa")  # a tab that shows the run
    assert index.watched()[0] == []
