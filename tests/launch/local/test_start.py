"""Launching for real: processes, signals, and who is left afterwards."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path

import psutil
import pytest

from lockstep.config import RunConfig
from lockstep.launch.failure.report import read_failure
from lockstep.launch.local.on_ranks import RankLimits, launch
from lockstep.rundir.folder import RunDir
from tests.launch.conftest import STUB, Caller, wait_for


def start(run_dir: RunDir, *actions: str, restarts: int = 0) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STUB", ",".join(actions))
        return launch(run_dir, len(actions), STUB, RankLimits(restarts=restarts))


@pytest.mark.slow
def test_a_script_from_stdin_without_a_main_guard(caller: Caller) -> None:
    caller.start("end", "end", fresh=True)
    code, out, err = caller.finish()
    assert (code, err) == (0, "")
    assert out == "rank 0 of 2 speaks\ncode 0\n"  # rank 1 speaks to its log
    assert "rank 1 of 2 speaks" in (caller.run_dir.logs / "rank-1.log").read_text()
    assert read_failure(caller.run_dir) is None
    caller.assert_nobody_left()


def test_rank_0_speaks_where_stdout_is_not_a_file(run_dir: RunDir) -> None:
    with redirect_stdout(io.StringIO()) as out:
        assert start(run_dir, "end", "end") == 0
    assert out.getvalue() == "rank 0 of 2 speaks\n"


@pytest.mark.slow
def test_a_process_without_stdout(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert start(run_dir, "end") == 0


@pytest.mark.slow
def test_two_launches_at_once_from_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB", "end,end")  # of the process, so not in each thread
    runs = [RunDir.create(tmp_path / f"run-{i}", RunConfig(), run_id=f"run-{i:08}", command=[]) for i in range(2)]
    codes: dict[int, int] = {}
    threads = [
        threading.Thread(target=lambda i=i: codes.update({i: launch(runs[i], 2, STUB)})) for i in range(len(runs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {0: 0, 1: 0}


def test_one_rank_raises(run_dir: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    assert start(run_dir, "lose-peer", "fail-late-in-group") == 1
    report = read_failure(run_dir)
    assert report is not None
    assert report.first is not None
    assert report.first.rank == 1
    block = report.format()
    assert re.match(r"rank 1 .*: ValueError: the cat sat on the keyboard\n", block)
    assert block.count("Traceback") == 1
    assert "in fail_late_in_group" in block
    assert "  two\n  last words\n" in block
    assert re.search(r"\n1 .*\(rank 0\)\.", block)
    assert capfd.readouterr() == ("", "")  # who launches tells of it, once


def test_wrong_usage_in_all_ranks_is_told_once(run_dir: RunDir) -> None:
    assert start(run_dir, "refuse", "refuse") == 2
    report = read_failure(run_dir)
    assert report is not None
    assert report.format() == "label 7 is out of range\nwhy: there are 7 classes\nfix: count from 0"
    assert report.as_error().exit_code == 2


def test_a_killed_rank_is_the_cause_of_what_others_say(run_dir: RunDir) -> None:
    assert start(run_dir, "lose-peer", "die-in-group") == 1
    report = read_failure(run_dir)
    assert report is not None
    assert report.first is not None
    assert (report.first.rank, report.first.signal) == (1, "SIGKILL")
    assert [failure.rank for failure in report.others] == [0]
    assert re.match(r"rank 1 .*SIGKILL", report.format())
    assert "out-of-memory killer" in report.why


@pytest.mark.slow
def test_sys_exit_in_a_rank_is_a_failure(run_dir: RunDir) -> None:
    assert start(run_dir, "leave") == 1
    report = read_failure(run_dir)
    assert report is not None
    assert "sys.exit(7)" in report.what


def test_all_ranks_are_started_again(run_dir: RunDir) -> None:
    assert start(run_dir, "fail-once", "fail-once") == 1
    assert json.loads((run_dir.logs / "launcher.json").read_text())["may_restart"]
    assert start(run_dir, "fail-once", "fail-once", restarts=1) == 0
    assert (run_dir.path / "restarted-0").exists()
    assert read_failure(run_dir) is None
    assert json.loads((run_dir.logs / "launcher.json").read_text())["starts"] == 2


@pytest.mark.slow
def test_one_signal_is_one_stop_for_every_rank(caller: Caller) -> None:
    process = caller.start("stop", "stop")
    caller.wait_until_ready()
    process.terminate()
    assert caller.finish() == (143, "code 143\n", "")
    assert [(caller.run_dir.path / f"told-{rank}").read_text() for rank in range(2)] == ["15", "15"]
    assert read_failure(caller.run_dir) is None
    caller.assert_nobody_left()


@pytest.mark.slow
def test_a_rank_that_the_signal_of_a_stop_ends_has_not_failed(caller: Caller) -> None:
    process = caller.start("stop", "end-by-signal")
    caller.wait_until_ready()
    process.terminate()
    assert caller.finish() == (143, "code 143\n", "")
    assert read_failure(caller.run_dir) is None


@pytest.mark.slow
def test_one_ctrl_c_in_a_terminal_is_one_stop(caller: Caller) -> None:
    keyboard, terminal = os.openpty()
    process = caller.start("stop", "stop", terminal=terminal)
    caller.wait_until_ready()
    os.write(keyboard, b"\x03")  # the terminal sends SIGINT to the whole foreground group
    assert process.wait(30) == 130
    shown = os.read(keyboard, 4096).decode()
    os.close(terminal)
    os.close(keyboard)
    assert shown.split() == ["rank", "0", "sees", "a", "terminal", "^Ccode", "130"]
    assert [(caller.run_dir.path / f"told-{rank}").read_text() for rank in range(2)] == ["15", "15"]
    caller.assert_nobody_left()


@pytest.mark.slow
def test_a_stop_before_the_ranks_are_up_waits_for_them(caller: Caller) -> None:
    process = caller.start("stop-at-once", "stop-at-once")
    process.send_signal(0)
    while not (caller.run_dir.logs / "launcher.json").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert caller.finish()[::2] == (130, "")
    caller.assert_nobody_left()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(caller: Caller) -> None:
    process = caller.start("ignore", "with-children", stop_grace_s=600)
    caller.wait_until_ready()
    process.send_signal(signal.SIGINT)
    # The first has arrived once the rank that listens is gone.
    listening = psutil.Process(caller.launcher()["pids"]["1"])
    wait_for(lambda: listening.status() == psutil.STATUS_ZOMBIE)
    process.send_signal(signal.SIGINT)
    assert caller.finish()[0] == 130
    caller.assert_nobody_left()


@pytest.mark.slow
def test_ranks_that_do_not_follow_a_stop_are_killed(caller: Caller) -> None:
    process = caller.start("ignore", "stop-at-once", stop_grace_s=0.2)
    caller.wait_until_ready()
    process.terminate()
    assert caller.finish()[0] == 1
    report = read_failure(caller.run_dir)
    assert report is not None
    assert "0.2 s" in report.format()
    caller.assert_nobody_left()


@pytest.mark.slow
def test_the_launcher_is_killed(caller: Caller) -> None:
    caller.start("with-children", "ignore", fresh=True)
    caller.wait_until_ready()
    os.kill(caller.launcher()["pid"], signal.SIGKILL)
    assert caller.finish()[0] == 1
    report = read_failure(caller.run_dir)
    assert report is not None
    assert re.match(r"the launcher .*SIGKILL", report.format())
    caller.assert_nobody_left()


@pytest.mark.slow
def test_the_caller_is_killed(caller: Caller) -> None:
    process = caller.start("with-children", "stop")
    caller.wait_until_ready()
    process.kill()
    process.wait()
    caller.assert_nobody_left()
    assert (caller.run_dir.path / "told-1").exists()  # it ended in good order
    assert caller.launcher()["exit_code"] == 143


@pytest.mark.slow
def test_caller_and_launcher_are_killed(caller: Caller) -> None:
    process = caller.start("ignore", "ignore")
    caller.wait_until_ready()
    os.kill(caller.launcher()["pid"], signal.SIGSTOP)  # so that it cannot see what happens next
    process.kill()
    process.wait()
    os.kill(caller.launcher()["pid"], signal.SIGKILL)
    caller.assert_nobody_left()


@pytest.mark.slow
def test_a_killed_rank_takes_its_children_along(caller: Caller) -> None:
    caller.start("stop-at-once", "with-children")
    caller.wait_until_ready()
    os.kill(caller.launcher()["pids"]["1"], signal.SIGKILL)
    assert caller.finish()[0] == 1
    caller.assert_nobody_left()
