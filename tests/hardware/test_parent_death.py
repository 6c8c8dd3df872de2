"""Processes that end with the one that needs them: killed for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from lockstep.hardware import parent_death
from tests.gloo import ROOT, clean_environment
from tests.launch.conftest import wait_for

#: A parent that starts a child, which tells its number once it is bound, and waits.
PARENT = """
import subprocess, sys, threading, time
{before}
def start():
    subprocess.Popen([sys.executable, "-c", {child!r}])
    {then}
{run}
time.sleep(600)
"""
CHILD = """
import os, sys, time
from pathlib import Path
from lockstep.hardware import parent_death
{bind}
Path({ready!r}).write_text(str(os.getpid()))
time.sleep(600)
"""


def parent_of(tmp_path: Path, bind: str, *, before: str = "", thread: bool = False) -> subprocess.Popen[bytes]:
    child = CHILD.format(bind=bind, ready=str(tmp_path / "child"))
    run = "thread = threading.Thread(target=start); thread.start(); thread.join()" if thread else "start()"
    script = PARENT.format(child=child, before=before, then="time.sleep(0)", run=run)
    environ = clean_environment(PYTHONPATH=str(ROOT / "src"))
    return subprocess.Popen([sys.executable, "-c", script], env=environ, stdin=subprocess.DEVNULL)


def child_of(tmp_path: Path) -> psutil.Process:
    path = tmp_path / "child"
    wait_for(lambda: path.exists() and path.read_text() != "")
    return psutil.Process(int(path.read_text()))


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    parent = parent_of(tmp_path, "parent_death.die_with_parent(os.getppid())")
    child = child_of(tmp_path)
    parent.kill()
    parent.wait()
    wait_for(lambda: gone(child))


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_child_that_is_late_ends_at_once() -> None:
    script = "import os; from lockstep.hardware import parent_death; parent_death.die_with_parent(1 << 22); os._exit(0)"
    environ = clean_environment(PYTHONPATH=str(ROOT / "src"))
    assert subprocess.run([sys.executable, "-c", script], env=environ, check=False).returncode == -signal.SIGKILL


def test_the_lifeline_follows_the_process_not_the_thread(tmp_path: Path) -> None:
    bind = "parent_death.watch_pipe(parent_death.take_lifeline()); assert sys.stdin.read() == ''"
    before = "from lockstep.hardware import parent_death; parent_death.make_lifeline()"
    parent = parent_of(tmp_path, bind, before=before, thread=True)
    child = child_of(tmp_path)
    assert not gone(child)  # the thread that started it has ended
    parent.kill()
    parent.wait()
    wait_for(lambda: gone(child))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_loader_worker_dies_with_its_rank(tmp_path: Path, method: str) -> None:
    module = tmp_path / "loading.py"
    module.write_text(
        "import multiprocessing, os, time\n"
        "from pathlib import Path\n"
        "from lockstep.hardware import parent_death\n"
        "def work():\n"
        "    parent_death.bind_loader_worker()\n"
        f"    Path({str(tmp_path / 'child')!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    context.Process(target=work, daemon=True).start()\n"
        "    time.sleep(600)\n"
    )
    rank = subprocess.Popen([sys.executable, str(module)], env=clean_environment(PYTHONPATH=str(ROOT / "src")))
    worker = child_of(tmp_path)
    worker.send_signal(signal.SIGINT)  # Ctrl-C is the rank's business
    assert not gone(worker)
    rank.kill()
    rank.wait()
    wait_for(lambda: gone(worker))


def test_marked_processes_are_killed_and_others_are_not() -> None:
    mark = uuid.uuid4().hex
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        subprocess.Popen(sleep, env={**os.environ, "MARK": mark}) as marked,
        subprocess.Popen(sleep, env={**os.environ, "MARK": mark[1:]}) as other,
    ):
        # Until a process has begun its program it still shows its parent's environment.
        wait_for(lambda: psutil.Process(marked.pid).environ().get("MARK") == mark)
        assert parent_death.kill_marked("MARK", mark) == [marked.pid]
        assert marked.wait() == -signal.SIGKILL
        assert other.poll() is None
        other.kill()
