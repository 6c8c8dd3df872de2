"""Heartbeat and progress: ``heartbeat.json`` for everyone who looks at a run, a record for the rank's watchdog.

**heartbeat.json** says which process trains a run, whether it is alive, and how far it is. A killed process cannot
record its end. So its heartbeat names it by host, pid and creation time (pids are reused, the pair is not): a reader on
the same host sees the end at once, another after the beats have stopped for long enough.

**The record of a rank** has its activity. It changes when the rank makes progress, so it stops whatever blocks the
rank: a collective call that another rank does not join, for example. The rank's watchdog reads it
(:mod:`lockstep.launch.failure.watchdog`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import psutil

from lockstep.errors import StorageError
from lockstep.rundir.files import FileContent, write_json

INTERVAL_S = 1.0
#: A thread that sleeps so much longer than it wanted to was stopped with its process.
_PAUSE_S = 10.0
#: How long a run on another host may be silent. Generous: clocks differ, and NFS caches for up to a minute.
REMOTE_SILENCE_S = 180.0
#: Clock adjustments move a process's computed time of creation; a number is not used again this soon.
CREATED_TOLERANCE_S = 2.0
_FRESH_S = 10.0
_MAX_BYTES = 65_536


class Beat(FileContent):
    """The content of ``heartbeat.json``. Times are in seconds since the epoch.

    ``ended``: this was the last beat, although the process (a notebook's, for example) may still exist.
    ``handing_over``: another process is about to take over the run.
    ``began``: when this process began to train, at step ``began_at``, had it never been paused (suspended, SIGSTOP);
    older versions did not record it.
    """

    step: int = 0
    total: int | None = None
    counter: int
    pid: int
    created: float
    host: str
    updated: float
    ended: bool = False
    handing_over: bool = False
    began: float | None = None
    began_at: int = 0

    def seconds_left(self) -> float | None:
        if self.began is None or self.total is None:
            return None
        return seconds_left(self.step - self.began_at, self.updated - self.began, self.total - self.step)


def seconds_left(done: int, elapsed_s: float, remaining: int) -> float | None:
    """Estimate from the mean speed of the ``done`` steps, evaluations included; shown by bar, ``top`` and page."""
    return elapsed_s / done * max(0, remaining) if done > 0 and elapsed_s >= 0 else None


_paused_s = 0.0


def running_s() -> float:
    """Return seconds from a fixed point, without suspensions of the machine or of a :class:`Heartbeat`'s process."""
    return time.monotonic() - _paused_s


def read_beat(path: Path) -> Beat | None:
    return Beat.read(path, _MAX_BYTES)


def announce(path: Path, step: int = 0, total: int | None = None, **more: Any) -> Beat:
    """Write one beat of the calling process, from now on the run's, to ``path``. Raises :class:`StorageError`."""
    before = read_beat(path)
    beat = Beat(
        step=step,
        total=total,
        counter=before.counter + 1 if before else 0,
        pid=os.getpid(),
        created=psutil.Process().create_time(),
        host=socket.gethostname(),
        updated=time.time(),
        **more,
    )
    write_json(path, beat.model_dump(), durable=False)
    return beat


def is_alive(beat: Beat, now: float) -> bool:
    """Return whether the process of ``beat`` is alive, as far as this host can see at time ``now``."""
    if beat.ended:
        return False
    silence_s = now - beat.updated
    try:
        if beat.host == socket.gethostname():
            off_s = age_difference_s(beat.pid, beat.created)
            return off_s is not None and (off_s <= CREATED_TOLERANCE_S or abs(silence_s) < _FRESH_S)
    except psutil.AccessDenied:
        pass
    return abs(silence_s) < REMOTE_SILENCE_S


def age_difference_s(pid: int, created: float) -> float | None:
    """Return how far the creation time of process ``pid`` is from ``created``; ``None``: it has ended.

    Raises :class:`psutil.AccessDenied`.
    """
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else abs(process.create_time() - created)
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return None


def works_on(pid: int, folder: Path) -> bool:
    """Return whether the process is that of the run in ``folder``: it has something there open, or was started with it.

    Files in the folder, such as ``heartbeat.json``, may name any process; this cannot be written into a file.
    """
    run_folder = folder.resolve()
    try:
        if str(run_folder) in psutil.Process(pid).cmdline():
            return True
        links = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()]
    except (psutil.Error, OSError, ValueError, OverflowError):
        return False
    return any(file.is_relative_to(run_folder) for file in links)


class Heartbeat:
    """Beats once a second from a daemon thread; reporting a step costs an assignment.

    A beat that cannot be written (a full disk) is skipped: the heartbeat must not end the run.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._progress: tuple[int, int | None] = (0, None)
        self._began: tuple[float, int] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._folder: int | None = None

    def start(self, path: Path, step: int = 0, total: int | None = None) -> None:
        """Begin to beat into the file ``path``; the first beat has been written on return.

        Until :meth:`stop` this process keeps the run folder open: a heartbeat can be forged, an open file cannot.
        """
        assert self._thread is None, "a heartbeat is started once"
        with contextlib.suppress(OSError):
            self._folder = os.open(path.parent, os.O_RDONLY)
        self._progress = (step, total)
        self._beat(path)
        self._thread = threading.Thread(target=self._run, args=(path,), name="lockstep-heartbeat", daemon=True)
        self._thread.start()

    def beat(self, step: int, total: int | None) -> None:
        """Report the progress: optimizer steps done, and their number in total. The first call begins the training."""
        if self._began is None:
            self._began = (running_s(), step)
        self._progress = (step, total)

    def stop(self) -> None:
        """Write a last beat and end the thread. May be called twice, or without a start."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():  # at a limit of threads it was not started
            self._thread.join()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def _run(self, path: Path) -> None:
        global _paused_s
        asleep = time.monotonic()
        while not self._stop.wait(self._interval_s):
            late = time.monotonic() - asleep - self._interval_s
            if late > _PAUSE_S:
                _paused_s += late
            self._beat(path)
            asleep = time.monotonic()
        self._beat(path, ended=True)

    def _beat(self, path: Path, ended: bool = False) -> None:
        began = None
        began_at = 0
        if self._began is not None:
            since, began_at = self._began
            began = time.time() - (running_s() - since)
        with contextlib.suppress(StorageError):
            announce(path, *self._progress, ended=ended, began=began, began_at=began_at)


class Activity(IntEnum):
    """The activity of a rank."""

    STARTING = 0
    FIRST_STEP = 1
    WAITING_FOR_DATA = 2
    STEP = 3
    HOOKS = 4
    EVALUATING = 5
    COMPUTING_METRICS = 6
    SAVING = 7
    COMPILING = 8
    ENDING = 9
    AWAITING_SAVE = 10
    WRITING_PROFILE = 11
    MIRRORING = 12

    @property
    def is_untimed(self) -> bool:
        """Whether nothing is known about how long it may take: starts, compilers, metrics over all rows, saves."""
        return self in _UNTIMED

    def phrase(self, step: int) -> str:
        """Describe the activity of a rank that has finished ``step`` optimizer steps."""
        if self in (Activity.WAITING_FOR_DATA, Activity.STEP):
            return f"step {step + 1}" + (", waiting for data" if self is Activity.WAITING_FOR_DATA else "")
        return _PHRASES.get(self, self.name.lower().replace("_", " ")) + (f" after step {step}" if step else "")


_UNTIMED = {
    *(Activity.STARTING, Activity.COMPILING, Activity.COMPUTING_METRICS, Activity.SAVING),
    *(Activity.WRITING_PROFILE, Activity.ENDING, Activity.MIRRORING),
}
_PHRASES = {
    Activity.FIRST_STEP: "the first step",
    Activity.HOOKS: "hooks and logging",
    Activity.EVALUATING: "an evaluation",
    Activity.SAVING: "saving a checkpoint",
    Activity.AWAITING_SAVE: "waiting for rank 0 to save a checkpoint",
    Activity.WRITING_PROFILE: "writing a profile",
    Activity.MIRRORING: "copying the end of the run to its mirror",
}


@dataclass(frozen=True, slots=True)
class Sign:
    """The newest record of a rank: signs of progress, optimizer steps done."""

    beats: int = 0
    step: int = 0
    activity: Activity = Activity.STARTING


class Pulse:
    """This process's record."""

    def __init__(self) -> None:
        self._beats = 0
        self._step = 0
        self.activity = Activity.STARTING
        #: Set when an activity of unknown length ends: the watchdog sends that at once, while it has the interpreter.
        self.is_timed = threading.Event()

    @property
    def sign(self) -> Sign:
        return Sign(self._beats, self._step, self.activity)

    def at(self, activity: Activity, step: int | None = None) -> None:
        """Report progress: this process begins ``activity``, or continues it; ``step``: optimizer steps done."""
        if self.activity is Activity.FIRST_STEP and activity in (Activity.WAITING_FOR_DATA, Activity.STEP):
            activity = Activity.FIRST_STEP
        self._beats += 1
        self._step = self._step if step is None else step
        if self.activity in _UNTIMED and activity not in _UNTIMED:
            self.is_timed.set()
        self.activity = activity

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Set ``activity`` for the block, then the previous one; after an error it stays, for the failure report."""
        before = self.activity
        self.at(activity)
        yield
        self.at(before)


#: A process has one pulse, as it has one standard output.
pulse = Pulse()
