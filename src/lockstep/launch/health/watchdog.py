"""Hangs where no launcher of Lockstep's watches: under ``torchrun`` and ``srun`` every rank watches itself.

A thread of each rank tells the others over the store what its rank is at. A rank that has been silent for half the
time looks at what the others have told; when none of them moves, each writes down what it knows, one tells the
terminal, and the processes end, since nobody else would end them.

The thread needs the interpreter: a rank whose native code keeps it, or that is stopped, gives no sign at all, and
the others say so.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from torch.distributed.distributed_c10d import Store

from lockstep.errors import LockstepError, RankFailed
from lockstep.hardware.world import World
from lockstep.launch.health import stacks
from lockstep.launch.health.hang import (
    OWN_PAUSE_S,
    HangReport,
    Standstill,
    process_state,
    saving_progress,
    waits_for_data,
)
from lockstep.launch.local.rank_output import MARK, log_file
from lockstep.launch.local.worker import leave
from lockstep.telemetry.progress_board import Activity, pulse
from lockstep.telemetry.rundir import RunDir

#: How often in ``hang_timeout_s`` a rank tells the others what it is at, but for the least interval.
_TOLD_IN_TIMEOUT = 30
_LEAST_INTERVAL_S = 0.1
#: How long the ranks that do not tell the terminal wait for the one that does.
_TELL_S = 5.0


class _Word(BaseModel):
    """What a rank tells the others. ``number`` grows with each; ``untimed``: what it is at may take any time.

    ``host``, ``pid``: its process, whose state others on that host can see.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    number: int
    untimed: bool
    at: Standstill
    host: str = ""
    pid: int = 0


class Watchdog(threading.Thread):
    """Watches this process's pulse. Use :func:`watched`.

    Args:
        store: where the ranks have met; used over a connection of its own. ``None``: there is one rank.
        timeout_s: how long no rank may move; one at something untimed moves.
        hung: called once, with what is known of every rank, and whether this rank is the one to tell it.
        ask_workers: where the workers of this rank's loader are, if it may have some.
    """

    def __init__(
        self,
        world: World,
        store: Store | None,
        *,
        timeout_s: float,
        hung: Callable[[HangReport, bool], None],
        ask_workers: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        super().__init__(name="lockstep-watchdog", daemon=True)
        self._world = world
        self._store: Any = None if store is None else cast(Any, store).clone()
        self._timeout_s = timeout_s
        self._interval_s = max(_LEAST_INTERVAL_S, timeout_s / _TOLD_IN_TIMEOUT)
        self._hung = hung
        self._ask_workers = ask_workers
        self._workers: tuple[str, ...] | None = None
        self._ended = threading.Event()
        self._host = socket.gethostname()
        self._told = 0
        self._seen: object = None
        self._moved_at = self._looked_at = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()
        self.join(_TELL_S)

    def run(self) -> None:
        while not self._ended.wait(self._interval_s):
            with contextlib.suppress(RuntimeError):  # the store's process is gone: the ranks will notice, too
                report = self._look(time.monotonic())
                if report is not None and not self._ended.is_set():
                    silent = ("stopped", "unresponsive")
                    answering = [rank.rank for rank in report.ranks if rank.state not in silent]
                    self._hung(report, min(answering) == self._world.rank)
                    return

    def _look(self, now: float) -> HangReport | None:
        if now - self._looked_at > self._interval_s + OWN_PAUSE_S:  # this process had been stopped, or its machine
            self._moved_at += now - self._looked_at
        self._looked_at = now
        word = self._own_word(now)
        if self._store is not None:
            self._store.set(_key(self._world.rank), word.model_dump_json())
        if word.at.silent_s < self._timeout_s / 2:
            self._heard = {}
            return None
        ranks = {**self._others(now), self._world.rank: word}
        if len(ranks) < self._world.size:
            return None  # some have not begun
        if any(word.untimed or word.at.silent_s < self._timeout_s for word in ranks.values()):
            return None
        return HangReport(timeout_s=self._timeout_s, ranks=tuple(ranks[rank].at for rank in sorted(ranks)))

    def _own_word(self, now: float) -> _Word:
        sign = pulse.sign
        saving = sign.activity is Activity.SAVING
        progress = (sign, saving_progress(os.getpid(), sign.writer) if saving else None)
        if progress != self._seen:
            self._seen, self._moved_at = progress, now
        silent_s = now - self._moved_at
        stack = main_stack() if silent_s >= self._timeout_s / 2 else ()
        if not stack:
            self._workers = None
        elif self._workers is None:
            self._workers = self._ask_workers() if waits_for_data(sign, stack) else ()
        self._told += 1
        at = Standstill.of(self._world.rank, sign, silent_s=silent_s, stack=stack, workers=self._workers or ())
        process: dict[str, Any] = {"host": self._host, "pid": os.getpid()}
        return _Word(number=self._told, untimed=sign.activity.is_untimed, at=at, **process)

    def _others(self, now: float) -> dict[int, _Word]:
        """The newest word of each other rank that has begun; one that is not renewed grows old here."""
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        if self._store is None or not others or not self._store.check([_key(rank) for rank in others]):
            return {}
        found = {}
        for rank, text in zip(others, self._store.multi_get([_key(rank) for rank in others]), strict=True):
            with contextlib.suppress(ValidationError):
                word = _Word.model_validate_json(text)
                if self._heard.get(rank, (0, now))[0] != word.number:
                    self._heard[rank] = (word.number, now)
                age = now - self._heard[rank][1]
                state = process_state(word.pid) if word.host == self._host else "running"
                if state == "running" and age > max(OWN_PAUSE_S, 3 * self._interval_s):
                    state = "unresponsive" if word.host == self._host else "stopped"
                at = word.at.model_copy(update={"silent_s": word.at.silent_s + age, "state": state})
                found[rank] = word.model_copy(update={"at": at})
        return found


def _key(rank: int) -> str:
    return f"lockstep/watchdog/{rank}"


def main_stack() -> stacks.Stack:
    """Where this process's main thread is in Python, innermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = []
    while frame is not None:
        found.append(stacks.Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


@contextmanager
def watched(run: RunDir, world: World, store: Store | None, *, timeout_s: float, keeps: bool) -> Iterator[None]:
    """Inside, this process ends with exit code 1 when no rank has made progress for ``timeout_s``.

    Args:
        run: its folder gets the stacks, in ``logs/``, and (``keeps``: this rank writes it) the run's failure.
    """
    terminal = os.dup(2)  # the rank's own output may go to its log by then

    def hung(report: HangReport, tells: bool) -> NoReturn:
        error = RankFailed("\n".join([report.headline, report.table()]), why=report.cause.why, fix=report.cause.fix)
        _write_log(log_file(run.logs, world.rank), world.rank, error)
        if keeps:
            with contextlib.suppress(LockstepError):  # the folder may be what failed
                run.update(status="failed", error=str(error))
        if tells:
            with contextlib.suppress(OSError):
                os.write(terminal, f"error: {error}\n".encode())
        else:
            time.sleep(_TELL_S)
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
    """Inside, this process and the loader workers that it starts tell their stacks when they are asked to."""
    with contextlib.ExitStack() as inside:
        with contextlib.suppress(OSError):  # the folder may not be this node's to write, and the run goes on
            log = inside.enter_context(path.open("a", encoding="utf-8"))
            if signal.getsignal(stacks.SIGNAL) == signal.SIG_DFL:  # else it is the script's that trains here
                inside.enter_context(stacks.told_on_request(log))
        yield


def _write_log(path: Path, rank: int, error: RankFailed) -> None:
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
        log.write(f"{MARK}rank {rank} ends: {error}\n{MARK}rank {rank}, all threads\n")
        log.flush()
        faulthandler.dump_traceback(log, all_threads=True)
