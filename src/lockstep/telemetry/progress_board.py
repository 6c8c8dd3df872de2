"""What each rank is doing, for the launcher that watches it: one small record per rank, in shared memory.

A record is written where the rank makes progress, not by a thread, so it stops changing whatever blocks the rank: a
signal, native code that holds the interpreter lock, a collective call that another rank does not join. Writing it
costs a system call. A process without a launcher writes nothing: there the rank watches itself
(:mod:`lockstep.launch.health.watchdog`).
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

#: Where the launcher's records are, for its ranks.
PULSES = "LOCKSTEP_PULSES"

_RECORD = struct.Struct("<qqqq")


class Activity(IntEnum):
    """What a rank is at."""

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

    @property
    def is_untimed(self) -> bool:
        """Whether nothing is known about how long it may take: first calls, compilers, metrics over all rows."""
        first = self in (Activity.STARTING, Activity.FIRST_STEP, Activity.COMPILING)
        return first or self in (Activity.COMPUTING_METRICS, Activity.WRITING_PROFILE, Activity.ENDING)

    @property
    def is_evaluation(self) -> bool:
        return self in (Activity.EVALUATING, Activity.COMPUTING_METRICS)

    def phrase(self, step: int) -> str:
        """What a rank that has finished ``step`` optimizer steps is at, in words."""
        if self in (Activity.WAITING_FOR_DATA, Activity.STEP):
            return f"step {step + 1}" + (", waiting for data" if self is Activity.WAITING_FOR_DATA else "")
        return _PHRASES.get(self, self.name.lower().replace("_", " ")) + (f" after step {step}" if step else "")


_PHRASES = {
    Activity.FIRST_STEP: "the first step",
    Activity.HOOKS: "hooks and logging",
    Activity.EVALUATING: "an evaluation",
    Activity.SAVING: "saving a checkpoint",
    Activity.AWAITING_SAVE: "waiting for rank 0 to save a checkpoint",
    Activity.WRITING_PROFILE: "writing a profile",
}


@dataclass(frozen=True, slots=True)
class Sign:
    """The newest record of a rank: signs of progress, optimizer steps done; ``writer``: thread that saves."""

    beats: int = 0
    step: int = 0
    activity: Activity = Activity.STARTING
    writer: int = 0


class PulseBoard:
    """The records of all ranks of one launcher, made and read by it. Linux only.

    The memory has no name, so it is gone with the launcher; ranks reach it through the launcher's ``/proc`` entry.
    """

    def __init__(self, ranks: int) -> None:
        self._bytes = _RECORD.size * ranks
        self._fd = os.memfd_create("lockstep-pulses")
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.clear()

    def clear(self) -> None:
        os.pwrite(self._fd, bytes(self._bytes), 0)

    def read(self) -> list[Sign]:
        """By local rank."""
        records = _RECORD.iter_unpack(os.pread(self._fd, self._bytes, 0))
        return [Sign(beats, step, Activity(activity), writer) for beats, step, activity, writer in records]

    def close(self) -> None:
        os.close(self._fd)


class Pulse:
    """This process's record."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._place = self._beats = self._step = self._writer = 0
        self.activity = Activity.STARTING
        #: Whether a launcher looks, so that what takes long had better be said.
        self.is_watched = False

    def connect(self, environ: Mapping[str, str]) -> None:
        """Report to the launcher named in ``environ`` from now on, if there is one."""
        path = environ.get(PULSES)
        if path is None or self._fd is not None:
            return
        with contextlib.suppress(OSError):  # it is gone already, or belongs to another user
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            self.is_watched = True
            self._place = int(environ.get("LOCAL_RANK", "0")) * _RECORD.size

    @property
    def sign(self) -> Sign:
        return Sign(self._beats, self._step, self.activity, self._writer)

    def at(self, activity: Activity, step: int | None = None) -> None:
        """Report progress: this process begins ``activity``, or continues it; ``step``: optimizer steps done."""
        if self.activity is Activity.FIRST_STEP and activity in (Activity.WAITING_FOR_DATA, Activity.STEP):
            activity = Activity.FIRST_STEP
        self._beats += 1
        self._step = self._step if step is None else step
        self.activity = activity
        self._write()

    def goes_on(self) -> None:
        self.at(self.activity)

    def writes_in(self, thread: int) -> None:
        """What ``thread`` reads and writes counts as progress of a save, too; 0: it has ended. Not for ``thread``."""
        self._writer = thread
        self._write()

    def _write(self) -> None:
        if self._fd is not None:
            os.pwrite(self._fd, _RECORD.pack(self._beats, self._step, self.activity, self._writer), self._place)

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """``activity`` in the block, the previous one afterwards; after an error it stays, for the failure report."""
        before = self.activity
        self.at(activity)
        yield
        self.at(before)


#: A process has one pulse, as it has one standard output.
pulse = Pulse()
