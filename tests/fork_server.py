"""A process that has imported what a test's commands need, and forks them.

::

    test ──request──▶ fork server ──fork──▶ command
      ▲                    │ number and exit code of the command
      └────────────────────┘

Requests come over a socket pair, with the command's standard files and the end of another pair for the answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pkgutil import resolve_name

from lockstep.launch.local.forks import Forked, fork
from lockstep.launch.process.signals import STOP_SIGNALS

#: Variables that count when a process starts; a server serves commands with the same ones.
_AT_START = ("PYTHON", "LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
#: Those of them that commands set for themselves.
_LATER = ("PYTHONPATH", "OMP_NUM_THREADS")
#: How often a server looks whether a command or, without one, the test process has ended.
_POLL_S = 0.02
_IDLE_POLL_S = 1.0
_MAX_BYTES = 4096


class RemoteChild:
    """A command that a server has forked."""

    def __init__(self, answers: socket.socket) -> None:
        self._answers = answers
        self.returncode: int | None = None
        self.pid = int(answers.recv(_MAX_BYTES))

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the return code once the process has ended; ``None`` after ``timeout`` seconds."""
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                self.returncode = int(self._answers.recv(_MAX_BYTES))
            except (BlockingIOError, TimeoutError):
                return None
            self._answers.close()
        return self.returncode


class ForkServer:
    """A fork server, as the test process sees it."""

    def __init__(self, environ: Mapping[str, str], imported: str) -> None:
        """Start an interpreter with ``environ`` that imports the module ``imported``."""
        self._control, other = _pair()
        self._at_start = _at_start(environ)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, imported, str(other.fileno())],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
        self.pid = self._process.pid

    def serves(self, environ: Mapping[str, str]) -> bool:
        """Return whether the server was started with the present variables that matter."""
        return self._at_start == _at_start(environ)

    def start(self, function: str, files: tuple[int, int, int]) -> RemoteChild:
        """Fork a process that runs ``function`` (``module:function``) with these standard ``files``."""
        answers, other = _pair()
        with other:
            socket.send_fds(self._control, [function.encode()], [*files, other.fileno()])
        return RemoteChild(answers)

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key.startswith(_AT_START) and key not in _LATER}


def serve(control: socket.socket) -> None:
    """Fork a command for each request, until the test process has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    test_process = os.getppid()
    commands: dict[Forked, socket.socket] = {}
    while os.getppid() == test_process:
        control.settimeout(_POLL_S if commands else _IDLE_POLL_S)
        with contextlib.suppress(TimeoutError):
            function, fds, _, _ = socket.recv_fds(control, _MAX_BYTES, 4)
            if not function:
                return
            answers = socket.socket(fileno=fds.pop())
            command = fork(lambda: _be_command(fds, function.decode()), name="command", open_files=fds)  # noqa: B023
            for fd in fds:
                os.close(fd)
            commands[command] = answers
            answers.send(str(command.pid).encode())
        for command in [command for command in commands if command.poll() is not None]:
            with commands.pop(command) as answers, contextlib.suppress(OSError):  # the test waits no more
                answers.send(str(command.returncode).encode())


def _be_command(fds: list[int], function: str) -> int:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    return int(resolve_name(function)())


if __name__ == "__main__":
    import_module(sys.argv[1])
    serve(socket.socket(fileno=int(sys.argv[2])))
