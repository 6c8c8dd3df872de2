"""The launcher's process, as its caller sees it.

It is a new interpreter. A command that has imported torch, and has computed nothing, forks it ahead instead, and so
imports torch once. The request and the files for its output go over a socket, which is its standard input.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Self

from lockstep.launch.local import launcher
from lockstep.launch.local.forks import Forked, fork, set_name
from lockstep.launch.process.signals import held_back

#: Slow imports: if the caller has one, all its ranks share one import of it.
_SHARED = ("lightning.pytorch",)

_forked_ahead: list[LauncherProcess] = []


class LauncherProcess:
    """A launcher that waits for its request, or runs it."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, connection: socket.socket) -> None:
        self.process = process
        self._connection = connection

    @classmethod
    def start(cls, environ: Mapping[str, str]) -> Self:
        """Start a new interpreter."""
        connection, other = socket.socketpair()
        with other:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__], env=environ, stdin=other.fileno(), start_new_session=True
            )
        return cls(process, connection)

    @classmethod
    def fork(cls) -> Self:
        """Fork this process."""
        connection, other = socket.socketpair()
        with other:

            def main() -> int:
                os.dup2(other.fileno(), 0)
                return launcher.main()

            process = fork(main, name=launcher.NAME, open_files=(other.fileno(),))
        return cls(process, connection)

    def send(self, request: launcher.LaunchRequest, files: tuple[int, int]) -> None:
        """Let it run ``request``, with these files as its standard output and error. Raises :class:`OSError`."""
        with self._connection as connection:
            socket.send_fds(connection, [b"\0"], files)
            connection.sendall(pickle.dumps(request))


def fork_launcher_ahead() -> None:
    """Fork the launcher of the next launch from this process, so that it shares the modules imported by now.

    For a process that has computed nothing with torch, such as that of a command. A process with threads is not forked.
    """
    if threading.active_count() == 1:
        with held_back():
            _forked_ahead.append(LauncherProcess.fork())


def launcher_for(environ: Mapping[str, str]) -> LauncherProcess:
    """Return the launcher that was forked ahead, or start one with ``environ``."""
    with held_back():
        return _forked_ahead.pop() if _forked_ahead else LauncherProcess.start(environ)


def shared_imports() -> tuple[str, ...]:
    """Return the slow imports that this process has made."""
    return tuple(name for name in _SHARED if name in sys.modules)


if __name__ == "__main__":
    import_module("lockstep.engine.attempt")  # all ranks need it
    set_name(launcher.NAME)
    sys.exit(launcher.main())
