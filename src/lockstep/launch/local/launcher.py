"""The launcher process that :func:`lockstep.launch.local.fork_server.launch` starts.

It runs in a separate session, so a terminal's Ctrl-C reaches only the process that started it,
which passes it on. Its exit code is that of all ranks together.

On one machine it starts the ranks itself: it is a fork that shares its modules (see :mod:`.fork_server`), and
so are they. On several machines torch's elastic agent starts them (:mod:`lockstep.launch.nodes.agent`). They get the
variables that torchrun documents (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config import LaunchConfig
from lockstep.errors import LockstepError
from lockstep.hardware import parent_death
from lockstep.hardware.world import STORE_FD
from lockstep.launch.local import environment, signals, worker
from lockstep.launch.local.forked import asked_gpu, fork
from lockstep.launch.local.supervisor import MONITOR_INTERVAL_S, Launch, RankProcess
from lockstep.telemetry.progress_board import PULSES, PulseBoard
from lockstep.telemetry.rundir import RunDir

#: How long to wait for killed ranks.
_KILL_S = 5.0


def main() -> int:
    """Run the ranks of the request on standard input, JSON that :func:`.fork_server.launch` writes.

    Returns:
        The exit code: 0, 1 failed, 2 wrong usage, 130 or 143 stopped.
    """
    stop = signals.StopRequest().install()
    signal.signal(signal.SIGQUIT, signal.default_int_handler)  # raises KeyboardInterrupt
    with open(0, encoding="ascii", closefd=False) as given:
        content = given.read()
    if not content:  # the caller has ended
        return 1
    request = json.loads(content)
    os.environ.clear()
    os.environ.update(request["environ"])
    with contextlib.suppress(KeyError, OSError):  # the folder was removed
        os.chdir(request["cwd"])
    signals.accept()
    wanted = {**request["launch"], "settings": LaunchConfig(**request["launch"]["settings"])}
    here: dict[str, Any] = {"parent_pid": os.getppid(), "stop": stop, "board": PulseBoard(wanted["ranks"])}
    launch = Launch(RunDir(Path(request["folder"])), **wanted, **here)
    # A reader of processes sees by it whose launcher this is.
    os.open(launch.run_dir.path, os.O_RDONLY)
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
    # Before there are children, which inherit it.
    parent_death.make_lifeline()
    os.environ[PULSES] = launch.board.path
    os.environ[environment.LAUNCHER_PID] = str(os.getpid())
    if launch.nodes is None:
        return _run_here(launch)
    from lockstep.launch.nodes import agent, command  # torch

    return agent.run(launch, command.Nodes(**launch.nodes), launch.rank_command)


def _run_here(launch: Launch) -> int:
    """Run all ranks of ``launch`` until they have ended and are not started again; returns the exit code."""
    start = 0
    while True:
        with signals.held_back():
            launch.begin()
            processes = _start_ranks(launch, start)
            supervisor = launch.supervise(processes)
        while not supervisor.check():
            time.sleep(MONITOR_INTERVAL_S)
        if start == launch.settings.max_restarts or not supervisor.may_restart:
            break
        for process in processes.values():
            process.wait()
        start += 1
    if supervisor.forced:
        launch.error = (
            f"the ranks were killed, since they had not ended {launch.settings.stop_grace_s:g} s after the stop"
        )
    return supervisor.exit_code


def _start_ranks(launch: Launch, start: int) -> dict[int, RankProcess]:
    """The processes by rank. Rank 0 gets a socket that listens already, so no other process can take the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        common = {
            **os.environ,
            **{f"{scope}WORLD_SIZE": str(launch.ranks) for scope in ("", "LOCAL_", "ROLE_")},
            **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "rank"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])},
            "TORCHELASTIC_RUN_ID": os.environ.get(environment.LAUNCH_ID, str(os.getpid())),
            "TORCHELASTIC_RESTART_COUNT": str(start),
            "TORCHELASTIC_MAX_RESTARTS": str(launch.settings.max_restarts),
            # Every rank finds the store there, rank 0 too, which serves it (engine/process/runtime.py).
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        processes = {}
        for rank in range(launch.ranks):
            environ = common | {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
            kept = (server.fileno(),) if rank == 0 else ()
            if kept:
                environ[STORE_FD] = str(server.fileno())
            processes[rank] = _start_rank(launch, rank, environ, kept)
        return processes


def _start_rank(launch: Launch, rank: int, environ: Mapping[str, str], kept: tuple[int, ...]) -> RankProcess:
    if not asked_gpu():
        return fork(lambda: _be_rank(launch, environ), name=f"rank-{rank}", kept=kept)
    command = [sys.executable, *launch.rank_command]
    return subprocess.Popen(command, env=environ, pass_fds=kept, start_new_session=True)


def _be_rank(launch: Launch, environ: Mapping[str, str]) -> int:
    os.environ.clear()
    os.environ.update(environ)
    return worker.main(launch.rank_main, str(launch.run_dir.path))


def _end(launch: Launch) -> None:
    """End every rank, however the launch ended."""
    if launch.supervisor is None:
        return
    launch.supervisor.kill()
    deadline = time.monotonic() + _KILL_S
    with contextlib.suppress(LockstepError, KeyboardInterrupt):
        while not launch.supervisor.check() and time.monotonic() < deadline:
            time.sleep(0.02)


def _keep_quiet(log: Path) -> None:
    """Send the agent's messages to a file; the terminal is for rank 0."""
    logging.raiseExceptions = False  # on a full disk logging would print an error for every record
    handler: logging.Handler = logging.NullHandler()
    with contextlib.suppress(OSError):
        handler = logging.FileHandler(log, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
