"""Forked processes, which share the modules that their parent has imported.

The parent has one thread, has computed nothing and has not asked the GPU: its child may use threads and CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lockstep.launch.process.rank_log import flush

_POLL_S = 0.02
_PR_SET_NAME = 15


@dataclass(eq=False)
class Forked:
    """A forked child, with the methods of :class:`subprocess.Popen` that its parent needs."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the return code if the process has ended: that of its exit, or minus the signal that ended it."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process. Raises :class:`subprocess.TimeoutExpired` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._wait(0 if deadline is None else os.WNOHANG)) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # where SIGCHLD is ignored, as subprocess takes it
                pid = self.pid
                status = 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def fork(main: Callable[[], int], *, name: str, open_files: Collection[int] = ()) -> Forked:
    """Call ``main``, which returns the exit code, in a child process that leads a session, as a new interpreter would.

    Call it with the stop signals blocked; the child unblocks them once it handles them. ``name``: of the process in
    ``ps -o comm``, 15 characters. ``open_files``: the files that stay open in the child, besides the standard ones.
    """
    flush()
    gc.freeze()  # a collection in the child would copy the pages that it shares
    pid = os.fork()
    return Forked(pid) if pid else _be_child(main, name, open_files)


def set_name(name: str) -> None:
    """Set the name of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


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
        set_name(name)
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        flush()
        os._exit(code)
