"""Hangs: ranks that make no progress, whatever started them.

A thread of each rank sends heartbeats with the rank's activity to the others, over the store. A rank that has made no
progress for half the time-out reads those of the others. When no rank makes progress, the first to notice publishes its
report in the store, and all ranks end with that one: each writes it to its log, the first prints it (or each records it
for its launcher). A rank whose collective call has expired asks the others for their stacks in the same way, and
reports the one that it has waited for.

A rank that fails while there is such a report has lost the connection to one that has ended with it, so it ends with
the report too, and its error is not recorded.

The thread needs the interpreter: a rank whose native code keeps it, or that is stopped, sends no heartbeat, and the
others report that. On the same machine they ask for its stack by a signal. When all ranks are in such code, none
reports it.
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
from lockstep.launch.failure import hang, records
from lockstep.launch.failure.causes import expired_s
from lockstep.launch.process.rank_log import (
    MARK,
    SIGNAL,
    Frame,
    Stack,
    ask_stack,
    ask_workers,
    leave,
    log_file,
    stacks_on_request,
)
from lockstep.rundir.files import FileContent
from lockstep.rundir.folder import RunDir
from lockstep.rundir.heartbeat import pulse

#: Heartbeats in ``hang_timeout_s``, with at least the interval between them.
_BEATS_IN_TIMEOUT = 30
_LEAST_INTERVAL_S = 0.1
#: Seconds between the messages of a rank for each rank of the run: the store gets at most 4,000 in a second.
_INTERVAL_OF_RANK_S = 0.0005
#: Of more ranks, not all read the heartbeats of all after a hang.
_ALL_READ = 64
#: How long a rank stays, after the next check of the others, so that they find the hang and not the loss of a rank.
_OTHERS_S = 5.0
#: After a longer pause between two checks this process had been stopped itself, and maybe the other ranks too.
_OWN_PAUSE_S = 5.0
#: How often a rank looks whether another one asks for its stack, or whether it is to stop.
_ASKED_INTERVAL_S = 0.5
_ASKED = "lockstep/watchdog/asked"
_REPORT = "lockstep/watchdog/report"
#: With its number: a rank whose collective call has expired, too.
_EXPIRED = "lockstep/watchdog/expired/"


class _Heartbeat(FileContent):
    """Message of a rank to the others. ``number`` grows with each.

    ``limit_s``: how long its activity may go without progress; ``None``: any time. ``host``, ``pid``: its process.
    """

    number: int
    limit_s: float | None
    at: hang.Standstill
    host: str
    pid: int


class Watchdog(threading.Thread):
    """Checks this process's progress. Use :func:`watched`.

    ``store``: of the ranks, if there are several; used over a separate connection. ``hung``: called once, with the
    report on all ranks; it ends the process. ``logs``: the folder of the ranks' logs.
    """

    def __init__(
        self,
        world: World,
        store: Store | None,
        *,
        timeout_s: float,
        hung: Callable[[hang.HangReport], None],
        logs: Path,
    ) -> None:
        super().__init__(name="lockstep-watchdog", daemon=True)
        self._world = world
        self._timeout_s = timeout_s
        self._hung = hung
        self._logs = logs
        self._store: Any = None if store is None else cast(Any, store).clone()
        crowd_s = _INTERVAL_OF_RANK_S * world.size
        self.interval_s = max(_LEAST_INTERVAL_S, timeout_s / _BEATS_IN_TIMEOUT, crowd_s)
        self._wait_s = min(self.interval_s, max(_ASKED_INTERVAL_S, crowd_s))
        self._worker_place: str | None = None
        self._has_ended = False
        self._host = socket.gethostname()
        self._sent = 0
        self._is_asked = False
        self._checked_at = time.monotonic()
        self._moved_at = self._checked_at
        self._beats = -1
        self._received: dict[int, tuple[int, float]] = {}
        self._examined: Exception | None = None

    def end(self) -> None:
        """Stop checking."""
        self._has_ended = True
        pulse.is_timed.set()
        self.join(_OTHERS_S)

    def run(self) -> None:
        due_at = time.monotonic() + self.interval_s
        while not self._has_ended:
            begins_timed = pulse.is_timed.wait(self._wait_s) and self._world.size <= _ALL_READ
            pulse.is_timed.clear()
            with contextlib.suppress(RuntimeError):  # the store's process is gone: the ranks will fail of that
                self._is_asked = self._store is not None and self._store.check([_ASKED])
                now = time.monotonic()
                if now < due_at and not self._is_asked and not begins_timed:
                    continue
                due_at = now + self.interval_s
                report = self._check(now)
                if report is not None and not self._has_ended:
                    self._hung(report)
                    return

    def report_after(self, error: Exception) -> hang.HangReport | None:
        """Return the hang that ``error`` of this rank follows from; ``None``: none that is known, or asked before."""
        if self._store is None or error is self._examined:
            return None
        self._examined = error
        reports = list[hang.HangReport | None]()
        # The process with the store may be stopped, or its node unreachable: then it does not answer.
        asking = threading.Thread(target=lambda: reports.append(self._find_report(error)), daemon=True)
        with contextlib.suppress(RuntimeError):  # the limit of threads may be what failed
            asking.start()
            asking.join(2 * _OTHERS_S)
        return reports[0] if reports else None

    def _find_report(self, error: Exception) -> hang.HangReport | None:
        with contextlib.suppress(RuntimeError):  # the store's process is gone
            if (published := _published(self._store)) is not None:
                return published
        waited_s = _waited_s(error)
        report = None if waited_s is None else self._report_after_waiting(waited_s)
        if report is None or not report.behind:
            return None
        # A rank that has ended with an error does not stand still: its error says more.
        failed = records.read_ends(self._logs)
        return None if any(at.rank in failed for at in report.behind) else self._publish(report)

    def _report_after_waiting(self, timeout_s: float) -> hang.HangReport | None:
        """Return where the other ranks are, after this one has waited for them in a collective call for ``timeout_s``.

        ``None`` where none of them has begun to send heartbeats, where all have waited as long, or the store is gone.
        """
        store = self._store
        answers = dict[int, hang.Standstill]()
        until = time.monotonic() + _OTHERS_S
        peers = [rank for rank in range(self._world.size) if rank != self._world.rank]
        with contextlib.suppress(RuntimeError, ValidationError):
            store.set(_ASKED, "")
            store.set(f"{_EXPIRED}{self._world.rank}", "")
            while time.monotonic() < until and not all(rank in answers and answers[rank].stack for rank in peers):
                time.sleep(_LEAST_INTERVAL_S)
                peers = [rank for rank in peers if not store.check([f"{_EXPIRED}{rank}"])]
                answers = {
                    rank: _Heartbeat.model_validate_json(store.get(_key(rank))).at
                    for rank in peers
                    if store.check([_key(rank)])
                }
        if not answers:
            return None
        return hang.HangReport(
            by=self._world.rank, timeout_s=timeout_s, ranks=tuple(answers.values()), setting=hang.COLLECTIVE_TIMEOUT
        )

    def _check(self, now: float) -> hang.HangReport | None:
        pause_s = now - self._checked_at
        self._checked_at = now
        if pause_s > self.interval_s + _OWN_PAUSE_S:  # this process had been stopped, or its machine
            self._moved_at += pause_s
        heartbeat = self._own_heartbeat(now)
        if self._store is not None:
            self._store.set(_key(self._world.rank), heartbeat.model_dump_json())
        if heartbeat.at.silent_s < self._timeout_s / 2:
            self._received = {}
            return None
        if self._store is not None and (published := _published(self._store)) is not None:
            return published
        # If each of many ranks read the heartbeats of all, the store would have to answer N² requests. So they begin
        # one after the other.
        turn_s = self._world.rank * self.interval_s if self._world.size > _ALL_READ else 0.0
        if heartbeat.at.silent_s < self._timeout_s / 2 + turn_s:
            return None
        ranks = {**self._others(now), self._world.rank: heartbeat}
        moving = [beat for beat in ranks.values() if beat.limit_s is None or beat.at.silent_s < beat.limit_s]
        if len(ranks) < self._world.size or moving:  # some have not begun
            return None
        places = tuple(self._place(beat) for _, beat in sorted(ranks.items()))
        report = hang.HangReport(by=self._world.rank, timeout_s=self._timeout_s, ranks=places)
        return self._publish(report)

    def _publish(self, report: hang.HangReport) -> hang.HangReport:
        """Make ``report`` that of all ranks, unless another rank was first; returns that of all."""
        if self._store is None:
            return report
        try:
            text = self._store.compare_set(_REPORT, "", report.model_dump_json())
        except RuntimeError:  # the store's process is gone
            return report
        return hang.HangReport.model_validate_json(text)

    def _place(self, beat: _Heartbeat) -> hang.Standstill:
        """Return where a rank is; one of this machine that has sent no stack is asked by a signal."""
        rank = beat.at.rank
        if beat.at.stack or beat.at.state == "stopped" or beat.host != self._host:
            return beat.at
        title = f"has sent no heartbeat for {beat.at.silent_s:.0f} s; its threads are at"
        stack = ask_stack(beat.pid, rank, self._logs, title)
        return beat.at.model_copy(update=hang.position(stack))

    def _own_heartbeat(self, now: float) -> _Heartbeat:
        sign = pulse.sign
        if sign.beats != self._beats:
            self._beats = sign.beats
            self._moved_at = now
        silent_s = now - self._moved_at
        stack = main_stack() if silent_s >= self._timeout_s / 2 or self._is_asked else ()
        self._sent += 1
        node = self._host if self._world.nodes > 1 else ""
        at = hang.standstill(self._world.rank, sign, stack, silent_s=silent_s, node=node)
        if not (stack and at.waits_for_data):
            self._worker_place = None
        elif self._worker_place is None:  # asked once in a standstill
            self._worker_place = ask_workers(at.rank, self._logs)
        at = at.model_copy(update={"place": self._worker_place or at.place})
        limit_s = hang.silence_limit_s(sign.activity, stack, self._timeout_s)
        return _Heartbeat(number=self._sent, limit_s=limit_s, at=at, host=self._host, pid=os.getpid())

    def _others(self, now: float) -> dict[int, _Heartbeat]:
        """Return the last heartbeat of each other rank that has begun, with the time since it was received."""
        peers = [rank for rank in range(self._world.size) if rank != self._world.rank]
        if self._store is None or not peers or not self._store.check([_key(rank) for rank in peers]):
            return {}
        heartbeats = {}
        for rank, text in zip(peers, self._store.multi_get([_key(rank) for rank in peers]), strict=True):
            with contextlib.suppress(ValidationError):
                beat = _Heartbeat.model_validate_json(text)
                if self._received.get(rank, (0, now))[0] != beat.number:
                    self._received[rank] = (beat.number, now)
                age = now - self._received[rank][1]
                state = hang.process_state(beat.pid) if beat.host == self._host else "running"
                if state == "running" and age > max(_OWN_PAUSE_S, 3 * self.interval_s):
                    state = "unresponsive" if beat.host == self._host else "stopped"
                at = beat.at.model_copy(update={"silent_s": beat.at.silent_s + age, "state": state})
                heartbeats[rank] = beat.model_copy(update={"at": at})
        return heartbeats


def _key(rank: int) -> str:
    return f"lockstep/watchdog/{rank}"


def _published(store: Any) -> hang.HangReport | None:
    """Return the report that the first rank to notice a hang has published. Raises :class:`RuntimeError`: no store."""
    return hang.HangReport.model_validate_json(store.get(_REPORT)) if store.check([_REPORT]) else None


def main_stack() -> Stack:
    """Return the Python stack of this process's main thread, innermost call first."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = traceback.walk_stack(main) if main is not None else ()
    return tuple(Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in calls)


@contextmanager
def watched(
    logs: Path, world: World, store: Store | None, *, timeout_s: float, run: RunDir | None = None
) -> Iterator[Callable[[BaseException], None]]:
    """End this process with exit code 1 when no rank has made progress in the body for ``timeout_s``.

    It also ends when a collective call has expired and another rank reports its position. The body gets a function that
    ends it if an error follows from either; to be called before an error is recorded.
    This process and its loader workers write their stacks to the rank's log on request.

    Args:
        logs: the folder of the ranks' logs. A launcher reads the failure there, and prints it.
        run: where no launcher of Lockstep does: one rank prints the failure, and records it in the run.
    """
    terminal = os.dup(2)  # the rank's output may go to its log by then
    rank = world.rank
    # Of the watchdog and the main thread, the first to know of a hang ends the process; the other waits for the end.
    has_hung = threading.Lock()

    def hung(report: hang.HangReport) -> NoReturn:
        has_hung.acquire()
        try:
            _tell(report, logs, rank, run, terminal)
            if world.from_outside:
                time.sleep(watchdog.interval_s + _OTHERS_S)
        finally:
            leave(1)

    def end_if_hung(error: BaseException) -> None:
        if not isinstance(error, Exception):
            return
        if has_hung.locked():
            has_hung.acquire()
        report = watchdog.report_after(error)
        if report is not None:
            records.log_traceback(logs, rank, error)
            hung(report)

    watchdog = Watchdog(world, store, timeout_s=timeout_s, hung=hung, logs=logs)
    watchdog.start()
    try:
        with contextlib.ExitStack() as inside:
            with contextlib.suppress(OSError):  # this node may be unable to write the folder, and the run continues
                log = inside.enter_context(log_file(logs, rank).open("a", encoding="utf-8"))
                if signal.getsignal(SIGNAL) == signal.SIG_DFL:  # else the script that trains here uses it
                    inside.enter_context(stacks_on_request(log))
            yield end_if_hung
    except Exception as error:
        end_if_hung(error)
        raise
    finally:
        watchdog.end()
        os.close(terminal)


def _tell(report: hang.HangReport, logs: Path, rank: int, run: RunDir | None, terminal: int) -> None:
    """Write a hang to the rank's log; one rank prints and records it, or each records it for its launcher."""
    text = "\n".join([report.headline, report.table()])
    error = RankFailed(text, why=report.cause.title, fix=report.cause.advice)
    with contextlib.suppress(OSError), log_file(logs, rank).open("a", encoding="utf-8") as log:
        log.write(f"{MARK}rank {rank} ends: {error}\n{MARK}rank {rank}, all threads\n")
        log.flush()
        faulthandler.dump_traceback(log, all_threads=True)
    with contextlib.suppress(LockstepError):  # the folder may be what failed
        if run is None:
            records.record(logs, rank, error, hung_s=report.hung_s)
        elif report.by == rank:
            with contextlib.suppress(OSError):
                os.write(terminal, f"error: {error}\n".encode())
            run.update(status="failed", error=str(error))


def _waited_s(error: BaseException | None) -> float | None:
    """Return the time-out of the collective call that ``error`` comes from; ``None``: it has another reason."""
    checked = list[BaseException]()
    while error is not None and error not in checked:  # the context of a cause may be the error itself
        if (waited_s := expired_s(str(error))) is not None:
            return waited_s
        checked.append(error)
        error = error.__cause__ or error.__context__
    return None
