"""When no rank moves: what counts as moving, who is behind, and where."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.failure.hang import HangReport, HangWatch, Standstill, saving_progress
from lockstep.launch.process import rank_log
from lockstep.launch.process.rank_log import log_file
from lockstep.rundir.heartbeat import Activity, Sign
from tests.gloo import ROOT
from tests.launch.conftest import Processes

WAITING = f"{ROOT}/src/lockstep/engine/strategies/base.py:1 in _backward"
FORKING = """
import os, subprocess, sys, time
from lockstep.launch.process.rank_log import stacks_on_request
def reads():
    time.sleep(600)
with open(sys.argv[1], "a") as log, stacks_on_request(log):
    other = subprocess.Popen(["sleep", "600"])
    if os.fork() == 0:
        reads()
    print(other.pid, flush=True)
    time.sleep(600)
"""


class Ranks:
    """Processes as ranks, with signs that a test sets, and a clock that it moves."""

    def __init__(self, shared: Processes) -> None:
        self.logs = shared.logs
        self.now = 0.0
        self.signs = [Sign(1, 3, Activity.STEP)] * 2
        self.processes, self.writing = shared.of_rank, shared.writing
        pids = {rank: process.pid for rank, process in enumerate(self.processes)}
        for rank in pids:
            os.truncate(log_file(self.logs, rank), 0)
        self.watch = HangWatch(pids, lambda: self.signs, logs=self.logs, timeout_s=60.0, clock=lambda: self.now)

    def after(self, seconds: float) -> HangReport | None:
        """Look every second for so long."""
        for _ in range(int(seconds)):
            self.now += 1.0
            report = self.watch.look(range(len(self.processes)))
            if report is not None:
                return report
        return None


@pytest.fixture
def ranks(shared: Processes) -> Ranks:
    return Ranks(shared)


def test_silence_of_all_ranks_is_a_hang_with_stacks(ranks: Ranks) -> None:
    assert ranks.after(59) is None
    report = ranks.after(2)
    assert report is not None
    assert [re.sub(r":\d+ ", " ", rank.stack[0]) for rank in report.ranks] == ["<string> in busy"] * 2
    assert "has made no progress for 60 s" in log_file(ranks.logs, 1).read_text()


def test_the_forks_of_a_rank_are_asked_and_no_other_child(tmp_path: Path) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(log_file(tmp_path, 3))],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        start_new_session=True,
    )
    try:
        assert rank.stdout is not None
        other = psutil.Process(int(rank.stdout.readline()))
        found: tuple[str, ...] = ()
        while not any("in reads" in line for line in found):  # the fork may not have come so far
            assert rank.poll() is None
            found = rank_log.ask_workers(rank.pid, 3, tmp_path)
        assert len(found) == 1
        assert re.fullmatch(r"its loader's worker \d+ is at <string>:\d+ in reads", found[0])
        assert other.is_running() and other.status() != psutil.STATUS_ZOMBIE, "the signal would have ended it"
    finally:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.communicate()


def test_one_rank_that_moves_is_enough(ranks: Ranks) -> None:
    for beat in range(2, 6):
        assert ranks.after(50) is None
        ranks.signs[1] = Sign(beat, 3, Activity.EVALUATING)
    assert ranks.after(61) is not None


def test_what_is_untimed_may_take_long_unless_its_process_is_stopped(ranks: Ranks) -> None:
    for activity in Activity:
        if activity.is_untimed:
            ranks.signs[0] = Sign(2, 3, activity)
            assert ranks.after(200) is None
    ranks.processes[0].send_signal(signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, ranks.processes[0].pid, os.WSTOPPED)
        report = ranks.after(1)
    finally:
        ranks.processes[0].send_signal(signal.SIGCONT)
    assert report is not None
    assert report.headline.startswith("rank 0 has sent no heartbeat for ")
    assert report.ranks[0].stack == ()
    assert report.ranks[1].stack
    assert "(stopped)" in report.table()


def test_a_pause_of_the_launcher_itself_does_not_count(ranks: Ranks) -> None:
    assert ranks.after(30) is None
    ranks.now += 3600
    assert ranks.after(29) is None
    assert ranks.after(3) is not None


def test_a_save_that_waits_for_the_disk_is_no_hang(ranks: Ranks, tmp_path: Path) -> None:
    """It moves no bytes, and the other rank has nothing to do but to wait for it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # posix_spawn(3) returns when the child has opened its input, and is uninterruptible until then, as fsync(2) is.
    opens = f"(os.POSIX_SPAWN_OPEN, 0, {str(pipe)!r}, os.O_RDONLY, 0)"
    spawn = f"import os; os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[{opens}])"
    saving = subprocess.Popen([sys.executable, "-c", spawn])
    try:
        while psutil.Process(saving.pid).status() != psutil.STATUS_DISK_SLEEP:
            assert saving.poll() is None
        before = saving_progress(saving.pid, 0)
        assert saving_progress(saving.pid, 0) != before
        before = saving_progress(ranks.processes[0].pid, 0)
        assert saving_progress(ranks.processes[0].pid, 0) == before
    finally:
        pipe.open("w").close()
        saving.wait()


def test_a_save_that_stands_still_is_a_hang_although_another_thread_writes(ranks: Ranks) -> None:
    """As the heartbeat does, and the monitor."""
    ranks.signs = [Sign(1, 3, Activity.SAVING), Sign(1, 3, Activity.AWAITING_SAVE)]
    report = ranks.after(61)
    assert report is not None
    assert [rank.rank for rank in report.behind] == [0]
    assert report.headline.startswith("rank 0 has made no progress for 60 s, in saving a checkpoint after step 3: ")


def test_a_save_goes_on_as_long_as_its_thread_writes(ranks: Ranks) -> None:
    pid, thread = ranks.processes[0].pid, ranks.writing[0]
    ranks.signs = [Sign(1, 3, Activity.SAVING, thread), Sign(1, 3, Activity.AWAITING_SAVE)]
    for _ in range(3):
        assert ranks.after(50) is None
        before = saving_progress(pid, thread)
        while saving_progress(pid, thread) == before:
            assert ranks.processes[0].poll() is None


def test_a_rank_that_has_ended_is_not_waited_for(ranks: Ranks) -> None:
    ranks.signs[0] = Sign(9, 14, Activity.ENDING)
    for _ in range(65):
        ranks.now += 1.0
        report = ranks.watch.look([1])
        if report is not None:
            break
    assert report is not None
    assert [rank.rank for rank in report.ranks] == [1]


def standstill(rank: int, step: int, *stack: str, ahead: bool = True, doing: str = "step 4") -> Standstill:
    inside = bool(stack) and "/lockstep/" in stack[0]
    return Standstill(rank=rank, step=step, ahead=ahead, doing=doing, stack=stack, in_framework=inside, silent_s=60)


def test_who_is_behind() -> None:
    def behind(*ranks: Standstill) -> list[int]:
        return [rank.rank for rank in HangReport(timeout_s=60, ranks=ranks).behind]

    own = "/home/me/task.py:3 in loss"
    assert behind(standstill(0, 3, WAITING), standstill(1, 3, own)) == [1]
    assert behind(standstill(0, 3, WAITING), standstill(1, 2, WAITING)) == [1]
    assert behind(standstill(0, 3, WAITING, ahead=False), standstill(1, 3, WAITING)) == [0]
    assert behind(standstill(0, 3, WAITING), standstill(1, 3, WAITING)) == []
    assert behind(standstill(0, 3, own), standstill(1, 3, own)) == []
    waiting = standstill(1, 3, WAITING).model_copy(update={"waits_for_data": True})
    assert behind(standstill(0, 3, WAITING), waiting) == [1]
    waiting = standstill(1, 3, WAITING).model_copy(update={"waits_for_save": True})
    assert behind(standstill(0, 3, WAITING), waiting) == [0]
    assert behind(standstill(0, 3, own)) == [0]
    assert behind(standstill(0, 3), standstill(1, 3, WAITING)) == [0]


@given(
    st.lists(
        st.builds(
            Standstill,
            rank=st.integers(0, 9),
            step=st.integers(0, 9),
            doing=st.just("step 4"),
            ahead=st.booleans(),
            waits_for_data=st.booleans(),
            waits_for_save=st.booleans(),
            state=st.sampled_from(["running", "stopped", "blocked"]),
            in_framework=st.booleans(),
            stack=st.sampled_from([(), (WAITING,)]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_report_has_a_headline_a_reason_a_fix_and_every_rank(ranks: list[Standstill]) -> None:
    report = HangReport(timeout_s=60, ranks=tuple(ranks))
    assert report.headline
    assert report.cause.title
    assert report.cause.advice
    assert all(f"rank {rank.rank}" in report.table() for rank in ranks)
    assert HangReport.model_validate(report.model_dump()) == report


def test_the_stack_of_the_thread_that_the_signal_came_to(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        faulthandler.dump_traceback(log)
        log.seek(0)
        stack = rank_log.parse_stack(log.read())
    assert stack[0].function == "test_the_stack_of_the_thread_that_the_signal_came_to"
    assert rank_log.place_of(stack).startswith(f"{__file__}:{stack[0].line} in test_the_stack")
    assert rank_log.parse_stack("nothing") == ()


def test_a_file_whose_name_is_not_ascii(tmp_path: Path) -> None:
    name, scope = f"{tmp_path}/für \U0001f600.py", dict[str, Any]()
    exec(compile("def läuft(log): dump(file=log)", name, "exec"), scope | {"dump": faulthandler.dump_traceback}, scope)
    with (tmp_path / "log").open("w+") as log:
        scope["läuft"](log)
        log.seek(0)
        assert rank_log.parse_stack(log.read())[0] == rank_log.Frame(name, 1, "läuft")


def test_the_users_line_is_the_place() -> None:
    frames = [
        ("/x/site-packages/torch/distributed/distributed_c10d.py", "barrier"),
        ("/x/site-packages/torch/distributed/c10d_logger.py", "wrapper"),
        ("/home/me/task.py", "loss"),
        (f"{ROOT}/src/lockstep/engine/strategies/base.py", "forward"),
        (f"{ROOT}/src/lockstep/launch/api.py", "run_rank"),
        ("<frozen runpy>", "_run_code"),
    ]
    stack = tuple(rank_log.Frame(file, line, function) for line, (file, function) in enumerate(frames, 1))
    assert rank_log.place_of(stack) == "/home/me/task.py:3 in loss, in barrier"
    assert rank_log.place_of(stack[3:]) == f"{frames[3][0]}:4 in forward"
    assert rank_log.own_part(stack) == stack[:4]
