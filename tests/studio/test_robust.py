"""What must not take the studio down, start a run twice, or hit a process that is not meant."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lockstep.cli.settings import flag_table
from lockstep.config import resolve
from lockstep.errors import LockstepError
from lockstep.hardware.nvml import GpuUser
from lockstep.rundir.files import JsonLines, last_row
from lockstep.rundir.folder import RunDir
from lockstep.studio.commands import Identity, Starts, is_alive, send
from lockstep.studio.home import Home
from lockstep.studio.index import RunIndex, Summary
from lockstep.studio.schemas import ResumeBody
from lockstep.studio.server import Options, Studio
from lockstep.studio.settings import offered_tasks
from lockstep.studio.tailing import Columns, Feed, columns_of
from tests.e2e.test_train import finish, start, wait_for_step
from tests.hardware.machines import machine
from tests.studio.serving import TOY, WAIT_S, Address, studio

NAME = "run-0000000a"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Address]:
    with studio(tmp_path, machine(0), kill_after_s=3.0) as found:
        yield found


def make_run(folder: Path, name: str = NAME, status: str = "stopped") -> RunDir:
    run = RunDir.create(folder / "runs" / name, resolve(), run_id=name, command=["lockstep"])
    run.begin_attempt({"epochs": 3}, {"devices": ["cpu"], "strategy": "single"})
    run.update(status=status)
    return run


def sleeper(folder: Path) -> subprocess.Popen[bytes]:
    """A process of the run in ``folder`` that leads a group and ignores SIGTERM; it is ready when this returns."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def created(pid: int) -> float:
    return psutil.Process(pid).create_time()


def beat_of(run: RunDir, process: subprocess.Popen[bytes]) -> None:
    """Let ``process`` answer for the run."""
    content = json.loads(run.heartbeat_file.read_text())
    content |= {"pid": process.pid, "created": created(process.pid), "handing_over": False, "updated": time.time()}
    run.heartbeat_file.write_text(json.dumps(content))


def wait_until(done: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


DAMAGED = [{"devices": 5}, {"devices": [[1]]}, {"devices": "cpu"}, {"devices": [None]}, {"devices": {"cpu": 1}}]


def test_a_damaged_record_hides_only_its_own_run(address: Address, tmp_path: Path) -> None:
    make_run(tmp_path, "run-whole", status="running")
    for number, placement in enumerate(DAMAGED):
        file = make_run(tmp_path, f"run-{number}", status="running").run_file
        file.write_text(json.dumps(json.loads(file.read_text()) | {"placement": placement}))
    for _ in range(2):  # the second look finds what the first one left
        listed = address.get("/api/runs")
        assert [run["id"] for run in listed["runs"]] == ["run-whole"]
        assert len(listed["problems"]) == len(DAMAGED)
        assert address.get("/api/devices")["runs"] == {"cpu": ["run-whole"]}
        assert address.call("GET", "/api/runs/run-0", 409)["message"].endswith("are not a list of names")
    file = tmp_path / "runs" / "run-0" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"placement": {"devices": ["gpu:7"]}}))
    assert address.get("/api/runs/run-0")["devices"] == ["gpu:7"], "mended by hand, it is back"


def test_a_run_without_a_configuration_leaves_the_settings_of_the_others(address: Address, tmp_path: Path) -> None:
    make_run(tmp_path, "run-a").config_file.unlink()
    make_run(tmp_path, "run-b")
    for _ in range(2):
        assert list(address.get("/api/settings")["runs"]) == ["run-b"]


@pytest.mark.parametrize("content", ["null", "[]", '{"0,1": 3}', '{"0,1": [["x", null]]}', "{", ""])
def test_samples_of_another_form_are_none(address: Address, tmp_path: Path, content: str) -> None:
    file = make_run(tmp_path, "run-a").path / "confused.json"
    assert address.get("/api/runs/run-a/confused") == {"cells": {}}
    file.write_text(content)
    assert address.get("/api/runs/run-a/confused") == {"cells": {}}
    file.write_text('{"0,1": [[3, null], [5, "five.png"]]}')
    assert address.get("/api/runs/run-a/confused") == {"cells": {"0,1": [[3, None], [5, "five.png"]]}}


def test_what_nobody_foresaw_in_one_run_hides_only_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is put in by hand: one that is known of would have been mended."""
    here = Studio(options(tmp_path), lambda refresh=False: machine(0))
    good, bad = make_run(tmp_path, "run-good"), make_run(tmp_path, "run-bad")
    judge = RunDir.judge

    def failing(run: RunDir, *rest: Any) -> str:
        if run.path.name == "run-bad":
            raise ZeroDivisionError("made up")
        return judge(run, *rest)

    monkeypatch.setattr(RunDir, "judge", failing)
    for _ in range(2):
        names = {summary["id"] for summary in here.index.summaries()}
        assert (good.path.name in names, bad.path.name in names) == (True, False)
        assert any("ZeroDivisionError: made up" in problem for problem in here.index.problems())
        here.index.users()
    monkeypatch.undo()
    assert bad.path.name in {summary["id"] for summary in here.index.summaries()}
    assert not any("made up" in problem for problem in here.index.problems())


def test_a_run_that_cannot_be_followed_does_not_end_the_following_of_others(
    address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, "run-fails"), make_run(tmp_path, "run-works")
    poll, watched, failures = Feed.poll, RunIndex.watched, []

    def failing(feed: Feed) -> None:
        if feed.name == "run-fails":
            raise ZeroDivisionError("made up")
        poll(feed)

    def failing_once(index: RunIndex) -> tuple[list[Summary], list[str]]:
        if not failures:
            failures.append(1)
            raise ZeroDivisionError("made up")
        return watched(index)

    monkeypatch.setattr(Feed, "poll", failing)
    monkeypatch.setattr(RunIndex, "watched", failing_once)
    with address.live() as tab:

        def until(done: Any) -> dict[str, Any]:
            deadline = time.monotonic() + WAIT_S
            while True:
                assert time.monotonic() < deadline
                message = tab.recv(timeout=WAIT_S)
                if isinstance(message, str) and done(found := json.loads(message)):
                    return dict(found)

        for run in ("run-fails", "run-works"):
            tab.send(json.dumps({"type": "subscribe", "run": run}))
        told = until(lambda m: m["type"] == "error")
        assert (told["run"], told["code"]) == ("run-fails", "RUN_NOT_USABLE")
        tab.send(json.dumps({"type": "watch", "runs": True}))
        wait_until(lambda: failures)
        RunDir(tmp_path / "runs" / "run-works").write_epochs([{"epoch": 1, "step": 1, "attempt": 1}])
        until(lambda m: m["type"] == "epochs" and m["run"] == "run-works" and m["epochs"])
        make_run(tmp_path, "run-later")
        until(lambda m: m["type"] in {"runs", "runs_changed"} and "run-later" in {r["id"] for r in m["runs"]})


def options(folder: Path) -> Options:
    return Options(folder / "runs", offered_tasks([TOY]), flag_table())


def test_of_two_resumes_at_once_one_starts(tmp_path: Path) -> None:
    here = Studio(options(tmp_path), lambda refresh=False: machine(0))
    make_run(tmp_path)
    ready, started, refused = threading.Barrier(4), [], []

    def resume() -> None:
        ready.wait()
        try:
            here.runs.resume(NAME, ResumeBody())
            started.append(here.starts.read(NAME))
        except LockstepError as error:
            refused.append(error.code)

    threads = [threading.Thread(target=resume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (start,) = started
    send(start.process, signal.SIGKILL)
    wait_until(lambda: not is_alive(start.process))
    assert refused == ["TRAINING_IN_PROGRESS"] * 3


@pytest.mark.drill
def test_of_two_resumes_from_terminals_one_trains(tmp_path: Path) -> None:
    command = ("--set", "task.dataset=plain", "--num-workers", "0", "--set", "task.pause_s=0.01")
    first = start("train", TOY, "--devices", "cpu", "--save-dir", "runs/run", *command, cwd=tmp_path)
    wait_for_step(tmp_path / "runs" / "run", 1, first)
    first.send_signal(signal.SIGTERM)
    finish(first, code=143)
    both = [start("resume", "runs/run", cwd=tmp_path) for _ in range(2)]
    try:
        told = [process.communicate(timeout=WAIT_S) for process in both]
    finally:
        for process in both:
            process.kill()
    assert sorted(process.returncode for process in both) == [0, 2], told
    run = RunDir.open(tmp_path / "runs" / "run")
    assert (run.status(), run.read().attempt) == ("completed", 2)
    assert sorted(entry.name for entry in run.attempts.iterdir()) == ["1", "2"]


def launcher_of(run: RunDir, process: subprocess.Popen[bytes], **more: Any) -> None:
    content = {"pid": process.pid, "created": created(process.pid), "host": os.uname().nodename, **more}
    (run.logs / "launcher.json").write_text(json.dumps(content))


def test_a_run_of_several_ranks_is_signalled_at_its_launcher(tmp_path: Path) -> None:
    run, starts = make_run(tmp_path, status="running"), Starts(Home(tmp_path / "runs"))
    rank, launcher = sleeper(run.path), sleeper(run.path)
    try:
        beat_of(run, rank)
        assert starts.target(run) is not None
        launcher_of(run, launcher)
        target = starts.target(run)
        assert target is not None
        assert (target.pid, target.group) == (launcher.pid, False)
        for other in ({"created": created(launcher.pid) - 60}, {"host": "elsewhere"}, {"pid": "x"}):
            launcher_of(run, launcher, **other)
            found = starts.target(run)
            assert found is not None
            assert found.pid == rank.pid
    finally:
        end(rank)
        end(launcher)
    assert starts.target(run) is None


def test_a_process_on_a_device_has_its_user_and_its_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, status="running")
    ours, other = sleeper(run.path), sleeper(tmp_path)
    try:
        beat_of(run, ours)
        users = tuple(GpuUser(process.pid, "python", 1.0) for process in (ours, other))
        with studio(tmp_path, [replace(device, users=users) for device in machine(1)]) as address:
            found = address.get("/api/devices?refresh=1")
            me = psutil.Process().username()
            shown = [(user["owner"], user["run"]) for user in found["devices"][-1]["users"]]
            assert shown == [(me, NAME), (me, None)]
    finally:
        end(ours)
        end(other)


def test_a_late_kill_spares_what_came_after(address: Address, tmp_path: Path) -> None:
    """A kill is for the process that was told to stop, in the attempt in which it was told."""
    stopped, resumed, notebook, stays = processes = [
        sleeper(tmp_path / "runs" / name) for name in ("run-resumed", "run-resumed", "run-notebook", "run-stays")
    ]
    try:
        for name, process in (("run-resumed", stopped), ("run-notebook", notebook), ("run-stays", stays)):
            beat_of(make_run(tmp_path, name, status="running"), process)
            assert address.post(f"/api/runs/{name}/stop", None, 202)["kill_after_s"] == 3.0
        run = RunDir(tmp_path / "runs" / "run-resumed")
        beat_of(run, resumed)  # it goes on in another process
        end(stopped)
        RunDir(tmp_path / "runs" / "run-notebook").update(attempt=2)  # it goes on in the same process
        stays.wait(WAIT_S)  # killed as said
        time.sleep(0.5)  # the others' time came before that of this one
        assert (resumed.poll(), notebook.poll()) == (None, None)
    finally:
        for process in processes:
            end(process)


def test_what_cannot_be_started_or_noted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "runs")
    home.make()
    starts = Starts(home)
    long = ["train", TOY, "--save-dir", str(home.run(NAME)), "--devices", "cpu", "--set", "task.dataset=plain"]

    def begin(*more: str) -> None:
        with pytest.raises(LockstepError):
            starts.begin(NAME, [*long, "--set", "task.pause_s=60", *more], task=TOY, attempt_before=0, devices=["cpu"])
        assert list(home.starts.iterdir()) == []

    begin("a\0b")  # no process can be started with it
    monkeypatch.setattr("lockstep.studio.commands.write_json", full_disk)
    before = {child.pid for child in psutil.Process().children()}
    begin()
    left = [child for child in psutil.Process().children() if child.pid not in before]
    wait_until(lambda: not any(is_alive(Identity(child.pid, child.create_time())) for child in left))


def full_disk(path: Path, _: Any) -> None:
    from lockstep.rundir.files import write_json

    write_json(path / "no" / "such" / "folder", {})


RANKS = 1024


def rank_row(step: int) -> dict[str, Any]:
    state = {"loss_s": 0.125, "step_s": 0.25, "wait_s": 0.5, "input_s": 0.25, "memory": 1 << 30, "peak": 1 << 31}
    return {"step": step, "attempt": 1, "epoch": 1, "ranks": [{"rank": rank, **state} for rank in range(RANKS)]}


def test_a_thousand_ranks_are_all_there(tmp_path: Path) -> None:
    columns = Columns("step")
    columns.append(columns_of([rank_row(1), rank_row(2)], "step"))
    assert columns[f"ranks.{RANKS - 1}.peak"].tolist() == [float(1 << 31)] * 2
    assert not columns.cut
    file = JsonLines(tmp_path / "ranks.jsonl")
    for step in (1, 2):
        file.append(rank_row(step))
    row = last_row(file.path)
    assert row is not None
    assert (row["step"], len(row["ranks"])) == (2, RANKS)


def test_columns_that_are_left_out_are_told(tmp_path: Path) -> None:
    columns = Columns("step")
    columns.append(columns_of([{"step": 1, **{f"n{number}": number for number in range(10_000)}}], "step"))
    assert columns.cut
    assert np.isfinite(columns["n100"]).all()
    columns.clear()
    assert not columns.cut
