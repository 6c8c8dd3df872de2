"""One launch on this node: its settings, and its ranks: how and when each ended, and what to do about it.

::

    running ──stop requested──▶ stopping ──grace over──▶ killed
       ├──────a rank failed───▶ failing ───grace over──▶ killed
       └──────no progress────────────────────────────────▶ killed

In *stopping* the ranks have received one signal and end after a checkpoint. In *failing* they are blocked in a
collective that will never complete, so they get little time. Ranks that hang get none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

from lockstep.config import LaunchConfig
from lockstep.errors import RankFailed, StorageError, UsageError
from lockstep.launch.failure import records
from lockstep.launch.failure.records import RankEnd
from lockstep.launch.failure.report import read_failure
from lockstep.launch.health.hang import HangReport, HangWatch
from lockstep.launch.health.memory import MemoryWatch
from lockstep.launch.local.forked import Forked
from lockstep.launch.local.signals import STOPPED, StopRequest, exit_code
from lockstep.telemetry.heartbeat import announce
from lockstep.telemetry.progress_board import PulseBoard
from lockstep.telemetry.rundir import RunDir

Phase = Literal["running", "stopping", "failing"]

#: How long ranks may take to end once another one has failed.
FAILURE_GRACE_S = 5.0
#: How long a killed process may remain, in an uninterruptible call of a driver.
ABANDON_S = 30.0

_ORDERLY = (0, *STOPPED, -signal.SIGINT, -signal.SIGTERM)


#: A rank: a fork of its launcher, or a new interpreter.
RankProcess = Forked | subprocess.Popen[bytes]


@dataclass
class Supervisor:
    """One start of all ranks of this node, from their start to their last end.

    Attributes:
        processes: by rank; each leads a process group.
        stop_requested: the signal that asked for a stop, if any.
        stop_grace_s: how long ranks may take to end after a stop was requested, seconds.
        failure_grace_s: how long they may take once another one has failed.
        look: checks the ranks that are alive; returns a report when they hang.
        forced: whether ranks had to be killed because they did not follow a stop in time.
        hang: why the ranks were killed, when they hung.
    """

    processes: Mapping[int, RankProcess]
    stop_requested: Callable[[], int | None]
    stop_grace_s: float
    failure_grace_s: float = FAILURE_GRACE_S
    look: Callable[[Collection[int]], HangReport | None] = lambda alive: None
    phase: Phase = field(default="running", init=False)
    exits: dict[int, RankEnd] = field(default_factory=dict, init=False)
    forced: bool = field(default=False, init=False)
    hang: HangReport | None = field(default=None, init=False)
    _seen_at: float = field(default_factory=time.time, init=False)
    _deadline: float | None = field(default=None, init=False)
    _killed: bool = field(default=False, init=False)
    _asked: bool = field(default=False, init=False)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self.processes.items()}

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.processes if rank not in self.exits]

    @property
    def failed(self) -> list[RankEnd]:
        """The ranks that failed, without those that the launcher ended."""
        orderly = _ORDERLY if self._asked else (0, *STOPPED)
        return [end for end in self.exits.values() if not end.ended_by_launcher and end.code not in orderly]

    @property
    def may_restart(self) -> bool:
        """Whether a new start could end better: not after a stop, nor after wrong usage."""
        failed = bool(self.failed) or self.hang is not None
        return failed and self.stop_requested() is None and self.exit_code != UsageError.exit_code

    @property
    def exit_code(self) -> int:
        """The exit code for all ranks together, once all of them have ended."""
        codes = [end.code for end in self.exits.values()]
        if self.failed:
            # Wrong usage is never a consequence of another rank's failure, so it decides.
            return UsageError.exit_code if any(end.code == UsageError.exit_code for end in self.failed) else 1
        if self.forced or self.hang is not None:
            return 1
        stopped = [code for code in codes if code != 0]
        if not stopped:
            return 0
        requested = self.stop_requested()
        return exit_code(requested) if requested is not None else max(exit_code(-c) if c < 0 else c for c in stopped)

    def check(self) -> bool:
        """Look once, and do what is due. Returns whether all ranks have ended.

        Raises:
            RankFailed: a killed rank does not go away.
        """
        self._asked = self._asked or self.stop_requested() is not None
        self._observe()
        if not self.alive:
            return True
        now = time.monotonic()
        if self.failed:
            self._fail(now)
        elif self._asked:
            self._stop(now)
        elif any(end.code in STOPPED for end in self.exits.values()):
            # The ranks have agreed on a stop that one of them was asked for directly.
            self._begin("stopping", now + self.stop_grace_s)
        elif self.hang is None and (hang := self.look(self.alive)) is not None:
            # They wait for each other, or are stopped: none would handle a milder signal.
            self.hang = hang
            self._begin("failing", now)
            self.kill()
        if self._deadline is not None and now > self._deadline:
            self.forced = self.forced or self.phase == "stopping"
            self.kill()
            if now > self._deadline + ABANDON_S:
                raise _undying(self.alive)
        return False

    def kill(self) -> None:
        """Kill all ranks that still run, with their child processes."""
        self._killed = True
        for rank in self.alive:
            _signal_group(self.processes[rank].pid, signal.SIGKILL)

    def _stop(self, now: float) -> None:
        if self._begin("stopping", now + self.stop_grace_s):
            # To the rank alone: its loader workers have to serve it until its checkpoint is written.
            for rank in self.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.processes[rank].pid, signal.SIGTERM)

    def _fail(self, now: float) -> None:
        deadline = now + self.failure_grace_s
        if self._begin("failing", min(deadline, self._deadline or deadline)):
            for rank in self.alive:
                _signal_group(self.processes[rank].pid, signal.SIGTERM)

    def _begin(self, phase: Phase, deadline: float) -> bool:
        if self.phase == phase or self.phase == "failing":
            return False
        self.phase, self._deadline = phase, deadline
        return True

    def _observe(self) -> None:
        now = time.time()
        ending = self.phase == "failing" or self._killed
        for rank in self.alive:
            process = self.processes[rank]
            code = _peek(process)
            if code is None:
                continue
            if code != 0:
                _signal_group(process.pid, signal.SIGKILL)  # what it left behind: loader workers, for example
            # An exit code other than a signal's is the rank's own verdict, however late it comes.
            ended = ending and -code in (signal.SIGTERM, signal.SIGKILL)
            self.exits[rank] = RankEnd(
                rank=rank, pid=process.pid, code=code, alive_at=self._seen_at, seen_at=now, ended_by_launcher=ended
            )
        self._seen_at = now


def _undying(ranks: list[int]) -> RankFailed:
    names = ", ".join(map(str, ranks))
    return RankFailed(
        f"rank {names} was killed and is still there after {ABANDON_S:.0f} s",
        why="it is stuck in a system call that cannot be interrupted: a GPU driver, a network file system",
        fix="look at `dmesg`; a machine in this state usually needs a restart",
    )


def _peek(process: RankProcess) -> int | None:
    """The return code of a process that has ended, which stays a zombie so that its number stays taken."""
    if process.returncode is not None:
        return process.returncode
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return process.poll()
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _signal_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signum)
        else:
            os.kill(pid, signum)


#: How often the launcher checks its ranks.
MONITOR_INTERVAL_S = 0.1


@dataclass
class Launch:
    """One launch: its settings, and what is written to ``logs/launcher.json``.

    Attributes:
        rank_main: what every rank runs, as ``module:function``; see :mod:`lockstep.launch.local.worker`.
        parent_pid: stop the run when this process, the parent, ends.
        nodes: fields of :class:`lockstep.launch.nodes.command.Nodes`, for one of several nodes.
        make_watch: makes what checks the ranks of a start for hangs, as :class:`HangWatch` does.
    """

    run_dir: RunDir
    ranks: int
    rank_main: str
    settings: LaunchConfig
    parent_pid: int
    nodes: dict[str, Any] | None
    stop: StopRequest
    board: PulseBoard
    starts: int = 0
    supervisor: Supervisor | None = None
    error: str = ""
    started_at: float = field(default_factory=time.time)
    memory: MemoryWatch | None = None
    make_watch: Callable[..., HangWatch] = HangWatch
    watch: HangWatch | None = None
    restarts: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        """Before the ranks are started, or started again: what they read and write next is as for the first start."""
        if self.starts:
            self._record_restart()
        self.starts += 1
        self.supervisor = None
        self.board.clear()
        self.write()
        self.announce()

    def supervise(self, processes: Mapping[int, RankProcess]) -> Supervisor:
        """Supervise ranks that have been started."""
        pids = {rank: process.pid for rank, process in processes.items()}
        self.memory = MemoryWatch(pids)
        self.watch = self.make_watch(
            pids, self.board.read, logs=self.run_dir.logs, timeout_s=self.settings.hang_timeout_s
        )
        self.supervisor = Supervisor(
            processes, stop_requested=self.stop_requested, stop_grace_s=self.settings.stop_grace_s, look=self._look
        )
        self.write()
        return self.supervisor

    @property
    def rank_command(self) -> tuple[str, ...]:
        """Arguments of ``python`` for a rank. -P: files in the working folder do not shadow a module."""
        return ("-P", "-m", "lockstep.launch.local.worker", self.rank_main, str(self.run_dir.path))

    def announce(self) -> None:
        """Write the run's heartbeat until rank 0 does: readers of the folder see that the run is training."""
        with contextlib.suppress(StorageError):
            announce(self.run_dir.heartbeat_file, self.step)

    @property
    def step(self) -> int:
        """The last step that a rank of the latest start has finished."""
        return max(sign.step for sign in self.board.read())

    def _doing(self) -> dict[int, int]:
        """The last activity of each rank, by rank."""
        if self.supervisor is None:
            return {}
        return dict(zip(self.supervisor.pids, (int(sign.activity) for sign in self.board.read()), strict=True))

    def _look(self, alive: Collection[int]) -> HangReport | None:
        if self.memory is not None:
            self.memory.look(alive)
        return self.watch.look(alive) if self.watch is not None else None

    @property
    def hang(self) -> HangReport | None:
        """The hang that ended the ranks of the latest start, or those of another node, if they hung."""
        return self.watch.verdict if self.watch is not None else None

    def stop_requested(self) -> int | None:
        # The parent process has ended without requesting a stop: the run ends with a checkpoint.
        if os.getppid() != self.parent_pid:
            self.stop.request(signal.SIGTERM)
        return self.stop.requested

    def write(self, exit_code: int | None = None) -> None:
        """Keep ``launcher.json`` up to date; a full disk must not end the ranks."""
        supervisor = self.supervisor
        content: dict[str, Any] = {
            "pid": os.getpid(),
            "created": psutil.Process().create_time(),
            "host": socket.gethostname(),
            "ranks": self.ranks,
            "started_at": self.started_at,
            "starts": self.starts,
            "pids": supervisor.pids if supervisor else {},
            "exits": [end.model_dump() for _, end in sorted(supervisor.exits.items())] if supervisor else [],
            "hang": self.hang.model_dump() if self.hang else None,
            "memory": {rank: held.model_dump() for rank, held in self.memory.ranks.items()} if self.memory else {},
            "machine": self.memory.machine().model_dump() if self.memory else {},
            "doing": self._doing(),
            "restarts": self.restarts,
            "stop_requested": signal.Signals(self.stop.requested).name if self.stop.requested else None,
            "error": self.error,
            "exit_code": exit_code,
        }
        try:
            records.write(self.run_dir.logs / records.LAUNCHER_FILE, content)
        except StorageError as error:
            logging.getLogger(__name__).error("%s", error)

    def _record_restart(self) -> None:
        """Keep in ``launcher.json`` what ended the start before this one, for rank 0 to report; remove the rest."""
        self.write()
        report = read_failure(self.run_dir)
        self.restarts.append(
            {
                "at": time.time(),
                "step": self.step,
                "reason": report.what if report else "",
                "of": self.settings.max_restarts,
            }
        )
        self.error = ""  # of that start
        with contextlib.suppress(OSError):
            records.clear(self.run_dir.logs)
