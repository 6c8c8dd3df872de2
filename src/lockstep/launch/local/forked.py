"""Child processes as forks: they share what this process has imported, and start in milliseconds.

The process that forks has one thread, has computed nothing and has not asked the GPU, so a child may use threads and
CUDA. Where something has asked the GPU (:func:`asked_gpu`), new processes are started instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from lockstep.launch.local.rank_output import flush

_PR_SET_NAME = 15


class Forked:
    """A forked child, with the methods of :class:`subprocess.Popen` that a supervisor needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The return code if the process has ended: that of its exit, or minus the signal that ended it."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end of the process; its return code."""
        code = self._wait(0)
        assert code is not None
        return code

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # where SIGCHLD is ignored, as subprocess takes it
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def asked_gpu() -> bool:
    """Whether this process, or one that it is a fork of, has asked the GPU: then its forks cannot use CUDA."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    from lockstep._compat.torch import in_bad_fork

    return torch.cuda.is_initialized() or in_bad_fork()


def fork(main: Callable[[], int], *, name: str, kept: Collection[int] = ()) -> Forked:
    """Call ``main`` in a child process that leads a session, as a new interpreter would.

    Call it with the stop signals blocked; the child unblocks them once it handles them.

    Args:
        main: its result is the exit code.
        name: of the process in ``top`` and ``ps -o comm``; 15 characters.
        kept: the files that stay open in the child, besides standard input, output and error.
    """
    flush()
    gc.freeze()  # a collection in the child would copy the pages that it shares
    pid = os.fork()
    return Forked(pid) if pid else _be_child(main, name, kept)


def _be_child(main: Callable[[], int], name: str, kept: Collection[int]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if fd > 2 and fd not in kept:
                with contextlib.suppress(OSError):  # that of the listing is closed
                    os.close(fd)
        logging.root.handlers.clear()
        logging.raiseExceptions = True
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        flush()
        os._exit(code)
