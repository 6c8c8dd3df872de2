"""The process that forks launchers: it imports torch once for all the launches of its caller.

::

    caller ──request──▶ fork server ──fork──▶ launcher ──fork──▶ ranks
       ▲                     │ number and exit code of the launcher
       └─────────────────────┘

It is started with the first launch, or forked from the caller before that has computed anything, and ends with the
caller. Requests come over a socket pair, with the launcher's standard files and the end of another pair for the
answers; see :mod:`multiprocessing.forkserver`, which would import the caller's script again in every child.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module

from lockstep.errors import RunError
from lockstep.launch.local.forked import Forked, fork
from lockstep.launch.local.signals import STOP_SIGNALS

#: Variables that count when a process starts; a server serves launches with the same ones.
_AT_START = ("PYTHON", "LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
#: Of these, what each launcher and rank sets for itself.
_LATER = ("PYTHONPATH", "OMP_NUM_THREADS")
#: The process name of a launcher.
LAUNCHER = "lockstep-launch"
_MAX_BYTES = 4096


class RemoteChild:
    """A launcher that a server has forked, with the methods of :class:`subprocess.Popen` that its caller needs."""

    def __init__(self, answers: socket.socket) -> None:
        self._answers = answers
        self.returncode: int | None = None
        first = answers.recv(_MAX_BYTES)
        if not first:
            raise RunError("the process that starts the ranks ended", fix="look at its last lines above; start again")
        self.pid = int(first)

    def poll(self) -> int | None:
        """The return code if the process has ended."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """The return code once the process has ended; ``None`` after ``timeout`` seconds."""
        if self.returncode is None and select.select([self._answers], [], [], timeout)[0]:
            answer = self._answers.recv(_MAX_BYTES)
            if not answer:  # the server was killed
                self.kill()
            self.returncode = int(answer or -signal.SIGKILL)
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A fork server, as its caller sees it. It ends when :meth:`close` is called, and with the caller."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | Forked, at_start: dict[str, str]):
        self._control = control
        self._process = process
        self._at_start = at_start
        self._caller = os.getpid()

    @classmethod
    def start(cls, environ: Mapping[str, str]) -> ForkServer:
        """A new interpreter, which imports what the first launch needs."""
        control, other = _pair()
        with other:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.launch.local.fork_server", str(other.fileno())],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
        return cls(control, process, _at_start(environ))

    @classmethod
    def fork(cls) -> ForkServer:
        """A fork of this process, which must have one thread and have computed nothing with torch."""
        control, other = _pair()
        with other:
            process = fork(lambda: serve(other), name="lockstep-forks", kept=(other.fileno(),))
        return cls(control, process, _at_start(os.environ))

    def serves(self, environ: Mapping[str, str]) -> bool:
        """Whether it runs, for this process, and was started with the variables of ``environ`` that matter then."""
        alive = os.getpid() == self._caller and self._process.poll() is None
        return alive and self._at_start == _at_start(environ)

    @property
    def pid(self) -> int:
        return self._process.pid

    def launch(self, function: str, module: str, files: tuple[int, int, int]) -> RemoteChild:
        """Fork a launcher.

        Args:
            function: of the launcher, as ``module:function``; returns its exit code.
            module: what its ranks need; imported in the server.
            files: standard input, output and error of the launcher.

        Raises:
            RunError: the server has ended.
        """
        answers, other = _pair()
        with other, contextlib.suppress(OSError):
            socket.send_fds(self._control, [f"{function} {module}".encode()], [*files, other.fileno()])
        return RemoteChild(answers)

    def close(self) -> None:
        """End the server; launchers that run notice that their parent has ended."""
        self._control.close()
        if os.getpid() == self._caller and self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key.startswith(_AT_START) and key not in _LATER}


# --- in the server ---------------------------------------------------------------------------------


def serve(control: socket.socket) -> int:
    """Fork a launcher for each request, until the caller has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    ended_r, ended_w = socket.socketpair()
    for end in (ended_r, ended_w):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended_w.fileno())
    launchers: dict[Forked, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for source in (control, ended_r):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is ended_r:
                    ended_r.recv(_MAX_BYTES)
                    for child in [child for child in launchers if child.poll() is not None]:
                        _answer(launchers.pop(child), child.returncode)
                    continue
                names, fds, _, _ = socket.recv_fds(control, _MAX_BYTES, 4)
                if not names:
                    return 0
                function, module = names.decode().split()
                answers = socket.socket(fileno=fds.pop())
                with contextlib.suppress(Exception):  # the ranks report it
                    import_module(module)
                child = fork(partial(_be_launcher, fds, function), name=LAUNCHER, kept=fds)
                for fd in fds:
                    os.close(fd)
                launchers[child] = answers
                answers.send(str(child.pid).encode())


def _answer(answers: socket.socket, code: int | None) -> None:
    with answers, contextlib.suppress(OSError):  # the caller no longer waits
        answers.send(str(code).encode())


def _be_launcher(fds: list[int], function: str) -> int:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    module, _, name = function.partition(":")
    code: int = getattr(import_module(module), name)()
    return code


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
