"""Runs are listed, and found by what people call them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lockstep.errors import RunFolderError
from lockstep.telemetry.summary import find_run, read_runs
from tests.telemetry.runs import make_run

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
        ("run-aaaa", "several runs: run-aaaa1111, run-aaaa0000"),
        ("run-bbbb0001", "no run 'run-bbbb0001'"),
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
    with pytest.raises(RunFolderError, match="no run 'last'") as caught:
        find_run("last", tmp_path)
    assert "no runs" in caught.value.why
