"""Whether a run is on is judged by its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.errors import RunFolderError
from lockstep.rundir.files import read_json, write_json
from lockstep.rundir.folder import RunDir, RunRecord
from tests.rundir.runs import make_run

# Alive or lost.

WAITER = (
    "import sys, time; from pathlib import Path; from lockstep.config import RunConfig\n"
    "from lockstep.rundir.folder import RunDir\nfrom lockstep.rundir.heartbeat import Heartbeat\n"
    "run = RunDir.create(Path(sys.argv[1]), RunConfig(), run_id='run-00000001', command=[])\n"
    "if sys.argv[2] == 'running':\n"
    "    run.update(status='running'); Heartbeat().start(run.heartbeat_file, 3, 10)\n"
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
    with pytest.raises(RunFolderError, match="run-00000001") as caught:
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


def test_a_pending_run_is_lost_at_once_when_its_launcher_is_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    program = "import sys; from pathlib import Path; from lockstep.rundir.heartbeat import announce; "
    subprocess.run([sys.executable, "-c", f"{program} announce(Path(sys.argv[1]))", run.heartbeat_file], check=True)
    assert run.read().status == "pending" and run.status() == "lost"


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
