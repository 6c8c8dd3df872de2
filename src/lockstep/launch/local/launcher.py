"""The launcher process: starts the ranks of one launch on this node, and watches them until each has ended.

It runs in a separate session, so a terminal's Ctrl-C reaches only the process that started it, which passes it on. Its
exit code is that of all ranks together. It is a fork that shares its modules (see :mod:`.fork_server`), and so are the
ranks. They get the variables that torchrun documents
(https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables). Of several nodes, each has a launcher for
the agent that starts its ranks (:mod:`lockstep.launch.engines.torchrun`).

::

    running ──stop requested──▶ stopping ──grace over──▶ killed
       ├──────a rank failed───▶ failing ───grace over──▶ killed
       └──────no progress────────────────────────────────▶ killed

In *stopping* the ranks have received one signal and end after a checkpoint. In *failing* they are blocked in a
collective that will never complete, so they get little time. Ranks that hang get none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from lockstep.config import LaunchConfig
from lockstep.errors import LockstepError, RankFailed, StorageError, UsageError
from lockstep.hardware import parent_death
from lockstep.hardware.detect import oom_kills
from lockstep.hardware.world import STORE_FD
from lockstep.launch.failure import records
from lockstep.launch.failure.hang import HangReport, HangWatch
from lockstep.launch.failure.records import RankEnd
from lockstep.launch.failure.report import failure_line
from lockstep.launch.local import worker
from lockstep.launch.local.fork_server import Forked, fork
from lockstep.launch.process import environment, signals
from lockstep.rundir.folder import RunDir
from lockstep.rundir.heartbeat import PULSES, PulseBoard, announce

Phase = Literal["running", "stopping", "failing"]

#: How often the launcher checks its ranks.
MONITOR_INTERVAL_S = 0.1
#: How long ranks may take to end once another one has failed.
FAILURE_GRACE_S = 5.0
#: How long a killed process may remain, in an uninterruptible call of a driver.
ABANDON_S = 30.0
#: How long to wait for killed ranks at the end.
_KILL_S = 5.0
_ORDERLY = (0, *signals.STOPPED, -signal.SIGINT, -signal.SIGTERM)


@dataclass
class Supervisor:
    """One start of all ranks of this node, from their start to their last end.

    ``processes``: by rank; each leads a process group. ``forced``: ranks were killed because they did not follow a
    stop in time. ``hang``: the report of a hang, after which the ranks were killed.
    """

    processes: Mapping[int, Forked]
    stop_requested: Callable[[], int | None]
    stop_grace_s: float
    failure_grace_s: float = FAILURE_GRACE_S
    watch: HangWatch | None = None
    #: Time-out in seconds of the collective call in which the failed ranks waited for others; ``None``: other reasons.
    waited_s: Callable[[], float | None] = lambda: None
    phase: Phase = field(default="running", init=False)
    exits: dict[int, RankEnd] = field(default_factory=dict, init=False)
    forced: bool = field(default=False, init=False)
    hang: HangReport | None = field(default=None, init=False)
    _checked_at: float = field(default_factory=time.time, init=False)
    _deadline: float | None = field(default=None, init=False)
    _killed: bool = field(default=False, init=False)
    _stop_requested: bool = field(default=False, init=False)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self.processes.items()}

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.processes if rank not in self.exits]

    @property
    def failed(self) -> list[RankEnd]:
        """The ranks that failed, without those that the launcher ended."""
        orderly = _ORDERLY if self._stop_requested else (0, *signals.STOPPED)
        return [end for end in self.exits.values() if not end.ended_by_launcher and end.code not in orderly]

    @property
    def may_restart(self) -> bool:
        """Whether a new start could end better: not after a stop, nor after wrong usage."""
        failed = bool(self.failed) or self.hang is not None
        return failed and self.stop_requested() is None and self.exit_code != UsageError.exit_code

    @property
    def exit_code(self) -> int:
        """The exit code for all ranks together, once all of them have ended."""
        if self.failed:
            # Wrong usage is never a consequence of another rank's failure, so it decides.
            return UsageError.exit_code if any(end.code == UsageError.exit_code for end in self.failed) else 1
        if self.forced or self.hang is not None:
            return 1
        stopped = [signals.exit_code(-end.code) if end.code < 0 else end.code for end in self.exits.values()]
        requested = self.stop_requested()
        return signals.exit_code(requested) if any(stopped) and requested is not None else max(stopped, default=0)

    def check(self) -> bool:
        """Check all ranks once, and act. Returns whether they have ended; raises if one cannot be killed."""
        self._stop_requested = self._stop_requested or self.stop_requested() is not None
        self._observe()
        if not self.alive:
            return True
        now = time.monotonic()
        if self.failed:
            deadline = now + self.failure_grace_s
            if self._begin("failing", min(deadline, self._deadline or deadline)):
                if self.watch is not None and (waited_s := self.waited_s()) is not None:
                    self.hang = self.watch.places_after(waited_s, self.alive)
                for rank in self.alive:
                    _signal_group(self.processes[rank].pid, signal.SIGTERM)
        elif self._stop_requested:
            if self._begin("stopping", now + self.stop_grace_s):
                self.ask_to_stop()
        elif any(end.code in signals.STOPPED for end in self.exits.values()):
            # The ranks have agreed on a stop that one of them was asked for directly.
            self._begin("stopping", now + self.stop_grace_s)
        elif self.hang is None:
            self.hang = self.watch.look(self.alive) if self.watch is not None else None
            if self.hang is not None:
                # They wait for each other, or are stopped: none would handle a milder signal.
                self._begin("failing", now)
                self.kill()
        if self.phase == "stopping" and self.watch is not None and self.watch.is_mirroring(self.alive):
            self._deadline = now + self.stop_grace_s  # storage.mirror_wait_s limits it
        if self._deadline is not None and now > self._deadline:
            self.forced = self.forced or self.phase == "stopping"
            self.kill()
            if now > self._deadline + ABANDON_S:
                raise RankFailed(
                    f"rank {', '.join(map(str, self.alive))} was killed and is still there after {ABANDON_S:.0f} s",
                    why="it is stuck in a system call that cannot be interrupted: a GPU driver, a network file system",
                    fix="look at `dmesg`; a machine in this state usually needs a restart",
                )
        return False

    def wait(self, timeout_s: float = float("inf")) -> None:
        """Check until all ranks have ended, at most for ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not self.check() and time.monotonic() < deadline:
            time.sleep(MONITOR_INTERVAL_S)

    def ask_to_stop(self) -> None:
        """To the ranks alone: their loader workers have to serve them until their checkpoint is written."""
        for rank in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGTERM)

    def end(self) -> None:
        """Kill all ranks that still run, and wait for their end."""
        self.kill()
        self.wait()
        for process in self.processes.values():
            process.wait()

    def kill(self) -> None:
        """Kill all ranks that still run, with their child processes."""
        self._killed = True
        self._deadline = self._deadline or time.monotonic()
        for rank in self.alive:
            _signal_group(self.processes[rank].pid, signal.SIGKILL)

    def _begin(self, phase: Phase, deadline: float) -> bool:
        if self.phase in (phase, "failing"):
            return False
        self.phase = phase
        self._deadline = deadline
        return True

    def _observe(self) -> None:
        now = time.time()
        ending = self.phase == "failing" or self._killed
        for rank in self.alive:
            pid = self.processes[rank].pid
            code = _peek(self.processes[rank])
            if code is None:
                continue
            if code != 0:
                _signal_group(pid, signal.SIGKILL)  # its loader workers, for example
            # An exit code other than a signal's is the rank's verdict, however late it comes.
            ended = ending and -code in (signal.SIGTERM, signal.SIGKILL)
            times = {"alive_at": self._checked_at, "seen_at": now}
            self.exits[rank] = RankEnd(rank=rank, pid=pid, code=code, ended_by_launcher=ended, **times)
        self._checked_at = now


def _peek(process: Forked) -> int | None:
    """The return code of a process that has ended; it stays a zombie, so that no other process gets its number."""
    if process.returncode is not None:
        return process.returncode
    try:
        state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return process.poll()
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _signal_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signum)
        else:
            os.kill(pid, signum)


@dataclass
class Launch:
    """One launch with all its starts: its settings, and the content of ``logs/launcher.json``.

    Attributes:
        rank_main: the function of every rank, as ``module:function``; see :mod:`lockstep.launch.local.worker`.
    """

    run_dir: RunDir
    ranks: int
    rank_main: str
    settings: LaunchConfig
    stop: signals.StopRequest
    board: PulseBoard
    parent_pid: int = field(default_factory=os.getppid)
    started_at: float = field(default_factory=time.time)
    oom_kills_before: int = field(default_factory=oom_kills)
    starts: int = 0
    supervisor: Supervisor | None = None
    error: str = ""
    restarts: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        """Prepare a start of the ranks: remove the records of an earlier one."""
        if self.starts:  # keep the reason of its end, for rank 0 to report
            self.write()
            reason = failure_line(self.run_dir)
            self.restarts.append(
                {"at": time.time(), "step": self.step, "reason": reason, "of": self.settings.max_restarts}
            )
            self.error = ""
            with contextlib.suppress(OSError):
                records.clear(self.run_dir.logs)
        self.starts += 1
        self.supervisor = None
        self.board.clear()
        self.write()
        self.announce()

    def supervise(self, processes: Mapping[int, Forked]) -> Supervisor:
        """Supervise ranks that have been started."""
        pids = {rank: process.pid for rank, process in processes.items()}
        logs = self.run_dir.logs
        settings = self.settings
        self.supervisor = Supervisor(
            processes,
            self.stop_requested,
            settings.stop_grace_s,
            watch=HangWatch(pids, self.board.read, logs=logs, timeout_s=settings.hang_timeout_s),
            waited_s=partial(records.waited_s, logs),
        )
        self.write()
        return self.supervisor

    def announce(self) -> None:
        """Write the run's heartbeat until rank 0 does: readers of the folder see that the run is training."""
        with contextlib.suppress(StorageError):
            beat = self.run_dir.progress()
            announce(self.run_dir.heartbeat_file, self.step or (beat.step if beat else 0))

    @property
    def step(self) -> int:
        """The last step that a rank of the latest start has finished."""
        return max(sign.step for sign in self.board.read())

    def stop_requested(self) -> int | None:
        # The parent process has ended without requesting a stop: the run ends with a checkpoint.
        if os.getppid() != self.parent_pid:
            self.stop.request(signal.SIGTERM)
        return self.stop.requested

    def note_forced(self) -> None:
        """Record that the ranks of the latest start were killed, if they did not follow a stop."""
        if self.supervisor is not None and self.supervisor.forced:
            grace_s = self.settings.stop_grace_s
            self.error = f"the ranks were killed, since they had not ended {grace_s:g} s after the stop"

    def write(self, exit_code: int | None = None) -> None:
        """Keep ``launcher.json`` up to date; a full disk must not end the ranks."""
        supervisor = self.supervisor or Supervisor({}, self.stop_requested, 0.0)
        activities = [int(sign.activity) for sign in self.board.read()]
        content: dict[str, Any] = {
            "pid": os.getpid(),
            "created": psutil.Process().create_time(),
            "host": socket.gethostname(),
            "ranks": self.ranks,
            "started_at": self.started_at,
            "starts": self.starts,
            "pids": supervisor.pids,
            "exits": [end.model_dump() for _, end in sorted(supervisor.exits.items())],
            "hang": supervisor.hang.model_dump() if supervisor.hang else None,
            "oom_kills": oom_kills() - self.oom_kills_before,
            "doing": dict(zip(supervisor.pids, activities, strict=False)),
            "restarts": self.restarts,
            "stop_requested": signal.Signals(self.stop.requested).name if self.stop.requested else None,
            "error": self.error,
            "exit_code": exit_code,
        }
        try:
            records.write(self.run_dir.logs / records.LAUNCHER_FILE, content)
        except StorageError as error:
            logging.getLogger(__name__).error("%s", error)


def main() -> int:
    """Run the ranks of the request on standard input, JSON that :func:`lockstep.launch.local.on_ranks.launch` writes.

    Returns its exit code: 0, 1 failed, 2 wrong usage, 130 or 143 stopped.
    """
    stop = signals.StopRequest().install()
    with open(0, encoding="ascii", closefd=False) as request_file:
        request = json.load(request_file)
    os.environ.clear()
    os.environ.update(request["environ"])
    with contextlib.suppress(KeyError, OSError):  # the folder was removed
        os.chdir(request["cwd"])
    signals.accept()
    launch = Launch(
        run_dir=RunDir(Path(request["folder"])),
        ranks=request["ranks"],
        rank_main=request["rank_main"],
        settings=LaunchConfig(**request["settings"]),
        stop=stop,
        board=PulseBoard(request["ranks"]),
    )
    code = 1
    try:
        signal.signal(signal.SIGQUIT, signal.default_int_handler)  # raises KeyboardInterrupt
        # A reader of processes sees by it whose launcher this is.
        os.open(launch.run_dir.path, os.O_RDONLY)
        _keep_quiet(launch.run_dir.logs / "launcher.log")
        launch.write()
        launch.announce()
        # Before there are children, which inherit it.
        parent_death.make_lifeline()
        os.environ |= {PULSES: launch.board.path, environment.LAUNCHER_PID: str(os.getpid())}
        code = _run_here(launch)
    except KeyboardInterrupt:
        code = signals.exit_code(stop.requested or signal.SIGINT)
    except LockstepError as error:
        launch.error = str(error)
    except Exception:
        launch.error = traceback.format_exc()
    finally:
        if launch.supervisor is not None:  # end every rank, however the launch ended
            launch.supervisor.kill()
            with contextlib.suppress(LockstepError, KeyboardInterrupt):
                launch.supervisor.wait(_KILL_S)
        launch.write(exit_code=code)
    return code


def _run_here(launch: Launch) -> int:
    """Run all ranks of ``launch`` until they have ended and are not started again; returns the exit code."""
    while True:
        # Rank 0 gets a socket that listens already, so no other process can take the port.
        with signals.held_back(), socket.create_server(("127.0.0.1", 0)) as server:
            launch.begin()
            group = {
                **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])},
                # Every rank finds the store there, rank 0 too, which serves it (engine/rank_context.py).
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            supervisor = launch.supervise(start_ranks(launch, group, server.fileno()))
        supervisor.wait()
        if launch.starts > launch.settings.max_restarts or not supervisor.may_restart:
            launch.note_forced()
            return supervisor.exit_code
        supervisor.end()


def start_ranks(launch: Launch, group: Mapping[str, str], server: int) -> dict[int, Forked]:
    """Start the ranks; the processes by rank.

    ``group``: variables that describe the store. ``server``: its listening socket, for rank 0.
    """
    size = str(launch.ranks)
    common = {
        **os.environ,
        **{"WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
        "ROLE_NAME": "rank",
        "TORCHELASTIC_RUN_ID": os.environ.get(environment.LAUNCH_ID, str(os.getpid())),
        "TORCHELASTIC_RESTART_COUNT": str(launch.starts - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.settings.max_restarts),
        **group,
    }
    processes: dict[int, Forked] = {}
    for rank in range(launch.ranks):
        environ = common | {"RANK": str(rank), "ROLE_RANK": str(rank), "LOCAL_RANK": str(rank)}
        if rank == 0:
            environ[STORE_FD] = str(server)
        open_files = (server,) if rank == 0 else ()
        processes[rank] = fork(partial(_be_rank, launch, environ), name=f"rank-{rank}", open_files=open_files)
    return processes


def _be_rank(launch: Launch, environ: Mapping[str, str]) -> int:
    os.environ.clear()
    os.environ.update(environ)
    return worker.main(launch.rank_main, str(launch.run_dir.path))


def _keep_quiet(log: Path) -> None:
    """Send the agent's messages to a file; the terminal is for rank 0."""
    logging.raiseExceptions = False  # on a full disk logging would print an error for every record
    handler: logging.Handler = logging.NullHandler()
    with contextlib.suppress(OSError):
        handler = logging.FileHandler(log, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
