"""Launchers as forks of one process, which imports torch once for all the launches of its caller.

::

    caller ──request──▶ fork server ──fork──▶ launcher ──fork──▶ ranks
       ▲                     │ number and exit code of the launcher
       └─────────────────────┘

The server is started with the first launch, or forked from the caller before that has computed anything, and ends with
the caller. Requests come over a socket pair, with the launcher's standard files and the end of another pair for the
answers; see :mod:`multiprocessing.forkserver`, which would import the caller's script again in every child.

A process that forks has one thread, has computed nothing and has not asked the GPU: its child may use threads and CUDA.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from lockstep.errors import RunError
from lockstep.launch.process.rank_log import flush
from lockstep.launch.process.signals import STOP_SIGNALS, held_back

#: Variables that count when a process starts; a server serves launches with the same ones.
_AT_START = ("PYTHON", "LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
#: Those of them that each launcher and rank sets for itself.
_LATER = ("PYTHONPATH", "OMP_NUM_THREADS")
#: The process name of a launcher.
LAUNCHER = "lockstep-launch"
#: What all ranks need.
_IMPORTED = "lockstep.engine.attempt"
#: How often a server looks whether a launcher or, without one, its caller has ended.
_POLL_S = 0.02
_IDLE_POLL_S = 1.0
_MAX_BYTES = 4096
_PR_SET_NAME = 15

_lock = threading.Lock()
_server: ForkServer | None = None


# --- forks ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Forked:
    """A forked child, with the methods of :class:`subprocess.Popen` that its parent needs."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        """Return the return code once the process has ended: that of its exit, or minus the signal that ended it."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # where SIGCHLD is ignored, as subprocess takes it
                pid = self.pid
                status = 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def asked_gpu() -> bool:
    """Return whether this process, or one that it is a fork of, has asked the GPU: then its forks cannot use CUDA."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    from lockstep._compat.torch import in_bad_fork

    return torch.cuda.is_initialized() or in_bad_fork()


def fork(main: Callable[[], int], *, name: str, open_files: Collection[int] = ()) -> Forked:
    """Call ``main``, which returns the exit code, in a child process that leads a session, as a new interpreter would.

    Call it with the stop signals blocked; the child unblocks them once it handles them. ``name``: of the process in
    ``ps -o comm``, 15 characters. ``open_files``: the files that stay open in the child, besides the standard ones.
    """
    flush()
    gc.freeze()  # a collection in the child would copy the pages that it shares
    pid = os.fork()
    return Forked(pid) if pid else _be_child(main, name, open_files)


def _be_child(main: Callable[[], int], name: str, open_files: Collection[int]) -> NoReturn:
    """Turn the forked child into a clean process, run ``main`` and exit with its code."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if fd > 2 and fd not in open_files:
                with contextlib.suppress(OSError):  # the descriptor of this listing is closed already
                    os.close(fd)
        logging.root.handlers.clear()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        flush()
        os._exit(code)


# --- in the caller --------------------------------------------------------------------------------


class RemoteChild:
    """A child that a server has forked, with the methods of :class:`subprocess.Popen` that its caller needs."""

    def __init__(self, answers: socket.socket) -> None:
        self._answers = answers
        self.returncode: int | None = None
        first = answers.recv(_MAX_BYTES)
        if not first:
            raise RunError("the process that starts the ranks ended", fix="look at its last lines above; start again")
        self.pid = int(first)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the return code once the process has ended; ``None`` after ``timeout`` seconds."""
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                answer = self._answers.recv(_MAX_BYTES)
            except (BlockingIOError, TimeoutError):
                return None
            if not answer:  # the server was killed
                self.send_signal(signal.SIGKILL)
            self.returncode = int(answer or -signal.SIGKILL)
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """A fork server, as its caller sees it. It ends when :meth:`close` is called, and with the caller."""

    def __init__(
        self, control: socket.socket, process: subprocess.Popen[bytes] | Forked, environ: Mapping[str, str]
    ) -> None:
        self._control = control
        self._process = process
        self.pid = process.pid
        self._at_start = _at_start(environ)
        self._caller = os.getpid()

    @classmethod
    def start(cls, environ: Mapping[str, str]) -> ForkServer:
        """Start a new interpreter, which imports modules that all ranks need."""
        control, other = _pair()
        with other:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(other.fileno())],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
        return cls(control, process, environ)

    @classmethod
    def fork(cls) -> ForkServer:
        """Fork this process."""
        with held_back():
            control, other = _pair()
            with other:
                process = fork(lambda: serve(other), name="lockstep-forks", open_files=(other.fileno(),))
            return cls(control, process, os.environ)

    def serves(self, environ: Mapping[str, str]) -> bool:
        """Return whether it runs, for this process, and was started with the present variables that matter."""
        return self._runs() and self._at_start == _at_start(environ)

    def launch(self, function: str, shared: Sequence[str], files: tuple[int, int, int]) -> RemoteChild:
        """Fork a launcher, which runs ``function`` (``module:function``) with these standard ``files``.

        ``shared``: modules to import in the server. Raises :class:`RunError` where the server has ended.
        """
        answers, other = _pair()
        with other, contextlib.suppress(OSError):
            socket.send_fds(self._control, [" ".join([function, *shared]).encode()], [*files, other.fileno()])
        return RemoteChild(answers)

    def close(self) -> None:
        """End the server; launchers that run notice that their parent has ended. In a fork of its caller, nothing."""
        if os.getpid() == self._caller:
            self._control.close()
        if self._runs():
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()

    def _runs(self) -> bool:
        return os.getpid() == self._caller and self._process.poll() is None


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key.startswith(_AT_START) and key not in _LATER}


@atexit.register
def _end_server() -> None:
    if _server is not None:
        _server.close()


def _replace_server(server: ForkServer) -> ForkServer:
    global _server
    _end_server()
    _server = server
    return server


def server_for(environ: Mapping[str, str]) -> ForkServer:
    """Return this process's fork server; a new interpreter where ``environ`` needs one."""
    with _lock, held_back():
        if _server is not None and _server.serves(environ):
            return _server
        return _replace_server(ForkServer.start(environ))


def fork_server_here() -> None:
    """Make the fork server of this process a fork of it: modules that are imported by now are not imported again.

    Only for a process with one thread that has computed nothing with torch, such as the command line's.
    """
    if not asked_gpu():
        with _lock:
            _replace_server(ForkServer.fork())


# --- in the server --------------------------------------------------------------------------------


def serve(control: socket.socket) -> int:
    """Fork a launcher for each request, until the caller has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    caller = os.getppid()
    launchers: dict[Forked, socket.socket] = {}
    while os.getppid() == caller:  # the socket stays open as long as a fork of the caller has it
        control.settimeout(_POLL_S if launchers else _IDLE_POLL_S)
        with contextlib.suppress(TimeoutError):
            names, fds, _, _ = socket.recv_fds(control, _MAX_BYTES, 4)
            if not names:
                return 0
            function, *shared = names.decode().split()
            for module in shared:
                with contextlib.suppress(Exception):  # the ranks report it
                    import_module(module)
            _fork_launcher(function, fds, launchers)
        for child in [child for child in launchers if child.poll() is not None]:
            with launchers.pop(child) as answers:
                _answer(answers, child.returncode)
    return 0


def _fork_launcher(function: str, fds: list[int], launchers: dict[Forked, socket.socket]) -> None:
    answers = socket.socket(fileno=fds.pop())
    child = fork(lambda: _be_launcher(fds, function), name=LAUNCHER, open_files=fds)
    for fd in fds:
        os.close(fd)
    launchers[child] = answers
    _answer(answers, child.pid)


def _answer(answers: socket.socket, number: int | None) -> None:
    with contextlib.suppress(OSError):  # the caller waits no more
        answers.send(str(number).encode())


def _be_launcher(fds: list[int], function: str) -> int:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    return int(resolve_name(function)())


if __name__ == "__main__":
    import_module(_IMPORTED)
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
