"""Where the output of ranks goes: rank 0 prints, the others write to their logs."""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import selectors
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol, TextIO

#: Begins every line that Lockstep itself writes into a rank's log.
MARK = "--- lockstep: "


def log_file(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


# --- in a rank -----------------------------------------------------------------------------------


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
    _flush()
    saved = [(fd, _duplicate(fd)) for fd in (1, 2)]
    for fd, _ in saved:
        os.dup2(log.fileno(), fd)
    try:
        yield
    finally:
        _flush()
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
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


# --- in the process that started the launcher ----------------------------------------------------


class Child(Protocol):
    def poll(self) -> int | None: ...

    def wait(self) -> int | None: ...


class Relay:
    """Passes the output of a child process to this process's ``sys.stdout`` and ``sys.stderr``.

    Where they are the process's own files the child inherits them, so a progress bar finds its
    terminal. Where they are something else (a notebook, a test's capture, a redirection) the child
    writes to pipes, and :meth:`wait` passes on what comes.
    """

    def __init__(self) -> None:
        _flush()
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

    def wait(self, process: Child) -> int:
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
