"""A rank's log, ``logs/rank-<r>.log``: its output and, on request, the stacks of its threads.

``faulthandler`` writes the stacks when a signal comes, which works in native code too, and while another thread has
the interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

import psutil

#: Begins every line that Lockstep itself writes into a rank's log.
MARK = "--- lockstep: "
#: How many of a rank's last lines a report shows.
LAST_LINES = 10
#: Requests a rank's stacks. Batch systems use SIGUSR1 to announce a preemption.
SIGNAL = signal.SIGUSR2
#: How long a rank may take to write them.
WAIT_S = 5.0

_TAIL_BYTES = 64 << 10
_MAX_STACK_BYTES = 1 << 20
#: What faulthandler writes for a character that is not ASCII.
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_PACKAGE = str(Path(__file__).resolve().parents[2])
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_LOADERS = tuple(str(Path(_PACKAGE, name)) for name in ("data/loader.py", "lightning/dataloaders.py"))
_COLLECTIVES = str(Path(_PACKAGE, "engine", "distributed"))
_START = f"{_PACKAGE}{os.sep}launch{os.sep}"
#: Names of torch's decorators in a stack.
_DECORATORS = frozenset({"wrapper", "decorate_context", "_fn"})


def log_file(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


@contextmanager
def rank_output(logs: Path, rank: int) -> Iterator[None]:
    """Send this rank's output to its log, below the file descriptors: that of native code too.

    Rank 0 keeps its terminal. All is as before on leaving.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with log_file(logs, rank).open("a", buffering=1, encoding="utf-8", errors="backslashreplace") as log:
        log.write(f"{MARK}process {os.getpid()} begins as rank {rank}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n")
        with contextlib.nullcontext() if rank == 0 else _redirected_to(log):
            yield


@contextmanager
def _redirected_to(log: TextIO) -> Iterator[None]:
    flush()
    saved: dict[int, int] = {}
    for fd in (1, 2):
        with contextlib.suppress(OSError):  # a daemon has none
            saved[fd] = os.dup(fd)
        os.dup2(log.fileno(), fd)
    try:
        yield
    finally:
        flush()
        for fd in (1, 2):
            if fd in saved:
                os.dup2(saved[fd], fd)
            os.close(saved.get(fd, fd))


def flush() -> None:
    """Flush this process's standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def last_lines(log: Path, count: int = LAST_LINES) -> tuple[str, ...]:
    """Return the last lines that a rank wrote since it began, without those of Lockstep, its traceback among them.

    Of a crash in native code, the words before it and the innermost Python calls.
    """
    text = ""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    before, mark, after = text.rpartition(f"{MARK}rank ")
    if mark and f"{MARK}process " not in after:
        text = before
    _, mark, output = text.rpartition(f"{MARK}process ")
    lines = output.split("\n")[1:] if mark else text.split("\n")
    drawn = (line.rstrip().rsplit("\r", 1)[-1] for line in lines)  # a progress bar redraws its line
    printed = [line for line in drawn if line]
    crash = next((row for row, line in enumerate(printed) if line.startswith("Fatal Python error")), None)
    if crash is None:
        return tuple(printed[-count:])
    threads = [row for row, line in enumerate(printed) if row > crash and line.startswith(("Thread", "Current"))]
    current = [row for row in threads if printed[row].startswith("Current")] or threads[-1:]
    words = printed[max(0, crash + 1 - count // 2) : crash + 1]
    return (*words, *(printed[current[0] :][: count - len(words)] if current else ()))


# --- stacks ----------------------------------------------------------------------------------------


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_framework(self) -> bool:
        """Whether it belongs to Lockstep, torch or Lightning: where ranks wait for each other."""
        return self.file.startswith(_PACKAGE) or any(f"/{name}/" in self.file for name in ("torch", "lightning"))

    @property
    def is_collective(self) -> bool:
        """Whether it is where a rank communicates with others."""
        return "/torch/distributed/" in self.file or self.file.startswith(_COLLECTIVES)

    @property
    def is_loader(self) -> bool:
        """Whether it is where a rank takes its next batch."""
        return self.file in _LOADERS

    @property
    def is_library(self) -> bool:
        """Whether it is not the user's code."""
        return self.is_framework or "site-packages" in self.file or self.file.startswith(("<", *_STANDARD))


#: Innermost call first.
Stack = tuple[Frame, ...]


@contextmanager
def stacks_on_request(log: TextIO) -> Iterator[None]:
    """Write the stacks of all threads of this rank to ``log`` when :data:`SIGNAL` comes."""
    faulthandler.register(SIGNAL, file=log, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(SIGNAL)


def ask_stack(pid: int, rank: int, logs: Path, title: str) -> Stack:
    """Ask a rank, the process ``pid``, for the stack of its main thread; () if it does not answer in time.

    ``title``: the line above the stacks in the rank's log.
    """
    file = log_file(logs, rank)
    stack: Stack = ()
    with contextlib.suppress(OSError):
        with file.open("a", encoding="utf-8") as log:
            log.write(f"{MARK}rank {rank} {title}\n")
        start = file.stat().st_size
        os.kill(pid, SIGNAL)
        deadline = time.monotonic() + WAIT_S
        while not stack and time.monotonic() < deadline:
            time.sleep(0.1)  # also for what comes after the first lines
            stack = parse_stack(_read(file, start))
    return stack


def ask_workers(rank: int, logs: Path) -> str:
    """Ask the loader workers of this process, which is ``rank``, for their stacks; the place of the first that answers.

    Workers are forks, so they have this rank's answer to :data:`SIGNAL`, and write to its log.
    """
    deadline = time.monotonic() + WAIT_S
    for worker in psutil.Process().children():
        if time.monotonic() < deadline and _takes_signal(worker.pid):
            title = f"waits for its loader's worker {worker.pid}; that one's threads are at"
            stack = ask_stack(worker.pid, rank, logs, title)
            if stack:
                return f"its loader's worker {worker.pid} is at {place_of(stack)}"
    return ""


def _takes_signal(pid: int) -> bool:
    """Return whether a process handles :data:`SIGNAL`, which ends any other one; see proc_pid_status(5)."""
    with contextlib.suppress(OSError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (SIGNAL - 1) & 1)
    return False


def _read(log: Path, start: int) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(start)
        return file.read(_MAX_STACK_BYTES).decode("utf-8", "replace")
    return ""


def parse_stack(text: str) -> Stack:
    """Parse the frames of the signalled thread, as ``faulthandler`` wrote them; () while incomplete."""
    _, mark, thread = text.rpartition("Current thread ")
    if not mark or not thread.endswith("\n"):
        return ()
    frames = []
    for line in thread.splitlines()[1:]:
        frame = _FRAME.match(line)
        if frame is None:
            break
        file, function = (_ESCAPED.sub(lambda match: chr(int(match[0][2:], 16)), text) for text in frame.group(1, 3))
        frames.append(Frame(file, int(frame["line"]), function))
    return tuple(frames)


def place_of(stack: Stack) -> str:
    """Return the user's line in a stack (else Lockstep's) and its call: ``task.py:12 in loss, in sum``."""
    for is_it in (lambda frame: not frame.is_library, lambda frame: frame.file.startswith(_PACKAGE)):
        for index, frame in enumerate(stack):
            if is_it(frame):
                calls = [inner.function for inner in stack[:index] if inner.function not in _DECORATORS]
                return f"{frame}{f', in {calls[-1]}' if calls else ''}"
    return str(stack[0]) if stack else ""


def own_part(stack: Stack) -> Stack:
    """Cut the calls below a rank's main function, the same in all ranks, from ``stack``."""
    ends = (index for index, frame in enumerate(stack) if frame.file.startswith(_START))
    return stack[: next(ends, len(stack))]


def leave(code: int) -> NoReturn:
    """End this process at once, with its loader workers."""
    for child in multiprocessing.active_children():
        child.kill()
    flush()
    os._exit(code)
