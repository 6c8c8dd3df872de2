"""The run folder: made whole, read with suspicion, judged by its processes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.config import RunConfig, resolve
from lockstep.errors import RunFolderError, StorageError
from lockstep.telemetry.files import JsonLines, plain, read_jsonl
from lockstep.telemetry.records import surviving
from lockstep.telemetry.rundir import (
    FORMAT_VERSION,
    RunDir,
    RunRecord,
    find_run,
    list_runs,
    new_run_id,
    read_json,
    write_json,
)

ON_TMP_PATH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
MOUNT_REFUSED = "mounting needs root"


def make_run(path: Path, run_id: str = "run-00000001", **config: Any) -> RunDir:
    return RunDir.create(path, resolve(config), run_id=run_id, command=["lockstep", "train", "har"])


@contextmanager
def tmpfs(path: Path, options: str) -> Iterator[Path]:
    path.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(MOUNT_REFUSED)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# Making one.


def test_a_new_run_is_pending_and_says_what_the_design_lists(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a", name="first try")
    content = json.loads((run.path / "run.json").read_text())
    assert list(content) == [
        "format_version", "id", "name", "task", "status", "created_at", "started_at", "completed_at", "pid", "host",
        "command", "versions", "placement", "attempt", "best_epoch", "best_metric", "final_metrics", "error", "tags",
    ]  # fmt: skip
    record = run.read()
    assert (record.id, record.name, record.task, record.status) == ("run-00000001", "first try", "har", "pending")
    assert record.pid == os.getpid() and record.command == ["lockstep", "train", "har"] and record.attempt == 0
    assert {"python", "lockstep", "torch", "numpy"} <= record.versions.keys()
    assert run.status() == "pending" and run.epochs() == run.steps() == []
    assert run.checkpoints.is_dir() and run.logs.is_dir()


def test_the_configuration_comes_back_as_it_was(tmp_path: Path) -> None:
    config = resolve({"optimizer": {"lr": 3e-4}, "task": {"name": "har", "mode": "é"}})
    run = RunDir.create(tmp_path / "a", config, run_id=new_run_id(), command=[])
    assert run.config() == config == RunDir.open(tmp_path / "a").config()


def test_ids_have_the_documented_form() -> None:
    assert re.fullmatch(r"run-[0-9a-f]{8}", new_run_id()) and new_run_id() != new_run_id()


def test_an_empty_folder_becomes_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert make_run(tmp_path / "mine").read().status == "pending"
    assert everything_in(tmp_path) == [
        "mine", "mine/attempts", "mine/checkpoints", "mine/config.yaml", "mine/heartbeat.json", "mine/logs", "mine/run.json",
    ]  # fmt: skip


def test_an_empty_mounted_volume_becomes_the_run(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "volume", "size=1m") as volume:
        assert make_run(volume).status() == "pending"
        assert everything_in(tmp_path)[0] == "volume", "nothing is left beside it"


def test_an_unfinished_run_is_not_overwritten(tmp_path: Path) -> None:
    make_run(tmp_path / "a").update(status="failed")
    with pytest.raises(RunFolderError, match="run-00000001") as caught:
        make_run(tmp_path / "a", "run-00000002")
    assert "--resume" in caught.value.fix and RunDir.open(tmp_path / "a").read().id == "run-00000001"


def test_a_run_that_is_on_is_not_overwritten(tmp_path: Path) -> None:
    make_run(tmp_path / "a").update(status="running")
    with pytest.raises(RunFolderError, match="run-00000001") as caught:
        make_run(tmp_path / "a", "run-00000002")
    assert str(os.getpid()) in caught.value.why and "lockstep stop" in caught.value.fix


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    make_run(tmp_path / "a").update(status="completed")
    with pytest.raises(RunFolderError, match="finished run run-00000001") as caught:
        make_run(tmp_path / "a", "run-00000002")
    assert "another --save-dir" in caught.value.fix


def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunFolderError, match="not a run's") as caught:
        make_run(tmp_path)
    assert "thesis.tex" in caught.value.why and everything_in(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("name", ["file", "file/below", "\0", "x" * 300], ids=["file", "below", "null", "long"])
def test_impossible_folders_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError) as caught:
        make_run(tmp_path / name)
    assert caught.value.fix and caught.value.exit_code == 2 and everything_in(tmp_path) == ["file"]


def test_of_two_creators_one_wins(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def create(run_id: str) -> None:
        try:
            outcomes.append(make_run(tmp_path / "a", run_id).read().id)
        except RunFolderError:
            outcomes.append("refused")

    threads = [threading.Thread(target=create, args=(f"run-0000000{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == 5
    assert RunDir.open(tmp_path / "a").read().id in outcomes and everything_in(tmp_path)[0] == "a"


def test_a_read_only_folder_is_refused_with_nothing_left(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(RunFolderError, match="read-only") as caught:
            make_run(disk / "a")
        assert caught.value.exit_code == 2 and "--save-dir" in caught.value.fix and everything_in(disk) == []


@pytest.mark.parametrize("mounted_itself", [False, True])
def test_a_full_disk_leaves_nothing_half_made(tmp_path: Path, mounted_itself: bool) -> None:
    with tmpfs(tmp_path / "disk", "size=8k") as disk:
        target = disk if mounted_itself else disk / "a"
        with pytest.raises(RunFolderError, match="no space left"):
            make_run(target)
        assert everything_in(disk) == []


# Reading and changing it.


def test_updates_replace_fields_and_keep_the_rest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.update(status="running", best_metric={"val_loss": math.nan, "val_acc": 0.5})
    record = RunDir.open(run.path).update(tags=["kept"])
    assert record.status == "running" and record.tags == ["kept"] and record.best_metric["val_acc"] == 0.5
    assert math.isnan(record.best_metric["val_loss"])
    assert '"val_loss": null' in run.run_file.read_text(), "JSON has no NaN"


def test_an_unknown_field_is_a_programming_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="stauts"):
        make_run(tmp_path / "a").update(stauts="running")


def test_readers_never_see_half_an_update(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    done = threading.Event()
    seen: set[int] = set()
    broken: list[Exception] = []

    def read() -> None:
        while not done.is_set():
            try:
                record = RunDir.open(run.path).read()
                seen.add(len(record.tags))
                assert all(tag == f"{len(record.tags)}" * 500 for tag in record.tags)
            except Exception as error:
                broken.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for n in [1, 9, 2, 7, 3] * 8:
        run.update(tags=[f"{n}" * 500] * n)
    done.set()
    for reader in readers:
        reader.join()
    assert not broken and seen <= {0, 1, 2, 3, 7, 9}


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    script = (
        "import sys; from pathlib import Path; from lockstep.telemetry.rundir import RunDir\n"
        "run = RunDir.open(Path(sys.argv[1]))\n"
        "print('go', flush=True)\n"
        "while True:\n"
        "    n = run.read().attempt + 1\n"
        "    run.update(attempt=n, tags=[str(n)] * 2000); run.append_step({'step': n, 'pad': 'x' * 5000})\n"
    )
    for delay_s in (0.0, 0.01, 0.05):
        process = subprocess.Popen([sys.executable, "-c", script, run.path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        time.sleep(delay_s)
        process.kill()
        process.communicate()
        record = run.read()
        assert record.tags == [str(record.attempt)] * (2000 if record.attempt else 0)
        assert [row["step"] for row in run.steps()] == sorted({row["step"] for row in run.steps()})
    run.begin_attempt({}, {})
    assert not [name for name in everything_in(run.path) if ".tmp-" in name], "leftovers go when an attempt begins"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "damaged"),
        (b"{", "damaged"),
        (b"\xff\xfe\x00", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"[]", "not a run folder"),
        (b"7", "not a run folder"),
        (b'{"epochs": []}', "not a run folder"),
        (b'{"format_version": true}', "not a run folder"),
        (b'{"format_version": 1}', "damaged"),
        (b'{"format_version": 1, "id": "\\ud800"}', "damaged"),
        (b'{"format_version": 1, "pid": ' + b"9" * 5000 + b"}", "damaged"),
        (b" " * (5 << 20), "too large"),
    ],
)
def test_a_damaged_run_file_is_one_error(tmp_path: Path, content: bytes, says: str) -> None:
    run = make_run(tmp_path / "a")
    run.run_file.write_bytes(content)
    with pytest.raises(RunFolderError, match=says) as caught:
        RunDir.open(run.path)
    assert caught.value.fix
    heard: list[str] = []
    assert list_runs(tmp_path, heard.append) == [] and len(heard) == 1


def test_a_newer_format_asks_for_an_upgrade(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    write_json(run.run_file, {**read_json(run.run_file), "format_version": FORMAT_VERSION + 1})
    with pytest.raises(RunFolderError, match="newer version") as caught:
        RunDir.open(run.path)
    assert "upgrade" in caught.value.fix
    with pytest.raises(RunFolderError, match="newer version"):
        make_run(run.path)


@pytest.mark.parametrize("name", ["run.json", "metrics.json", "steps.jsonl", "config.yaml", "heartbeat.json"])
def test_a_named_pipe_in_place_of_a_file_does_not_hang_anyone(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "a")
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    for read in (run.read, run.epochs, run.steps, run.config, run.status):
        try:
            read()
        except RunFolderError as error:
            assert name in error.what


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.dictionaries(st.sampled_from(["attempt", "step", "epoch", "loss"]), JSON_VALUES)


@ON_TMP_PATH
@given(
    st.sampled_from(["run.json", "metrics.json", "steps.jsonl", "heartbeat.json", "config.yaml", "attempts/1/placement.json"]),
    st.binary(max_size=60)
    | JSON_VALUES.map(lambda value: json.dumps(value).encode())
    | st.lists(ROWS, max_size=3).map(lambda rows: json.dumps({"epochs": rows}).encode())
    | ROWS.map(lambda row: json.dumps({"resumed_from_step": row, **row}).encode())
    | st.lists(ROWS, max_size=3).map(lambda rows: "\n".join(map(json.dumps, rows)).encode() + b"\n"),
)
def test_whatever_a_file_holds_readers_give_a_value_or_one_error(tmp_path: Path, name: str, content: bytes) -> None:
    run = RunDir(tmp_path / "a")
    if not run.path.exists():
        make_run(run.path).begin_attempt({}, {})
        run.append_step({"attempt": 1, "step": 1})
        run.write_epochs([{"attempt": 1, "step": 1, "epoch": 1}])
    file = run.path / name
    good = file.read_bytes()
    file.write_bytes(content)
    for read in (run.read, run.status, run.epochs, run.steps, run.config, run.progress):
        try:
            read()
        except RunFolderError as error:
            assert error.what and error.fix
    file.write_bytes(good)


def test_a_configuration_that_would_grow_without_bound_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    run.config_file.write_text("\n".join(lines))
    with pytest.raises(RunFolderError, match=r"config\.yaml is damaged"):
        run.config()


def test_a_configuration_cannot_run_code(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.config_file.write_text(f"name: !!python/object/apply:os.mkdir ['{tmp_path / 'owned'}']")
    with pytest.raises(RunFolderError):
        run.config()
    assert not (tmp_path / "owned").exists()


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


def test_a_torn_last_line_is_ignored_and_mended(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "rows.jsonl")
    file.append({"n": 1, "loss": math.nan})
    with file.path.open("ab") as raw:
        raw.write(b'{"n": 2, "pad": "' + b"x" * 70_000)
    assert read_jsonl(file.path) == [{"n": 1, "loss": None}]
    JsonLines(file.path).append({"n": 3})
    assert [row["n"] for row in read_jsonl(file.path)] == [1, 3]


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
    with tmpfs(tmp_path / "disk", "size=8k") as disk:
        file = JsonLines(disk / "rows.jsonl")
        file.append({"n": 0, "pad": "x" * 3000})
        with pytest.raises(StorageError, match="no space left") as caught:
            file.append({"n": 1, "pad": "x" * 9000})
        assert caught.value.exit_code == 1 and file.path.read_bytes().endswith(b'"}\n')
        file.append({"n": 2})
        assert [row["n"] for row in read_jsonl(file.path)] == [0, 2]
        with pytest.raises(StorageError, match="no space left"):
            write_json(disk / "rows.jsonl", ["x" * 9000])
        assert [row["n"] for row in read_jsonl(file.path)] == [0, 2] and everything_in(disk) == ["rows.jsonl"]


def test_a_folder_that_vanished_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not there") as caught:
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
    listed = list_runs(tmp_path)
    assert [run.read().created_at.day for run in listed] == [5, 4, 3, 2, 1]
    assert {run.status() for run in listed} == {"pending"}
    assert list_runs(tmp_path / "nowhere") == []


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
def test_a_wrong_reference_says_what_there_is(
    runs: Path, ref: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    with pytest.raises(RunFolderError, match=re.escape(says)) as caught:
        find_run(ref, runs)
    assert caught.value.fix


def test_last_of_no_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run 'last'") as caught:
        find_run("last", tmp_path)
    assert "no runs" in caught.value.why


# Alive or lost.

WAITER = (
    "import sys, time; from pathlib import Path; from lockstep.config import RunConfig\n"
    "from lockstep.telemetry.rundir import Heartbeat, RunDir\n"
    "run = RunDir.create(Path(sys.argv[1]), RunConfig(), run_id='run-00000001', command=[])\n"
    "if sys.argv[2] == 'running':\n"
    "    run.update(status='running'); Heartbeat().start(run, 3, 10)\n"
    "print('go', flush=True); time.sleep(60)\n"
)


@pytest.fixture
def start_elsewhere(tmp_path: Path) -> Iterator[Callable[[str], tuple[RunDir, subprocess.Popen[str]]]]:
    """A run whose process is another one, with the status asked for."""
    started: list[subprocess.Popen[str]] = []

    def start(status: str) -> tuple[RunDir, subprocess.Popen[str]]:
        path = tmp_path / "elsewhere"
        process = subprocess.Popen([sys.executable, "-c", WAITER, path, status], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        return RunDir.open(path), process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_killed_run_is_lost_at_once(start_elsewhere: Callable[[str], tuple[RunDir, subprocess.Popen[str]]]) -> None:
    run, process = start_elsewhere("running")
    assert run.status() == "running"
    process.send_signal(signal.SIGSTOP)
    assert run.status(now=time.time() + 9999) == "running", "a stopped process is silent, but there"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert run.status() == "lost", "a zombie is no run"
    process.wait()
    assert run.status() == "lost" and run.read().status == "running"
    with pytest.raises(RunFolderError, match="unfinished run run-00000001") as caught:
        make_run(run.path)
    assert "--resume" in caught.value.fix


def test_a_pending_run_outlives_its_creator_for_a_while(
    start_elsewhere: Callable[[str], tuple[RunDir, subprocess.Popen[str]]],
) -> None:
    run, process = start_elsewhere("pending")
    assert run.status(now=time.time() + 9999) == "pending", "its creator lives"
    process.kill()
    process.wait()
    assert run.status() == "pending"
    assert run.status(now=time.time() + 9999) == "lost"


def test_a_number_used_again_by_another_process_is_not_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.update(status="running")
    beat = read_json(run.heartbeat_file)
    write_json(run.heartbeat_file, {**beat, "created": beat["created"] - 100})
    assert run.status(now=beat["updated"] + 60) == "lost"
    assert run.status(now=beat["updated"] + 1) == "running", "so fresh a beat means that the clock was set"


def test_on_another_host_silence_decides(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.update(status="running")
    beat = read_json(run.heartbeat_file)
    write_json(run.heartbeat_file, {**beat, "host": "elsewhere.invalid", "pid": 1 << 40})
    assert run.status(now=beat["updated"] + 100) == "running"
    assert run.status(now=beat["updated"] + 1000) == "lost"


def test_without_a_heartbeat_a_running_run_is_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.update(status="running")
    run.heartbeat_file.unlink()
    assert run.status() == "lost"


@pytest.mark.parametrize("status", ["completed", "failed", "stopped"])
def test_an_ended_run_stays_what_it_is(tmp_path: Path, status: str) -> None:
    run = make_run(tmp_path / "a")
    run.update(status=status)
    run.heartbeat_file.unlink()
    assert run.status(now=time.time() + 1e9) == status


def test_a_record_is_a_value() -> None:
    record = RunRecord(id="run-1", task="har", created_at="2030-01-01T00:00:00Z")  # type: ignore[arg-type]
    assert record.changed({"status": "running"}) != record
