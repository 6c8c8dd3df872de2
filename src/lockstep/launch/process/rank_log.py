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
from collections.abc import Iterator, Mapping
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
#: How long ranks may take to write them, and on a busy machine to get the signal before.
WAIT_S = 2.0
_DELIVERY_S = 10.0

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


def ask_stacks(pids: Mapping[int, int], logs: Path, title: str) -> dict[int, Stack]:
    """Ask each rank for the stack of its main thread; ranks that do not answer in time are left out.

    ``pids``: by rank. ``title``: the line above the stacks in the ranks' logs.
    """
    starts: dict[int, int] = {}
    for rank, pid in pids.items():
        with contextlib.suppress(OSError):
            with log_file(logs, rank).open("a", encoding="utf-8") as log:
                log.write(f"{MARK}rank {rank} {title}\n")
            starts[rank] = log_file(logs, rank).stat().st_size
            os.kill(pid, SIGNAL)
    requested_at = delivered_at = time.monotonic()
    stacks_by_rank: dict[int, Stack] = {}
    while len(stacks_by_rank) < len(starts) and time.monotonic() < delivered_at + WAIT_S:
        time.sleep(0.1)  # also for what comes after the first lines
        pending = any(_has_signal(pids[rank], "ShdPnd:") for rank in starts.keys() - stacks_by_rank)
        if pending and delivered_at < requested_at + _DELIVERY_S:
            delivered_at = time.monotonic()
        stacks = {rank: parse_stack(_read(log_file(logs, rank), start)) for rank, start in starts.items()}
        stacks_by_rank = {rank: stack for rank, stack in stacks.items() if stack}
    return stacks_by_rank


def ask_workers(pid: int, rank: int, logs: Path) -> tuple[str, ...]:
    """Ask each loader worker of ``rank``, the process ``pid``: ``its loader's worker 4711 is at …``.

    Workers are forked, so they have the rank's answer to :data:`SIGNAL`, and write to the rank's log; one after the
    other, as long as they answer.
    """
    descriptions: list[str] = []
    started_at = time.monotonic()
    for worker in _workers(pid):
        if time.monotonic() > started_at + WAIT_S:  # the caller has to check the ranks, too
            break
        with contextlib.suppress(psutil.Error):
            title = f"waits for its loader's worker {worker.pid}; that one's threads are at"
            stack = ask_stacks({rank: worker.pid}, logs, title).get(rank, ())
            position = f"is at {place_of(stack)}" if stack else f"does not answer; its state: {worker.status()}"
            descriptions.append(f"its loader's worker {worker.pid} {position}")
    return tuple(descriptions)


def _workers(pid: int) -> list[psutil.Process]:
    """Return the forks of ``pid``, which are loader workers; to any other child the signal might be the end."""
    with contextlib.suppress(psutil.Error):
        rank = psutil.Process(pid)
        command = rank.cmdline()
        return [child for child in rank.children() if _has_signal(child.pid, "SigCgt:") and child.cmdline() == command]
    return []


def _has_signal(pid: int, field: str) -> bool:
    """Return whether :data:`SIGNAL` is caught (``SigCgt:``) or pending (``ShdPnd:``); see proc_pid_status(5)."""
    with contextlib.suppress(OSError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.partition(field)[2].split()[0], 16) >> (SIGNAL - 1) & 1)
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
