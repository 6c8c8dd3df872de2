"""One way to start ranks on this machine: a function on new processes, for runs, sessions, evaluations and trials.

The chain is caller → launcher (:mod:`lockstep.launch.local.launcher`) → ranks (:mod:`lockstep.launch.local.worker`).
No rank runs in the caller, which may be a script without a main guard, a notebook, a thread or a server's child.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import RankFailed, RunFolderError, StorageError
from lockstep.hardware import parent_death
from lockstep.launch.failure import records
from lockstep.launch.failure.report import read_failure
from lockstep.launch.local.launcher import LaunchRequest
from lockstep.launch.local.launcher import RankLimits as RankLimits
from lockstep.launch.local.launcher_process import launcher_for, shared_imports
from lockstep.launch.local.worker import RESULTS, pack_call, take_results
from lockstep.launch.process.environment import LAUNCH_ID, for_launcher
from lockstep.launch.process.rank_log import flush
from lockstep.launch.process.signals import StopRequest, exit_code
from lockstep.rundir.files import read_json, write_json
from lockstep.rundir.folder import RunDir, or_else

DEFAULTS = RankLimits()
#: How long the launcher may take to end after it has been asked to kill all ranks.
_KILL_S = 10.0
#: How long the rest of the output may take after the launcher's end.
_OUTPUT_S = 2.0


class RanksStopped(KeyboardInterrupt):
    """A stop was requested while ranks ran; ``exit_code``: 130 or 143."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


def run_on_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    folder: RunDir,
    ranks: int,
    limits: RankLimits = DEFAULTS,
    redirect: bool = True,
) -> list[Any]:
    """Call ``function(rank, *arguments)`` on ``ranks`` new processes; results in rank order.

    ``rank`` is a :class:`lockstep.launch.local.worker.Rank`. The function raises :class:`Stopped` after a stop.

    Args:
        folder: of a run, or another one, where the ranks keep their logs.
        redirect: ranks print to standard error; the caller's standard output may have to be JSON.

    Raises:
        LockstepError: a rank failed; which one and why. RanksStopped: a stop was requested.
    """
    call = pack_call(function, arguments)
    for file in folder.path.glob(RESULTS):  # from elsewhere: results are unpickled
        file.unlink()
    with StopRequest() as stop, contextlib.redirect_stdout(sys.stderr if redirect else sys.stdout):
        code = 0 if stop.requested else launch(folder, ranks, call, limits)
    # Ranks that were still starting are killed after the grace, with the exit code of a failure.
    if stop.requested is not None or code >= 128:
        raise RanksStopped(exit_code(stop.requested) if stop.requested is not None else code)
    if code:
        report = read_failure(folder)
        raise report.as_error() if report else RankFailed(f"the ranks ended with exit code {code}")
    results = take_results(folder)
    return [results.get(rank) for rank in range(ranks)]


def launch(run_dir: RunDir, ranks: int, call: bytes, limits: RankLimits = DEFAULTS) -> int:
    """Run ``ranks`` ranks on this machine and wait until all have ended.

    In the main thread, SIGINT and SIGTERM stop the run: the ranks write a checkpoint and end, as they do when this
    process ends. A second SIGINT kills them. :func:`lockstep.launch.failure.report.read_failure` reports a failure.

    Args:
        call: of each rank, from :func:`lockstep.launch.local.worker.pack_call`.

    Returns:
        0: done; 1: failed; 2: wrong usage; 130, 143: stopped after a checkpoint (130: without, if interrupted twice).
    """
    try:
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        records.clear(run_dir.logs)
    except OSError as error:
        raise RunFolderError(
            f"cannot write in {run_dir.logs}",
            why=str(error),
            fix="change its permissions, or choose another --save-dir",
        ) from error
    folder = None
    with contextlib.suppress(FileNotFoundError):  # it was removed
        folder = str(Path.cwd())
    request = LaunchRequest(
        run_dir=RunDir(run_dir.path.resolve()),
        ranks=ranks,
        call=call,
        limits=limits,
        caller_pid=os.getpid(),
        environ=for_launcher(os.environ, uuid.uuid4().hex, sys.path, limits.threads),
        imports=shared_imports(),
        working_folder=folder,
    )
    with StopRequest() as stop:
        code = _run_launcher(request, stop)
    if code >= 0:
        return code
    if -code in (signal.SIGINT, signal.SIGTERM):
        return exit_code(-code)
    # Record the launcher's end, which it could not record itself.
    path = run_dir.logs / records.LAUNCHER_FILE
    content = or_else(lambda: read_json(path), {})
    error_text = f"the launcher was killed by signal {-code} ({signal.Signals(-code).name})"
    with contextlib.suppress(StorageError):  # the exit code remains
        write_json(path, {**content, "error": error_text, "exit_code": 1})
    return 1


def _run_launcher(request: LaunchRequest, stop: StopRequest) -> int:
    """Run the launcher and pass on the first signal of ``stop``; its return code. No process is left at the end."""
    output = _Output()
    launcher = launcher_for(request.environ)
    process = launcher.process
    stop.notify(process.send_signal)
    try:
        try:
            with contextlib.suppress(OSError):  # it has ended: its exit code says so
                launcher.send(request, output.files)
        finally:
            output.close_files()
        code = process.wait()
        output.finish()
        return code
    except KeyboardInterrupt:
        process.send_signal(signal.SIGQUIT)  # kill all ranks
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        return exit_code(signal.SIGINT)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)  # its ranks die with it
            process.wait()
        if (process.returncode or 0) < 0:
            parent_death.kill_marked(LAUNCH_ID, request.environ[LAUNCH_ID])


class _Output:
    """Passes the output of a child process to this process's ``sys.stdout`` and ``sys.stderr``.

    If they are the process's files, the child inherits them, so a progress bar finds its terminal. Otherwise (a
    notebook, a test's capture, a redirection) the child writes to pipes, which threads read. ``files``: standard output
    and error of the child.
    """

    def __init__(self) -> None:
        flush()
        self._threads: list[threading.Thread] = []
        self.files = (self._for_child(sys.stdout, sys.__stdout__), self._for_child(sys.stderr, sys.__stderr__))

    def _for_child(self, stream: Any, original: Any) -> int:
        if stream is None:
            return os.open(os.devnull, os.O_WRONLY)
        if stream is original:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                return os.dup(stream.fileno())
        reading, writing = os.pipe()
        self._threads.append(threading.Thread(target=_copy, args=(reading, stream), daemon=True))
        self._threads[-1].start()
        return writing

    def close_files(self) -> None:
        """Close the child's files here, once it has them."""
        for fd in self.files:
            os.close(fd)

    def finish(self) -> None:
        """Wait for the last output of a child that has ended; a process that outlives it may keep the pipes open."""
        for thread in self._threads:
            thread.join(_OUTPUT_S)


def _copy(fd: int, stream: Any) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with open(fd, "rb", buffering=0) as pipe:
        while chunk := pipe.read(65_536):
            # A run does not end because its output can no longer be written.
            with contextlib.suppress(OSError, ValueError):
                stream.write(decoder.decode(chunk))
                stream.flush()
