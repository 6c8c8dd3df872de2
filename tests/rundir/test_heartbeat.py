"""Signs of life: cheap, monotonic, and no reason to die."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lockstep.config import RunConfig
from lockstep.rundir import heartbeat as heartbeat_module
from lockstep.rundir.folder import RunDir
from lockstep.rundir.heartbeat import Activity, Beat, Heartbeat, Pulse, Sign, announce, read_beat


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "a", RunConfig(), run_id="run-00000001", command=[])


def wait_for(run: RunDir, counter: int) -> Beat:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        beat = run.progress()
        assert beat is not None
        if beat.counter >= counter:
            return beat
        time.sleep(0.005)
    raise AssertionError("no beat came")


def test_a_beat_names_its_process(run: RunDir) -> None:
    beat = announce(run.heartbeat_file, 4, 9)
    assert beat == read_beat(run.heartbeat_file) == run.progress()
    assert (beat.pid, beat.host, beat.step, beat.total) == (os.getpid(), socket.gethostname(), 4, 9)
    assert beat.created == psutil.Process().create_time()


def test_the_counter_goes_on_over_attempts(run: RunDir) -> None:
    counters = []
    for _ in range(3):
        heartbeat = Heartbeat(interval_s=60)
        heartbeat.start(run.heartbeat_file)
        heartbeat.stop()
        beat = run.progress()
        assert beat is not None
        counters.append(beat.counter)
    assert counters == sorted(set(counters))


def test_progress_is_written_by_the_thread(run: RunDir) -> None:
    heartbeat = Heartbeat(interval_s=0.01)
    heartbeat.start(run.heartbeat_file, total=100)
    first = run.progress()
    assert first is not None and (first.step, first.total) == (0, 100)
    for step in range(50):
        heartbeat.beat(step, 100)
    assert wait_for(run, first.counter + 2).step == 49
    heartbeat.beat(50, 100)
    heartbeat.stop()
    last = run.progress()
    assert last is not None and last.step == 50 and last.ended


def test_time_in_which_the_process_was_stopped_does_not_count_for_what_is_left(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, naps = [0.0], iter([(60.0, False), (1.0, False), (3600.0, False), (1.0, False), (0.0, True)])
    monkeypatch.setattr(heartbeat_module, "_paused_s", 0.0)
    monkeypatch.setattr(heartbeat_module, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1e9 + now[0]))
    heartbeat = Heartbeat(interval_s=60.0)

    def wait(_: float) -> bool:
        slept, ended = next(naps)
        now[0] += slept
        heartbeat.beat(10 if now[0] > 60 else 0, 40)
        return ended

    monkeypatch.setattr(heartbeat._stop, "wait", wait)
    heartbeat._run(run.heartbeat_file)
    beat = run.progress()
    assert beat is not None and beat.updated - 1e9 == 3662.0
    assert beat.seconds_left() == 3 * (3662.0 - 60.0 - 3540.0)


def test_a_run_whose_heart_was_stopped_is_not_on_although_its_process_is(run: RunDir) -> None:
    heartbeat = Heartbeat()
    heartbeat.start(run.heartbeat_file)
    run.update(status="running")
    assert run.status() == "running"
    heartbeat.stop()
    assert run.status() == "lost"


def test_a_heartbeat_that_cannot_write_goes_on_and_ends(run: RunDir, tmp_path: Path) -> None:
    heartbeat = Heartbeat(interval_s=0.01)
    heartbeat.start(run.heartbeat_file)
    run.path.rename(tmp_path / "moved")
    time.sleep(0.05)
    (tmp_path / "moved").rename(run.path)
    wait_for(run, 5)
    heartbeat.stop()
    beat = run.progress()
    assert beat is not None
    assert beat.counter >= 5


def test_stopping_twice_or_before_the_start_is_harmless(run: RunDir) -> None:
    Heartbeat().stop()
    heartbeat = Heartbeat()
    heartbeat.start(run.heartbeat_file)
    heartbeat.stop()
    heartbeat.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "lockstep-heartbeat"]


def test_a_process_ends_although_nobody_stopped_its_heartbeat(run: RunDir) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from lockstep.rundir.folder import RunDir; from lockstep.rundir.heartbeat import Heartbeat\n"
        "Heartbeat(0.01).start(RunDir.open(Path(sys.argv[1])).heartbeat_file)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, run.path], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stderr == ""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def test_the_record_of_a_rank_is_its_progress() -> None:
    pulse = Pulse()
    pulse.at(Activity.FIRST_STEP, 4)
    pulse.at(Activity.WAITING_FOR_DATA)
    pulse.at(Activity.STEP)
    assert pulse.activity is Activity.FIRST_STEP, "the first step lasts until something else begins"
    pulse.at(Activity.HOOKS, 5)
    pulse.at(Activity.STEP)
    with pulse.during(Activity.SAVING):
        pulse.at(Activity.SAVING)
    assert pulse.sign == Sign(8, 5, Activity.STEP)


def test_every_activity_has_words() -> None:
    assert Activity.STEP.phrase(3) == "step 4"
    assert Activity.WAITING_FOR_DATA.phrase(3) == "step 4, waiting for data"
    assert Activity.HOOKS.phrase(3) == "hooks and logging after step 3"
    assert all(activity.phrase(0) for activity in Activity)
