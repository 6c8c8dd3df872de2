"""The state of one launch: its settings, its ranks, and what is written to ``logs/launcher.json``."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from lockstep.errors import StorageError
from lockstep.launch.failure import records
from lockstep.launch.failure.report import read_failure
from lockstep.launch.health.hang import HangReport, HangWatch
from lockstep.launch.health.joint_hang import Exchange, JointWatch
from lockstep.launch.health.memory import MemoryWatch
from lockstep.launch.local.signals import StopRequest
from lockstep.launch.local.supervisor import Supervisor
from lockstep.telemetry.heartbeat import announce
from lockstep.telemetry.progress_board import PulseBoard
from lockstep.telemetry.rundir import RunDir

#: How often the launcher checks its ranks.
MONITOR_INTERVAL_S = 0.1


@dataclass
class Launch:
    """One launch: its settings, and what is written to ``logs/launcher.json``.

    Attributes:
        parent_pid: stop the run when this process, the parent, ends.
        nodes: fields of :class:`lockstep.launch.nodes.command.Nodes`, for one of several nodes.
        others: the launchers of the other nodes.
    """

    run_dir: RunDir
    ranks: int
    worker_module: str
    stop_grace_s: float
    max_restarts: int
    hang_timeout_s: float
    parent_pid: int | None
    nodes: dict[str, Any] | None
    stop: StopRequest
    starts: int = 0
    supervisor: Supervisor | None = None
    error: str = ""
    started_at: float = field(default_factory=time.time)
    board: PulseBoard | None = None
    memory: MemoryWatch | None = None
    others: Exchange | None = None
    watch: HangWatch | JointWatch | None = None
    restarts: list[dict[str, Any]] = field(default_factory=list)

    def start(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> Supervisor:
        """Supervise ranks that have been started, for the first time or again."""
        if self.starts:
            self._record_restart()
        self.starts += 1
        pids = {rank: process.pid for rank, process in processes.items()}
        self.memory = MemoryWatch(pids)
        if self.board is not None:
            self.board.clear()
            self.watch = HangWatch(pids, self.board.read, logs=self.run_dir.logs, timeout_s=self.hang_timeout_s)
            if self.others is not None:
                self.watch = JointWatch(self.watch, self.others, timeout_s=self.hang_timeout_s)
        self.supervisor = Supervisor(
            processes,
            stop_requested=self.stop_requested,
            stop_grace_s=self.stop_grace_s,
            look=self._look,
        )
        self.write()
        self.announce()
        return self.supervisor

    @property
    def rank_command(self) -> tuple[str, ...]:
        """Arguments of ``python`` for each rank. -P: files in the working folder do not shadow a module."""
        return ("-P", "-m", self.worker_module, str(self.run_dir.path))

    def announce(self) -> None:
        """Write the run's heartbeat until rank 0 does: readers of the folder see that the run is training."""
        with contextlib.suppress(StorageError):
            announce(self.run_dir.heartbeat_file, self.step)

    @property
    def step(self) -> int:
        """The last step that a rank of the latest start has finished."""
        return max((sign.step for sign in self.board.read()), default=0) if self.board is not None else 0

    def _doing(self) -> dict[int, int]:
        """The last activity of each rank, by rank."""
        if self.board is None or self.supervisor is None:
            return {}
        return dict(zip(self.supervisor.pids, (int(sign.activity) for sign in self.board.read()), strict=True))

    def _look(self, alive: Collection[int]) -> HangReport | None:
        if self.memory is not None:
            self.memory.look(alive)
        return self.watch.look(alive) if self.watch is not None else None

    @property
    def hang(self) -> HangReport | None:
        """The hang that ended the ranks of the latest start, if they hung."""
        if self.supervisor is not None and self.supervisor.hang is not None:
            return self.supervisor.hang
        # Another node may have been the first to end its ranks, and these failed because of that.
        return self.watch.verdict if isinstance(self.watch, JointWatch) else None

    def stop_requested(self) -> int | None:
        # The parent process has ended without requesting a stop: the run ends with a checkpoint.
        if self.parent_pid is not None and os.getppid() != self.parent_pid:
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
            {"at": time.time(), "step": self.step, "reason": report.what if report else "", "of": self.max_restarts}
        )
        self.error = ""  # of that start
        with contextlib.suppress(OSError):
            records.clear(self.run_dir.logs)
