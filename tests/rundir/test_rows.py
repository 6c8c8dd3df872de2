"""Rows of a run: appended, superseded by later attempts, and readable after any crash."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import RunConfig
from lockstep.errors import StorageError
from lockstep.rundir.files import JsonLines, plain, read_json, read_jsonl, write_json
from lockstep.rundir.folder import RunDir, new_run_id, surviving
from tests.disks import small_disk
from tests.rundir.runs import JSON_VALUES, ON_TMP_PATH, everything_in, make_run

# Rows and attempts.


def test_attempts_are_numbered_and_keep_their_plans(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    assert run.begin_attempt({"steps": 1}, {"world_size": 2}) == 1
    assert run.begin_attempt({"steps": 2}, {"world_size": 1}, resumed_from_step=30) == 2
    assert run.plan() == {"steps": 2} == read_json(run.attempts / "2" / "plan.json")
    assert read_json(run.attempts / "1" / "plan.json") == {"steps": 1}
    assert read_json(run.attempts / "2" / "placement.json") == {"world_size": 1, "resumed_from_step": 30}
    record = run.read()
    assert record.attempt == 2 and record.placement == {"world_size": 1}


def test_rows_beyond_the_checkpoint_are_superseded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.begin_attempt({}, {})
    for step in (10, 20, 30):
        run.append_step({"attempt": 1, "step": step})
    run.write_epochs([{"epoch": e, "attempt": 1, "step": 15 * e, "val_loss": math.inf} for e in (1, 2)])
    assert [row["step"] for row in run.steps()] == [10, 20, 30]
    run.begin_attempt({}, {}, resumed_from_step=20)
    assert [row["step"] for row in run.steps()] == [10, 20], "at once, before the new attempt logs anything"
    run.append_step({"attempt": 2, "step": 30})
    run.write_epochs([*run.epochs(), {"epoch": 2, "attempt": 2, "step": 30}])
    assert [(row["attempt"], row["step"]) for row in run.steps()] == [(1, 10), (1, 20), (2, 30)]
    assert run.epochs() == [
        {"epoch": 1, "attempt": 1, "step": 15, "val_loss": None},
        {"epoch": 2, "attempt": 2, "step": 30},
    ]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6))
def test_a_resumed_run_reads_like_one_that_was_never_interrupted(history: list[tuple[int, int]]) -> None:
    rows: list[dict[str, Any]] = []
    resumed_from: dict[int, int] = {}
    reached = 0
    for attempt, (back, forward) in enumerate(history, start=1):
        start = max(0, reached - back)
        resumed_from[attempt] = start
        rows += [{"attempt": attempt, "step": step} for step in range(start + 1, start + forward + 1)]
        reached = start + forward
    assert [row["step"] for row in surviving(rows, resumed_from)] == list(range(1, reached + 1))


def test_ranks_restarted_within_an_attempt_supersede_too() -> None:
    rows = [{"attempt": 1, "step": step} for step in (10, 20, 30, 20, 30, 40)]
    assert [row["step"] for row in surviving(rows, {1: 0})] == [10, 20, 30, 40]


def test_a_torn_last_line_is_ignored_and_mended(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "rows.jsonl")
    file.append({"n": 1, "loss": math.nan})
    with file.path.open("ab") as raw:
        raw.write(b'{"n": 2, "pad": "' + b"x" * 70_000)
    assert read_jsonl(file.path) == [{"n": 1, "loss": None}]
    JsonLines(file.path).append({"n": 3})
    assert [row["n"] for row in read_jsonl(file.path)] == [1, 3]


def test_a_link_to_a_device_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    endless = tmp_path / "rows.jsonl"
    endless.symlink_to("/dev/zero")
    with pytest.raises(StorageError, match="regular"):
        JsonLines(endless).append({"n": 1})


@ON_TMP_PATH
@given(st.integers(0, 120))
def test_lines_cut_anywhere_lose_only_the_last(tmp_path: Path, cut: int) -> None:
    whole = b"".join(b'{"n":%d,"x":"%s"}\n' % (n, b"y" * n) for n in range(6))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(whole[: min(cut, len(whole))])
    rows = read_jsonl(path)
    assert [row["n"] for row in rows] == list(range(whole[:cut].count(b"\n")))
    JsonLines(path).append({"n": -1})
    assert [row["n"] for row in read_jsonl(path)] == [*(row["n"] for row in rows), -1]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8k") as disk:
        file = JsonLines(disk / "rows.jsonl")
        file.append({"n": 0, "pad": "x" * 3000})
        with pytest.raises(StorageError, match=r"rows\.jsonl") as caught:
            file.append({"n": 1, "pad": "x" * 9000})
        assert caught.value.exit_code == 1 and file.path.read_bytes().endswith(b'"}\n')
        file.append({"n": 2})
        assert [row["n"] for row in read_jsonl(file.path)] == [0, 2]
        with pytest.raises(StorageError, match=r"rows\.jsonl"):
            write_json(disk / "rows.jsonl", ["x" * 9000])
        assert [row["n"] for row in read_jsonl(file.path)] == [0, 2] and everything_in(disk) == ["rows.jsonl"]


def test_a_folder_that_vanished_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gone") as caught:
        write_json(tmp_path / "gone" / "run.json", {})
    assert caught.value.fix


@given(st.floats() | st.text() | JSON_VALUES)
def test_what_is_written_can_be_read(value: Any) -> None:
    text = json.dumps(plain({"v": value}), allow_nan=False, ensure_ascii=False)
    assert json.loads(text.encode("utf-8").decode("utf-8")) == plain({"v": value})


def test_what_has_no_form_in_json_is_a_programming_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object"):
        write_json(tmp_path / "x.json", {"a": object()})
    assert everything_in(tmp_path) == []


def test_a_command_line_of_raw_bytes_keeps_its_readable_part(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "a", RunConfig(), run_id=new_run_id(), command=["train", os.fsdecode(b"caf\xff")])
    assert run.read().command == ["train", "caf?"]
