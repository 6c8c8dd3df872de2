"""Where the output of ranks goes: rank 0 prints, the others write to their logs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

#: Begins every line that Lockstep itself writes into a rank's log.
MARK = "--- lockstep: "


def log_file(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


@contextlib.contextmanager
def rank_output(logs: Path, rank: int) -> Iterator[None]:
    """Send what this rank prints to its log, below the file descriptors, so native code's output too.

    Rank 0 keeps its terminal; its log gets a copy of Python's warnings and log records. All is as
    before on leaving.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with log_file(logs, rank).open("a", buffering=1, encoding="utf-8", errors="backslashreplace") as log:
        log.write(f"{MARK}process {os.getpid()} begins as rank {rank}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n")
        with _copied_to(log) if rank == 0 else _redirected_to(log):
            yield


@contextlib.contextmanager
def _redirected_to(log: TextIO) -> Iterator[None]:
    flush()
    saved = [(fd, _duplicate(fd)) for fd in (1, 2)]
    for fd, _ in saved:
        os.dup2(log.fileno(), fd)
    try:
        yield
    finally:
        flush()
        for fd, copy in saved:
            if copy is None:
                os.close(fd)
            else:
                os.dup2(copy, fd)
                os.close(copy)


def _duplicate(fd: int) -> int | None:
    try:
        return os.dup(fd)
    except OSError:  # the caller has no such stream, as a daemon
        return None


@contextlib.contextmanager
def _copied_to(log: TextIO) -> Iterator[None]:
    root, show = logging.getLogger(), warnings.showwarning
    copy = logging.StreamHandler(log)
    copy.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    added: list[logging.Handler] = [copy]
    if not root.handlers:
        # What logging does as long as there is no handler.
        terminal = logging.StreamHandler()
        terminal.setLevel(logging.WARNING)
        added.append(terminal)

    def show_and_copy(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        log.write(warnings.formatwarning(message, category, filename, lineno, line))
        show(message, category, filename, lineno, file, line)

    for handler in added:
        root.addHandler(handler)
    warnings.showwarning = show_and_copy
    try:
        yield
    finally:
        warnings.showwarning = show
        for handler in added:
            root.removeHandler(handler)


def flush() -> None:
    """Write out what this process's standard streams hold back."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
