"""The launcher process: starts the ranks of one launch on this node, and watches them until each has ended.

It runs in a separate session, so a terminal's Ctrl-C reaches only the process that started it, which passes it on. Its
exit code is that of all ranks together. The ranks are its forks, so they share its modules. They get the variables
that torchrun documents
(https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables). Of several nodes, each has a launcher for
the agent that starts its ranks (:mod:`lockstep.launch.engines.torchrun`).

::

    running ──stop requested──▶ stopping ──grace over──▶ killed
       └──────a rank failed───▶ failing ───grace over──▶ killed

In *stopping* the ranks have received one signal and end after a checkpoint. In *failing* they are blocked in a
collective that will never complete, so they get little time. A hang is a failure of the ranks that find it
(:mod:`lockstep.launch.failure.watchdog`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal

import psutil

from lockstep.config import LaunchConfig
from lockstep.errors import LockstepError, RankFailed, StorageError, UsageError
from lockstep.hardware import parent_death
from lockstep.hardware.detect import oom_kills
from lockstep.launch.failure import records
from lockstep.launch.failure.records import RankEnd
from lockstep.launch.local import worker
from lockstep.launch.local.forks import Forked, fork
from lockstep.launch.process import environment, signals
from lockstep.rundir.folder import RunDir
from lockstep.rundir.heartbeat import announce

Phase = Literal["running", "stopping", "failing"]

#: The process name of a launcher.
NAME = "lockstep-launch"

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
    """All ranks of this node, from their start to their last end.

    ``processes``: by rank; each leads a process group. ``forced``: ranks were killed because they did not follow a
    stop in time.
    """

    processes: dict[int, Forked]
    stop_requested: Callable[[], int | None]
    stop_grace_s: float
    failure_grace_s: float = FAILURE_GRACE_S
    phase: Phase = field(default="running", init=False)
    exits: dict[int, RankEnd] = field(default_factory=dict, init=False)
    forced: bool = field(default=False, init=False)
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
        return [end for end in self.exits.values() if not end.ended_by_launcher and end.exit_code not in orderly]

    @property
    def may_restart(self) -> bool:
        """Whether a new start could end better: not after a stop, nor after wrong usage."""
        return bool(self.failed) and self.stop_requested() is None and self.exit_code != UsageError.exit_code

    @property
    def exit_code(self) -> int:
        """The exit code for all ranks together, once all of them have ended."""
        if self.failed:
            # Wrong usage is never a consequence of another rank's failure, so it decides.
            return UsageError.exit_code if any(end.exit_code == UsageError.exit_code for end in self.failed) else 1
        if self.forced:
            return 1
        codes = [end.exit_code for end in self.exits.values()]
        stopped = [signals.exit_code(-code) if code < 0 else code for code in codes]
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
                for rank in self.alive:
                    _signal_group(self.processes[rank].pid, signal.SIGTERM)
        elif self._stop_requested:
            if self._begin("stopping", now + self.stop_grace_s):
                self.ask_to_stop()
        elif any(end.exit_code in signals.STOPPED for end in self.exits.values()):
            # The ranks have agreed on a stop that one of them was asked for directly.
            self._begin("stopping", now + self.stop_grace_s)
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
        """Ask the ranks alone: their loader workers have to serve them until their checkpoint is written."""
        for rank in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGTERM)

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
            # It may be seen only after the ranks that missed it have recorded theirs.
            self.exits[rank] = RankEnd(
                rank=rank,
                host=socket.gethostname(),
                pid=pid,
                time=self._checked_at,
                exit_code=code,
                ended_by_launcher=ended,
            )
        self._checked_at = now


def _peek(process: Forked) -> int | None:
    """Return the code of an ended process, which stays a zombie, so that no other process gets its number."""
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


@dataclass(frozen=True, kw_only=True)
class RankLimits:
    """Limits of the ranks of a launch.

    Attributes:
        threads: intra-op threads of each rank; ``None``: OMP_NUM_THREADS, or 1.
        stop_grace_s: seconds from a stop until ranks that have not ended are killed.
        restarts: number of failures after which the caller has started the ranks again, ``max_restarts`` at most.
    """

    threads: int | None = None
    stop_grace_s: float = LaunchConfig().stop_grace_s
    restarts: int = 0
    max_restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What :func:`lockstep.launch.local.on_ranks.launch` asks for.

    Attributes:
        call: of every rank; see :func:`lockstep.launch.local.worker.main`.
        caller_pid: process number of the caller; the run stops when it ends.
        environ: variables of the launcher and, through it, of its ranks.
        imports: modules to import once for all ranks, beside those that every rank needs.
        working_folder: ``None``: the caller's was removed.
    """

    run_dir: RunDir
    ranks: int
    call: bytes
    limits: RankLimits
    caller_pid: int
    environ: Mapping[str, str]
    imports: tuple[str, ...]
    working_folder: str | None


@dataclass
class Launch:
    """One launch: the request, and the content of ``logs/launcher.json``."""

    request: LaunchRequest
    stop: signals.StopRequest
    oom_kills_before: int = field(default_factory=oom_kills)
    supervisor: Supervisor = field(init=False)
    error: str = ""

    def __post_init__(self) -> None:
        self.supervisor = Supervisor({}, self.stop_requested, self.request.limits.stop_grace_s)

    @property
    def run_dir(self) -> RunDir:
        return self.request.run_dir

    def announce(self) -> None:
        """Write the run's heartbeat until rank 0 does: readers of the folder see that the run is training."""
        with contextlib.suppress(StorageError):
            beat = self.run_dir.progress()
            announce(self.run_dir.heartbeat_file, beat.step if beat else 0)

    def stop_requested(self) -> int | None:
        # The caller has ended without requesting a stop: the run ends with a checkpoint.
        if os.getppid() != self.request.caller_pid:
            self.stop.request(signal.SIGTERM)
        return self.stop.requested

    def write(self, exit_code: int | None = None) -> None:
        """Keep ``launcher.json`` up to date; a full disk must not end the ranks."""
        supervisor = self.supervisor
        content: dict[str, Any] = {
            "pid": os.getpid(),
            "created": psutil.Process().create_time(),
            "host": socket.gethostname(),
            "ranks": self.request.ranks,
            "starts": self.request.limits.restarts + 1,
            "pids": supervisor.pids,
            "oom_kills": oom_kills() - self.oom_kills_before,
            "error": self.error,
            "may_restart": supervisor.may_restart and not self.error,
            "exit_code": exit_code,
        }
        with contextlib.suppress(StorageError):
            records.write(self.run_dir.logs / records.LAUNCHER_FILE, content)

    def end(self, exit_code: int) -> None:
        """Complete ``launcher.json``, and record how the ranks ended that have failed."""
        self.write(exit_code)
        consequences = [end for end in self.supervisor.exits.values() if end.ended_by_launcher]
        with contextlib.suppress(StorageError):
            records.record_ends(self.run_dir.logs, [*self.supervisor.failed, *consequences])


def main() -> int:
    """Run the ranks of the :class:`LaunchRequest` that standard input, a socket, receives.

    Returns its exit code: 0, 1 failed, 2 wrong usage, 130 or 143 stopped.
    """
    stop = signals.StopRequest().install()
    request = _receive_request()
    if request is None:  # the caller has ended without a launch
        return 0
    os.environ.clear()
    os.environ.update(request.environ)
    with contextlib.suppress(TypeError, OSError):  # the folder was removed
        os.chdir(request.working_folder)  # type: ignore[arg-type]
    for module in request.imports:
        with contextlib.suppress(Exception):  # the ranks report it
            import_module(module)
    signals.accept()
    launch = Launch(request, stop)
    code = 1
    try:
        signal.signal(signal.SIGQUIT, signal.default_int_handler)  # raises KeyboardInterrupt
        # A reader of processes sees by it whose launcher this is.
        os.open(launch.run_dir.path, os.O_RDONLY)
        logging.root.addHandler(logging.NullHandler())  # the terminal is for rank 0
        launch.write()
        launch.announce()
        # Before there are children, which inherit it.
        parent_death.make_lifeline()
        os.environ[environment.LAUNCHER_PID] = str(os.getpid())
        code = _run_ranks(launch)
    except KeyboardInterrupt:
        code = signals.exit_code(stop.requested or signal.SIGINT)
    except LockstepError as error:
        launch.error = str(error)
    except Exception:
        launch.error = traceback.format_exc()
    finally:
        launch.supervisor.kill()  # end every rank, however the launch ended
        with contextlib.suppress(LockstepError, KeyboardInterrupt):
            launch.supervisor.wait(_KILL_S)
        launch.end(exit_code=code)
    return code


def _receive_request() -> LaunchRequest | None:
    """Receive the request and the files that become standard output and error."""
    with socket.socket(fileno=os.dup(0)) as connection:
        _, files, _, _ = socket.recv_fds(connection, 1, 2)
        for number, file in enumerate(files, start=1):
            os.dup2(file, number)
            os.close(file)
        with connection.makefile("rb") as stream:
            content = stream.read()
    return pickle.loads(content) if content else None


def _run_ranks(launch: Launch) -> int:
    """Run all ranks of ``launch`` until they have ended; returns the exit code."""
    server = socket.create_server(("127.0.0.1", 0))  # no other process can take the port
    supervisor = launch.supervisor
    with signals.held_back():
        _start_ranks(launch, server.getsockname()[1])
        launch.write()
    _store = _serve_store(server)  # after the forks: it has a thread; until the ranks have ended
    supervisor.wait()
    if supervisor.forced:
        grace_s = supervisor.stop_grace_s
        launch.error = f"the ranks were killed, since they had not ended {grace_s:g} s after the stop"
    return supervisor.exit_code


def _serve_store(server: socket.socket) -> Any:
    """Serve the store where the ranks meet, as torchrun's agent does: it outlives a rank that stands still."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = server.getsockname()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def _start_ranks(launch: Launch, port: int) -> None:
    """Start the ranks, which meet at ``port`` of this machine."""
    size = str(launch.request.ranks)
    common = {
        **os.environ,
        **{"WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
        **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "rank"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
        "TORCHELASTIC_RUN_ID": os.environ.get(environment.LAUNCH_ID, str(os.getpid())),
        "TORCHELASTIC_RESTART_COUNT": str(launch.request.limits.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.request.limits.max_restarts),
    }
    for rank in range(launch.request.ranks):
        environ = common | {"RANK": str(rank), "ROLE_RANK": str(rank), "LOCAL_RANK": str(rank)}
        launch.supervisor.processes[rank] = fork(partial(_be_rank, launch, environ), name=f"rank-{rank}")


def _be_rank(launch: Launch, environ: Mapping[str, str]) -> int:
    os.environ.clear()
    os.environ.update(environ)
    return worker.main(launch.run_dir.path, launch.request.call)
