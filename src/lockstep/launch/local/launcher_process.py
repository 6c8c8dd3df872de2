"""The launcher (:mod:`.launcher`) as the process that launches sees it. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from typing import Any

from lockstep.hardware import parent_death
from lockstep.launch.local.environment import LAUNCH_ID, for_launcher
from lockstep.launch.local.fork_server import ForkServer, RemoteChild
from lockstep.launch.local.forked import FORKS, asked_gpu
from lockstep.launch.local.rank_output import Relay
from lockstep.launch.local.signals import StopRequest, exit_code, held_back

_LAUNCHER = "lockstep.launch.local.launcher"
#: How long the launcher may take to end after it has been asked to kill all ranks.
_KILL_S = 10.0

_lock = threading.Lock()
_server: ForkServer | None = None


@atexit.register
def _end_server() -> None:
    if _server is not None:
        _server.close()


def fork_server_here() -> None:
    """Make the fork server of this process a fork of it: what is imported by now is not imported again.

    Only for a process with one thread that has computed nothing with torch, such as the command line's.
    """
    global _server
    if FORKS and not asked_gpu():
        with _lock, held_back():
            _server = ForkServer.fork()


def run_launcher(
    folder: str, settings: Mapping[str, Any], environ: Mapping[str, str], stop: StopRequest, *, several: bool
) -> int:
    """Launch ranks and wait for their end; the launcher's return code. No process is left, however this ends.

    Args:
        folder: the run's.
        settings: fields of :class:`lockstep.launch.local.supervisor.Launch`.
        environ: variables for the ranks in addition to this process's.
        stop: its first signal is passed on.
        several: whether the ranks are some of those of several nodes.
    """
    launch_id, relay = uuid.uuid4().hex, Relay()
    variables = for_launcher({**os.environ, **environ}, launch_id, sys.path, several=several)
    reading, writing = os.pipe()
    process: subprocess.Popen[bytes] | RemoteChild | None = None
    try:
        with open(writing, "wb") as request:
            try:
                process = _start((reading, *relay.files), variables, settings["rank_main"])
            finally:
                os.close(reading)
                relay.close_files()
            with contextlib.suppress(BrokenPipeError):  # it has ended, with an exit code
                request.write(json.dumps({"folder": folder, "settings": settings, "environ": variables}).encode())
        stop.notify(process.send_signal)
        return relay.wait(process)
    except KeyboardInterrupt:
        if process is not None:
            process.send_signal(signal.SIGQUIT)  # kill all ranks
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(_KILL_S)
        return exit_code(signal.SIGINT)
    finally:
        if process is not None and process.poll() is None:
            process.kill()  # its ranks die with it
            process.wait()
        if process is not None and (process.returncode or 0) < 0:
            parent_death.kill_marked(LAUNCH_ID, launch_id)


def _start(
    files: tuple[int, int, int], environ: Mapping[str, str], rank_main: str
) -> subprocess.Popen[bytes] | RemoteChild:
    """A launcher with ``files`` as standard input, output and error."""
    if FORKS:
        return _server_for(environ).launch(f"{_LAUNCHER}:main", rank_main.partition(":")[0], files)
    stdin, stdout, stderr = files
    command = [sys.executable, "-P", "-m", _LAUNCHER]
    with held_back():
        return subprocess.Popen(command, env=environ, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)


def _server_for(environ: Mapping[str, str]) -> ForkServer:
    """This process's fork server; a new one where ``environ`` needs one."""
    global _server
    with _lock:
        if _server is None or not _server.serves(environ):
            if _server is not None:
                _server.close()
            with held_back():
                _server = ForkServer.start(environ)
        return _server
