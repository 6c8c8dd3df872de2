"""Supervision of real processes that are no ranks: phases, graces, and whose failure it is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.launch.local.launcher import Supervisor
from tests.launch.conftest import wait_for

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
STOPPING = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print('up', flush=True)
time.sleep(600)
"""


class Ranks:
    """Processes by rank; ``stop`` is what the supervisor is told."""

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.stop: int | None = None

    def supervise(self, *programs: str, stop_grace_s: float = 30.0, failure_grace_s: float = 30.0) -> Supervisor:
        for rank, program in enumerate(programs):
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdout=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.processes[rank] = process
        for rank, program in enumerate(programs):
            if "up" in program:
                pipe = self.processes[rank].stdout
                assert pipe is not None
                pipe.readline()
        return Supervisor(
            self.processes,
            stop_requested=lambda: self.stop,
            stop_grace_s=stop_grace_s,
            failure_grace_s=failure_grace_s,
        )


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for process in made.processes.values():
        process.kill()
        process.communicate()


def run(supervisor: Supervisor) -> Supervisor:
    wait_for(supervisor.check)
    return supervisor


def wait_until_ended(supervisor: Supervisor) -> None:
    wait_for(lambda: all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in supervisor.pids.values()))


def test_all_end_well(ranks: Ranks) -> None:
    supervisor = run(ranks.supervise("", ""))
    assert (supervisor.phase, supervisor.exit_code, supervisor.may_restart) == ("running", 0, False)


def test_a_failure_ends_those_who_listen(ranks: Ranks) -> None:
    supervisor = run(ranks.supervise("import sys; sys.exit(1)", SLEEP, STOPPING))
    assert supervisor.phase == "failing"
    assert {rank: end.exit_code for rank, end in supervisor.exits.items()} == {0: 1, 1: -signal.SIGTERM, 2: 143}
    assert [end.rank for end in supervisor.failed] == [0]
    assert (supervisor.exit_code, supervisor.may_restart) == (1, True)


def test_a_failure_kills_those_who_do_not_listen(ranks: Ranks) -> None:
    supervisor = run(ranks.supervise("import os; os.kill(os.getpid(), 9)", DEAF, failure_grace_s=0.1))
    assert [(end.rank, end.ended_by_launcher) for end in supervisor.failed] == [(0, False)]
    assert supervisor.exits[1].exit_code == -signal.SIGKILL
    assert supervisor.exits[1].ended_by_launcher


def test_wrong_usage_is_not_tried_again(ranks: Ranks) -> None:
    supervisor = ranks.supervise("import sys; sys.exit(1)", "import sys; sys.exit(2)")
    wait_until_ended(supervisor)
    assert (run(supervisor).exit_code, supervisor.may_restart) == (2, False)


def test_the_verdict_of_a_rank_that_is_told_of_anothers_failure_decides(ranks: Ranks) -> None:
    """Wrong usage that one rank finds is never a consequence, also where another one's failure was seen before."""
    supervisor = run(ranks.supervise("import sys; sys.exit(1)", STOPPING.replace("143", "2")))
    assert not supervisor.exits[1].ended_by_launcher
    assert (supervisor.exit_code, supervisor.may_restart) == (2, False)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop(ranks: Ranks, number: int, code: int) -> None:
    supervisor = ranks.supervise(STOPPING, STOPPING)
    assert not supervisor.check()
    ranks.stop = number
    run(supervisor)
    assert (supervisor.phase, supervisor.exit_code, supervisor.failed) == ("stopping", code, [])


def test_a_stop_that_one_rank_was_asked_for(ranks: Ranks) -> None:
    supervisor = ranks.supervise(STOPPING, STOPPING)
    for process in ranks.processes.values():
        process.terminate()
    run(supervisor)
    assert (supervisor.exit_code, supervisor.failed) == (143, [])


def test_a_stop_that_came_too_late_changes_nothing(ranks: Ranks) -> None:
    supervisor = ranks.supervise("", "")
    wait_until_ended(supervisor)
    ranks.stop = signal.SIGTERM
    assert run(supervisor).exit_code == 0


def test_a_rank_that_fails_while_stopping_ends_the_others_soon(ranks: Ranks) -> None:
    program = STOPPING.replace("143", "1")
    supervisor = ranks.supervise(program, DEAF, stop_grace_s=600, failure_grace_s=0.1)
    ranks.stop = signal.SIGTERM
    run(supervisor)
    assert (supervisor.phase, supervisor.exit_code, supervisor.forced) == ("failing", 1, False)
    assert [end.rank for end in supervisor.failed] == [0]


def test_ranks_that_do_not_follow_a_stop(ranks: Ranks) -> None:
    supervisor = ranks.supervise(STOPPING, DEAF, stop_grace_s=0.1)
    ranks.stop = signal.SIGTERM
    run(supervisor)
    assert (supervisor.forced, supervisor.exit_code, supervisor.failed) == (True, 1, [])


def test_a_stop_spares_the_ranks_children_until_it_has_ended(ranks: Ranks, tmp_path: Path) -> None:
    child = tmp_path / "child"
    serving = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "def finish(*_):\n"
        "    time.sleep(0.3)\n"
        f"    pathlib.Path({str(child)!r}).write_text(str(child.pid if child.poll() is None else 0))\n"
        "    os._exit(143)\n"
        "signal.signal(signal.SIGTERM, finish)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    supervisor = ranks.supervise(serving)
    ranks.stop = signal.SIGTERM
    run(supervisor)
    pid = int(child.read_text())
    assert pid  # it was alive for as long as the rank could need it
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_ends_are_bracketed_in_time(ranks: Ranks) -> None:
    begin = time.time()
    end = run(ranks.supervise("import sys; sys.exit(1)")).exits[0]
    assert begin <= end.time <= time.time()
