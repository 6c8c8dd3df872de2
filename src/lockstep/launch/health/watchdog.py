"""Hangs without Lockstep's launcher: under ``torchrun`` and ``srun`` every rank checks itself.

A thread of each rank sends heartbeats with the rank's activity to the others, over the store. A rank that has made no
progress for half the time-out reads those of the others. When no rank makes progress, each writes what it knows to its
log, one prints the report, and the processes end, since no other process would end them.

The thread needs the interpreter: a rank whose native code keeps it, or that is stopped, sends no heartbeat, and the
others report that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

from pydantic import ValidationError
from torch.distributed.distributed_c10d import Store

from lockstep.errors import LockstepError, RankFailed
from lockstep.hardware.world import World
from lockstep.launch.health import hang, stacks
from lockstep.launch.local.rank_output import MARK, log_file
from lockstep.launch.local.worker import leave
from lockstep.telemetry.files import FileContent
from lockstep.telemetry.progress_board import pulse
from lockstep.telemetry.rundir import RunDir

#: Heartbeats in ``hang_timeout_s``, with at least the interval between them.
_BEATS_IN_TIMEOUT = 30
_LEAST_INTERVAL_S = 0.1
#: How long the other ranks wait for the one that prints the report.
_PRINT_S = 5.0


class _Heartbeat(FileContent):
    """What a rank sends to the others. ``number`` grows with each; ``untimed``: its activity may take any time.

    ``host``, ``pid``: its process, whose state can be read on that host.
    """

    number: int
    untimed: bool
    at: hang.Standstill
    host: str = ""
    pid: int = 0


class Watchdog(threading.Thread):
    """Checks this process's progress. Use :func:`watched`.

    Args:
        store: of the ranks; used over a separate connection. ``None``: there is one rank.
        timeout_s: how long all ranks may be without progress; untimed activities count as progress.
        hung: called once, with what is known of every rank, and whether this rank is the one to print it.
        ask_workers: returns where the workers of this rank's loader are, if it may have some.
    """

    def __init__(
        self,
        world: World,
        store: Store | None,
        *,
        timeout_s: float,
        hung: Callable[[hang.HangReport, bool], None],
        ask_workers: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        super().__init__(name="lockstep-watchdog", daemon=True)
        self._world = world
        self._store: Any = None if store is None else cast(Any, store).clone()
        self._timeout_s = timeout_s
        self._interval_s = max(_LEAST_INTERVAL_S, timeout_s / _BEATS_IN_TIMEOUT)
        self._hung = hung
        self._ask_workers = ask_workers
        self._workers: tuple[str, ...] | None = None
        self._ended = threading.Event()
        self._host = socket.gethostname()
        self._sent = 0
        self._checked_at = time.monotonic()
        self._silence = hang.Silence(os.getpid(), self._checked_at)
        self._received: dict[int, tuple[int, float]] = {}

    def end(self) -> None:
        """Stop checking."""
        self._ended.set()
        self.join(_PRINT_S)

    def run(self) -> None:
        while not self._ended.wait(self._interval_s):
            with contextlib.suppress(RuntimeError):  # the store's process is gone: the ranks will fail of that
                report = self._check(time.monotonic())
                if report is not None and not self._ended.is_set():
                    silent = ("stopped", "unresponsive")
                    answering = [rank.rank for rank in report.ranks if rank.state not in silent]
                    self._hung(report, min(answering) == self._world.rank)
                    return

    def _check(self, now: float) -> hang.HangReport | None:
        if (
            now - self._checked_at > self._interval_s + hang.OWN_PAUSE_S
        ):  # this process had been stopped, or its machine
            self._silence.pause(now - self._checked_at)
        self._checked_at = now
        own = self._own_heartbeat(now)
        if self._store is not None:
            self._store.set(_key(self._world.rank), own.model_dump_json())
        if own.at.silent_s < self._timeout_s / 2:
            self._received = {}
            return None
        ranks = {**self._others(now), self._world.rank: own}
        if len(ranks) < self._world.size:
            return None  # some have not begun
        if not hang.is_hang(((beat.at.silent_s, beat.untimed) for beat in ranks.values()), self._timeout_s):
            return None
        return hang.HangReport(timeout_s=self._timeout_s, ranks=tuple(ranks[rank].at for rank in sorted(ranks)))

    def _own_heartbeat(self, now: float) -> _Heartbeat:
        sign = pulse.sign
        silent_s = self._silence.update(sign, now)
        stack = main_stack() if silent_s >= self._timeout_s / 2 else ()
        if not stack:
            self._workers = None
        elif self._workers is None:
            self._workers = self._ask_workers() if hang.waits_for_data(sign, stack) else ()
        self._sent += 1
        at = hang.Standstill.of(self._world.rank, sign, silent_s=silent_s, stack=stack, workers=self._workers or ())
        process: dict[str, Any] = {"host": self._host, "pid": os.getpid()}
        return _Heartbeat(number=self._sent, untimed=sign.activity.is_untimed, at=at, **process)

    def _others(self, now: float) -> dict[int, _Heartbeat]:
        """The last heartbeat of each other rank that has begun, with the time since it was received."""
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        if self._store is None or not others or not self._store.check([_key(rank) for rank in others]):
            return {}
        found = {}
        for rank, text in zip(others, self._store.multi_get([_key(rank) for rank in others]), strict=True):
            with contextlib.suppress(ValidationError):
                beat = _Heartbeat.model_validate_json(text)
                if self._received.get(rank, (0, now))[0] != beat.number:
                    self._received[rank] = (beat.number, now)
                age = now - self._received[rank][1]
                state = hang.process_state(beat.pid) if beat.host == self._host else "running"
                if state == "running" and age > max(hang.OWN_PAUSE_S, 3 * self._interval_s):
                    state = "unresponsive" if beat.host == self._host else "stopped"
                at = beat.at.model_copy(update={"silent_s": beat.at.silent_s + age, "state": state})
                found[rank] = beat.model_copy(update={"at": at})
        return found


def _key(rank: int) -> str:
    return f"lockstep/watchdog/{rank}"


def main_stack() -> stacks.Stack:
    """Where this process's main thread is in Python, innermost call first."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = traceback.walk_stack(main) if main is not None else ()
    return tuple(stacks.Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in calls)


@contextmanager
def watched(run: RunDir, world: World, store: Store | None, *, timeout_s: float, keeps: bool) -> Iterator[None]:
    """Inside, this process ends with exit code 1 when no rank has made progress for ``timeout_s``.

    Args:
        run: its folder gets the stacks, in ``logs/``, and (``keeps``: this rank writes it) the run's failure.
    """
    terminal = os.dup(2)  # the rank's output may go to its log by then

    def hung(report: hang.HangReport, prints: bool) -> NoReturn:
        error = RankFailed(
            "\n".join([report.headline, report.table()]), why=report.cause.title, fix=report.cause.advice
        )
        _write_log(log_file(run.logs, world.rank), world.rank, error)
        if keeps:
            with contextlib.suppress(LockstepError):  # the folder may be what failed
                run.update(status="failed", error=str(error))
        if prints:
            with contextlib.suppress(OSError):
                os.write(terminal, f"error: {error}\n".encode())
        else:
            time.sleep(_PRINT_S)
        leave(1)

    watchdog = Watchdog(
        world,
        store,
        timeout_s=timeout_s,
        hung=hung,
        ask_workers=lambda: stacks.ask_workers(os.getpid(), world.rank, run.logs),
    )
    before, pulse.is_watched = pulse.is_watched, True
    watchdog.start()
    try:
        with _answering(log_file(run.logs, world.rank)):
            yield
    finally:
        watchdog.end()
        pulse.is_watched = before
        os.close(terminal)


@contextmanager
def _answering(path: Path) -> Iterator[None]:
    """Inside, this process and its loader workers write their stacks to ``path`` on request."""
    with contextlib.ExitStack() as inside:
        with contextlib.suppress(OSError):  # this node may be unable to write the folder, and the run continues
            log = inside.enter_context(path.open("a", encoding="utf-8"))
            if signal.getsignal(stacks.SIGNAL) == signal.SIG_DFL:  # else the script that trains here uses it
                inside.enter_context(stacks.written_on_request(log))
        yield


def _write_log(path: Path, rank: int, error: RankFailed) -> None:
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
        log.write(f"{MARK}rank {rank} ends: {error}\n{MARK}rank {rank}, all threads\n")
        log.flush()
        faulthandler.dump_traceback(log, all_threads=True)
