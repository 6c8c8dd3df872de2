"""The launcher process that :func:`lockstep.launch.local.start.launch` starts.

::

    python -m lockstep.launch.local.launcher RUN --ranks N

It lives in a session of its own, so a terminal's Ctrl-C reaches only the process that started it,
which passes it on. Its exit code is that of all ranks together.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil

from lockstep.errors import LockstepError, StorageError
from lockstep.hardware import parent_death
from lockstep.launch.failure import records, spare
from lockstep.launch.failure import report as failure
from lockstep.launch.health.hang import HangReport, HangWatch
from lockstep.launch.health.joint_hang import Exchange, JointWatch
from lockstep.launch.health.memory import MemoryWatch
from lockstep.launch.local import environment, node, signals
from lockstep.launch.local.supervisor import Supervisor
from lockstep.telemetry.heartbeat import announce
from lockstep.telemetry.progress_board import PULSES, PulseBoard
from lockstep.telemetry.rundir import RunDir

#: How long killed ranks are waited for.
_KILL_S = 5.0


@dataclass
class Launch:
    """One launch: what was asked for, and what is written to ``logs/launcher.json``.

    ``others``: the launchers of the other nodes, where there are several.
    """

    run_dir: RunDir
    ranks: int
    worker_module: str
    stop_grace_s: float
    max_restarts: int
    hang_timeout_s: float
    parent_pid: int | None
    nodes: str | None
    stop: signals.StopRequest
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
        """All ranks have been started, for the first time or again."""
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
        """Arguments of ``python`` for each rank. -P: what lies in the working folder does not shadow a module."""
        return ("-P", "-m", self.worker_module, str(self.run_dir.path))

    def announce(self) -> None:
        """Answer for the run until rank 0 does: who reads the run folder sees that somebody is at it."""
        with contextlib.suppress(StorageError):
            announce(self.run_dir.heartbeat_file, self.step)

    @property
    def step(self) -> int:
        """The last step that a rank of the newest start has finished."""
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
        """Why the ranks of the newest start ended, if they hung."""
        if self.supervisor is not None and self.supervisor.hang is not None:
            return self.supervisor.hang
        # Another node that knew it, too, was the first to end its ranks, and these failed of that.
        return self.watch.verdict if isinstance(self.watch, JointWatch) else None

    def stop_requested(self) -> int | None:
        # Whoever started the run is gone, without having asked for anything: its run ends in good order.
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
            "exits": [end.as_dict() for _, end in sorted(supervisor.exits.items())] if supervisor else [],
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
            spare.write(self.run_dir.logs / records.LAUNCHER_FILE, content)
        except StorageError as error:
            logging.getLogger(__name__).error("%s", error)

    def _record_restart(self) -> None:
        """Keep what ended the start before this one in ``launcher.json``, for rank 0 to tell; forget the rest."""
        self.write()
        report = failure.collect(self.run_dir)
        self.restarts.append(
            {"at": time.time(), "step": self.step, "reason": report.what if report else "", "of": self.max_restarts}
        )
        self.error = ""  # of that start
        with contextlib.suppress(OSError):
            records.clear(self.run_dir.logs)


def main(argv: list[str]) -> int:
    """Run all ranks; returns the exit code: 0, 1 failed, 2 wrong usage, 130 or 143 stopped."""
    arguments = _parse(argv)
    stop = signals.StopRequest().install()
    signal.signal(signal.SIGQUIT, _interrupt)
    signals.accept()
    launch = Launch(RunDir(arguments.run), **{k: v for k, v in vars(arguments).items() if k != "run"}, stop=stop)
    _keep_quiet(launch.run_dir.logs / "launcher.log")
    launch.write()
    launch.announce()
    code = 1
    try:
        code = _run(launch)
    except KeyboardInterrupt:
        code = signals.exit_code(stop.requested or signal.SIGINT)
    except LockstepError as error:
        launch.error = str(error)
    except Exception:
        launch.error = traceback.format_exc()
    finally:
        _end(launch)
        launch.write(exit_code=code)
    return code


def _run(launch: Launch) -> int:
    # Children are told who they belong to before there are any.
    parent_death.make_lifeline()
    if sys.platform == "linux":
        launch.board = PulseBoard(launch.ranks)
        os.environ[PULSES] = launch.board.path
    environment.announce_launcher(os.environ)
    if launch.nodes is not None:
        return _run_on_nodes(launch, launch.nodes)
    return node.run(launch)


def _run_on_nodes(launch: Launch, nodes: str) -> int:
    from lockstep.launch.nodes import agent
    from lockstep.launch.nodes.command import Nodes

    return agent.run(launch, Nodes.parse(nodes), launch.rank_command)


def _end(launch: Launch) -> None:
    """Leave no rank behind, whatever happened."""
    if launch.supervisor is None:
        return
    launch.supervisor.kill()
    deadline = time.monotonic() + _KILL_S
    with contextlib.suppress(LockstepError, KeyboardInterrupt):
        while not launch.supervisor.check() and time.monotonic() < deadline:
            time.sleep(0.02)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _keep_quiet(log: Path) -> None:
    """The agent's own messages go to a file; the terminal belongs to rank 0."""
    logging.raiseExceptions = False  # on a full disk logging would complain on the terminal, at every record
    handler: logging.Handler = logging.NullHandler()
    with contextlib.suppress(OSError):
        handler = logging.FileHandler(log, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lockstep.launch.local.launcher", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--worker-module", default="lockstep.launch.local.worker")
    parser.add_argument("--stop-grace-s", type=float, default=30.0)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--hang-timeout-s", type=float, default=60.0)
    parser.add_argument("--nodes", help="one of several nodes: see lockstep.launch.nodes.command")
    parser.add_argument("--parent-pid", type=int, help="stop the run when this process, the parent, ends")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
