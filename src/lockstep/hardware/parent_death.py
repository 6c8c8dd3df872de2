"""End child processes when their parent ends for any reason.

Two mechanisms complement each other. The parent-death signal (Linux, ``man 2 prctl``, PR_SET_PDEATHSIG) cannot be
missed, but it is sent when the *thread* that started the process ends, so it is for processes started from a main
thread. A pipe whose write end only the parent has is closed with the process, but needs a running thread of the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

import psutil

_PR_SET_PDEATHSIG = 1


def end_now() -> NoReturn:
    """Kill this process, and its process group if it leads one (as every rank does)."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when ``parent_pid`` ends; end now if it has already ended.

    Call it early, in the child. The signal depends on the thread that started this process: see above.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before prctl
        end_now()


def watch_pipe(fd: int) -> None:
    """End this process, from a daemon thread, once the write end of the pipe ``fd`` is closed."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 4096):
                pass
        end_now()

    threading.Thread(target=watch, name="lockstep-lifeline", daemon=True).start()


def make_lifeline() -> int:
    """Make standard input of this process's future children a pipe that closes when this process ends.

    Standard input is the one file that every child inherits. The children call :func:`take_lifeline`. Returns the
    write end, which stays open until the process ends.
    """
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    os.close(reading)
    return writing


def take_lifeline() -> int:
    """Return the pipe of :func:`make_lifeline`, taken from standard input, which becomes empty."""
    lifeline = os.dup(0)  # not inheritable: children of this process get the empty one
    null_device = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_device, 0)
    os.close(null_device)
    return lifeline


def bind_loader_worker() -> None:
    """End a data loader's worker with the process that started it; leave Ctrl-C, SIGTERM and SIGHUP to that.

    Works for any child of :mod:`multiprocessing`. Workers may outlive the thread that started them, so they have no
    parent-death signal. SLURM and systemd send SIGTERM to every process of a job, and a rank needs its workers until
    it has saved: only the parent's one ends a worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="lockstep-sigterm", daemon=True).start()
    watch_pipe(parent.sentinel)


@contextlib.contextmanager
def sigterm_held_back() -> Iterator[None]:
    """Start loader workers in this, so that no thread of theirs takes a signal before :func:`bind_loader_worker`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_marked(variable: str, value: str) -> list[int]:
    """Kill every process of this machine that was started with ``variable=value`` in its environment.

    The last resort for descendants whose ancestors are gone. Never this process. Returns their numbers.
    """
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                process.kill()
                killed.append(process.pid)
    return killed
