"""Launchers as forks of one process, which imports torch once for all the launches of its caller.

::

    caller ──request──▶ fork server ──fork──▶ launcher ──fork──▶ ranks
       ▲                     │ number and exit code of the launcher
       └─────────────────────┘

The server is started with the first launch, or forked from the caller before that has computed anything, and ends with
the caller. Requests come over a socket pair, with the launcher's standard files and the end of another pair for the
answers; see :mod:`multiprocessing.forkserver`, which would import the caller's script again in every child.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any

from lockstep.config import LaunchConfig
from lockstep.errors import RunError, RunFolderError, StorageError
from lockstep.hardware import parent_death
from lockstep.launch.failure import records
from lockstep.launch.local.environment import LAUNCH_ID, THREADS, for_launcher
from lockstep.launch.local.forked import Forked, asked_gpu, fork
from lockstep.launch.local.rank_output import flush
from lockstep.launch.local.signals import STOP_SIGNALS, StopRequest, exit_code, held_back
from lockstep.telemetry.rundir import RunDir, or_else, read_json, write_json

#: Variables that count when a process starts; a server serves launches with the same ones.
_AT_START = ("PYTHON", "LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
#: Of these, what each launcher and rank sets for itself.
_LATER = ("PYTHONPATH", "OMP_NUM_THREADS")
#: The process name of a launcher.
LAUNCHER = "lockstep-launch"
_MAIN = "lockstep.launch.local.launcher:main"
#: What takes seconds to import: where the caller has it, its ranks share one import of it.
_SHARED = ("lightning.pytorch",)
_MAX_BYTES = 4096
#: How long the launcher may take to end after it has been asked to kill all ranks.
_KILL_S = 10.0

_lock = threading.Lock()
_server: ForkServer | None = None


@atexit.register
def _end_server() -> None:
    if _server is not None:
        _server.close()


def fork_server_here(prepare: Callable[[], None] | None = None) -> None:
    """Make the fork server of this process a fork of it: what is imported by now is not imported again.

    Only for a process with one thread that has computed nothing with torch, such as the command line's.

    Args:
        prepare: imports more, which the server has unless that has started threads or asked a GPU.
    """
    global _server
    if asked_gpu():
        return
    with _lock:
        if _server is not None:
            _server.close()
        _server = ForkServer.fork()
        if prepare is None:
            return
        before = set(sys.modules)
        prepare()
        if not before.issuperset(sys.modules) and not asked_gpu() and not _has_gpu_files():
            other = ForkServer.fork()
            threads = len(list(Path("/proc/self/task").iterdir()))  # those of BLAS end before a fork
            unused, _server = (_server, other) if threads == 1 else (other, _server)
            unused.close()


def _has_gpu_files() -> bool:
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing is closed
            if str(link.readlink()).startswith("/dev/nvidia"):
                return True
    return False


def launch(
    run_dir: RunDir,
    ranks: int,
    *,
    rank_main: str,
    settings: LaunchConfig | None = None,
    threads: int | None = None,
    nodes: Mapping[str, Any] | None = None,
    shared: Sequence[str] = (),
) -> int:
    """Run ``ranks`` ranks of an existing run on this machine and wait until all have ended.

    In the main thread, SIGINT and SIGTERM stop the run: the ranks write a checkpoint and end, as they do when this
    process ends. A second SIGINT kills them. After a failure, :func:`lockstep.launch.failure.report.read_failure`
    reports it.

    Args:
        rank_main: what every rank runs, as ``module:function``; it takes a
            :class:`lockstep.launch.local.worker.Rank` and returns an exit code.
        settings: of which restarts and time limits count; ``None``: the defaults.
        threads: intra-op threads of each rank; ``None``: OMP_NUM_THREADS, or 1.
        nodes: fields of :class:`lockstep.launch.nodes.command.Nodes`, for a run on several nodes.
        shared: modules that all ranks import, besides that of ``rank_main``.

    Returns:
        0: done; 1: failed; 2: wrong usage; 130 or 143: stopped by SIGINT or SIGTERM after a
        checkpoint (also 130 without one, after a second SIGINT).
    """
    try:
        records.clear(run_dir.logs)
    except OSError as error:
        raise RunFolderError(
            f"cannot write in {run_dir.logs}",
            why=str(error),
            fix="change its permissions, or choose another --save-dir",
        ) from error
    limits = (settings or LaunchConfig()).model_dump()
    wanted = {"ranks": ranks, "rank_main": rank_main, "settings": limits, "nodes": nodes}
    with StopRequest() as stop:
        environ = {**os.environ, **({THREADS: str(threads)} if threads else {})}
        code = _run_launcher(str(run_dir.path.resolve()), wanted, environ, stop, shared)
    return code if code >= 0 else _ended_by_signal(run_dir, -code)


def _run_launcher(
    folder: str, wanted: Mapping[str, Any], environ: Mapping[str, str], stop: StopRequest, shared: Sequence[str]
) -> int:
    """The launcher's return code. No process is left, however this ends; the first signal of ``stop`` is passed on."""
    launch_id, relay = uuid.uuid4().hex, Relay()
    variables = for_launcher(environ, launch_id, sys.path, several=wanted["nodes"] is not None)
    reading, writing = os.pipe()
    process: RemoteChild | None = None
    try:
        # A launcher that has ended already has an exit code.
        with contextlib.suppress(BrokenPipeError), open(writing, "wb") as request:
            try:
                known = (name for name in _SHARED if name in sys.modules)
                modules = [wanted["rank_main"].partition(":")[0], *shared, *known]
                process = _server_for(variables).launch(_MAIN, modules, (reading, *relay.files))
            finally:
                os.close(reading)
                relay.close_files()
            content = {"folder": folder, "environ": variables, "launch": wanted}
            with contextlib.suppress(FileNotFoundError):  # it was removed
                content["cwd"] = str(Path.cwd())  # the server has that of its start
            request.write(json.dumps(content).encode())
        assert process is not None
        stop.notify(process.send_signal)
        return relay.wait(process)
    except KeyboardInterrupt:
        if process is not None:
            process.send_signal(signal.SIGQUIT)  # kill all ranks
            with contextlib.suppress(KeyboardInterrupt):
                process.wait(_KILL_S)
        return exit_code(signal.SIGINT)
    finally:
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGKILL)  # its ranks die with it
            process.wait()
        if process is not None and (process.returncode or 0) < 0:
            parent_death.kill_marked(LAUNCH_ID, launch_id)


def _ended_by_signal(run_dir: RunDir, number: int) -> int:
    """Record the launcher's end, which it could not record itself."""
    if number in (signal.SIGINT, signal.SIGTERM):
        return exit_code(number)
    path = run_dir.logs / records.LAUNCHER_FILE
    content = or_else(lambda: read_json(path), {})
    name = signal.Signals(number).name
    with contextlib.suppress(StorageError):  # the exit code remains
        write_json(path, {**content, "error": f"the launcher was killed by signal {number} ({name})", "exit_code": 1})
    return 1


def _server_for(environ: Mapping[str, str]) -> ForkServer:
    """This process's fork server; a new interpreter where ``environ`` needs one."""
    global _server
    with _lock:
        if _server is None or not _server.serves(environ):
            if _server is not None:
                _server.close()
            with held_back():
                _server = ForkServer.start(environ)
        return _server


class RemoteChild:
    """A child that a server has forked, with the methods of :class:`subprocess.Popen` that its caller needs."""

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
        """Send a signal, unless the process has ended."""
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
        """A new interpreter, which imports what the first launch needs."""
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
        """A fork of this process."""
        with held_back():
            control, other = _pair()
            with other:
                process = fork(lambda: serve(other), name="lockstep-forks", kept=(other.fileno(),))
            return cls(control, process, os.environ)

    def serves(self, environ: Mapping[str, str]) -> bool:
        """Whether it runs, for this process, and was started with the variables of ``environ`` that matter then."""
        return self._runs() and self._at_start == _at_start(environ)

    def launch(self, function: str, modules: Sequence[str], files: tuple[int, int, int]) -> RemoteChild:
        """Fork a launcher.

        Args:
            function: of the launcher, as ``module:function``; returns its exit code.
            modules: what its ranks need; imported in the server.
            files: standard input, output and error of the launcher.

        Raises:
            RunError: the server has ended.
        """
        answers, other = _pair()
        with other, contextlib.suppress(OSError):
            socket.send_fds(self._control, [" ".join([function, *modules]).encode()], [*files, other.fileno()])
        return RemoteChild(answers)

    def close(self) -> None:
        """End the server; launchers that run notice that their parent has ended."""
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


class Relay:
    """Passes the output of a child process to this process's ``sys.stdout`` and ``sys.stderr``.

    Where they are the process's own files the child inherits them, so a progress bar finds its
    terminal. Where they are something else (a notebook, a test's capture, a redirection) the child
    writes to pipes, and :meth:`wait` passes on what comes.
    """

    def __init__(self) -> None:
        flush()
        self._pipes: list[tuple[IO[bytes], Any]] = []
        self._opened: list[int] = []
        #: Standard output and error of the child.
        self.files = (self._for_child(sys.stdout, sys.__stdout__), self._for_child(sys.stderr, sys.__stderr__))

    def _for_child(self, stream: Any, original: Any) -> int:
        if stream is None:
            self._opened.append(os.open(os.devnull, os.O_WRONLY))
            return self._opened[-1]
        if stream is original:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                return int(stream.fileno())
        reading, writing = os.pipe()
        self._pipes.append((os.fdopen(reading, "rb", buffering=0), stream))
        self._opened.append(writing)
        return writing

    def close_files(self) -> None:
        """Close what only the child needs, once it has it."""
        while self._opened:
            os.close(self._opened.pop())

    def wait(self, process: RemoteChild) -> int:
        """Wait for the child's end while passing on what it writes; its return code."""
        with contextlib.ExitStack() as resources:
            selector = resources.enter_context(selectors.DefaultSelector())
            for pipe, target in self._pipes:
                resources.enter_context(pipe)
                os.set_blocking(pipe.fileno(), False)
                decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
                selector.register(pipe, selectors.EVENT_READ, (target, decoder))
            # A process that outlives the child may keep the pipes open, so their end is not awaited.
            while selector.get_map() and process.poll() is None:
                _pass_on(selector, timeout_s=0.1)
            code = process.wait()
            assert code is not None
            while selector.get_map() and _pass_on(selector, timeout_s=0.0):
                pass
            return code


def _pass_on(selector: selectors.BaseSelector, timeout_s: float) -> bool:
    """Pass on the output that is available. Returns whether there was any."""
    ready = selector.select(timeout_s)
    for key, _ in ready:
        target, decoder = key.data
        try:
            chunk = os.read(key.fd, 65_536)
        except BlockingIOError:
            continue
        if not chunk:
            selector.unregister(key.fileobj)
        # A run does not end because its output can no longer be written.
        with contextlib.suppress(OSError, ValueError):
            target.write(decoder.decode(chunk, final=not chunk))
            target.flush()
    return bool(ready)


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
        # What to do about each event; False: the caller has ended.
        selector.register(control, selectors.EVENT_READ, partial(_fork_launcher, control, launchers))
        selector.register(ended_r, selectors.EVENT_READ, partial(_report_ends, ended_r, launchers))
        with contextlib.suppress(OSError):  # an older kernel: only the end of the socket shows the caller's
            # The socket stays open as long as a fork of the caller has it.
            selector.register(os.pidfd_open(os.getppid()), selectors.EVENT_READ, lambda: False)
        while all(key.data() for key, _ in selector.select()):
            pass
    return 0


def _fork_launcher(control: socket.socket, launchers: dict[Forked, socket.socket]) -> bool:
    names, fds, _, _ = socket.recv_fds(control, _MAX_BYTES, 4)
    if not names:
        return False
    function, *modules = names.decode().split()
    answers = socket.socket(fileno=fds.pop())
    for module in modules:
        with contextlib.suppress(Exception):  # the ranks report it
            import_module(module)
    child = fork(partial(_be_launcher, fds, function), name=LAUNCHER, kept=fds)
    for fd in fds:
        os.close(fd)
    launchers[child] = answers
    _answer(answers, child.pid)
    return True


def _report_ends(ended: socket.socket, launchers: dict[Forked, socket.socket]) -> bool:
    ended.recv(_MAX_BYTES)
    for child in [child for child in launchers if child.poll() is not None]:
        with launchers.pop(child) as answers:
            _answer(answers, child.returncode)
    return True


def _answer(answers: socket.socket, number: int | None) -> None:
    with contextlib.suppress(OSError):  # the caller waits no more
        answers.send(str(number).encode())


def _be_launcher(fds: list[int], function: str) -> int:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    return int(resolve_name(function)())


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
