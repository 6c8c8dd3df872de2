"""What a test may leave changed in its process: a snapshot before, and the differences after."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.gloo import LIBRARY_VARIABLES, TOKEN_VARIABLE

#: How long processes and threads that were told to end may take to do so.
GRACE_S = 5.0
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD"))
#: Variables that pytest, coverage and libraries set for their own purposes when first used.
ENVIRONMENT_EXEMPT = ("PYTEST_", "RAY_CLIENT_MODE", "COV_", "COVERAGE_", *LIBRARY_VARIABLES)


def mark_descendants() -> None:
    """Give this process's future descendants a mark that survives re-parenting."""
    os.environ[TOKEN_VARIABLE] = f"{os.getpid()}-{uuid.uuid4().hex}"


@dataclass(frozen=True)
class Snapshot:
    environment: dict[str, str]
    folder: Path
    signals: dict[int, Any]
    torch: dict[str, Any] | None
    threads: frozenset[int]
    processes: frozenset[tuple[int, float]]


def take_snapshot() -> Snapshot:
    return Snapshot(
        environment=_environment(),
        folder=Path.cwd(),
        signals={number: signal.getsignal(number) for number in SIGNALS},
        torch=_torch_state(),
        threads=frozenset(thread.ident or 0 for thread in threading.enumerate()),
        processes=frozenset((process.pid, process.create_time()) for process in _descendants()),
    )


def find_leaks(before: Snapshot) -> list[str]:
    """One line for each thing that is not as it was; leaked processes are killed."""
    leaks = [
        *_changes("environment variable", before.environment, _environment()),
        *_changes("handler of signal", before.signals, {number: signal.getsignal(number) for number in SIGNALS}),
    ]
    if Path.cwd() != before.folder:
        leaks.append(f"working directory: {before.folder} → {Path.cwd()}")
        os.chdir(before.folder)
    after = _torch_state()
    if after is not None and after["process group"]:
        leaks.append("a torch process group is still initialised")
    if before.torch is not None and after is not None:
        leaks += _changes("torch", before.torch, after)
    threads = _wait_until_none(lambda: _new_threads(before))
    leaks += [f"thread {thread.name} still runs" for thread in threads]
    for process in _wait_until_none(lambda: _new_processes(before)):
        leaks.append(f"process {process.pid} still runs: {_command(process)}")
        _kill(process)
    return leaks


def _changes(what: str, before: dict[Any, Any], after: dict[Any, Any]) -> Iterator[str]:
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            yield f"{what} {key}: {before.get(key)!r} → {after.get(key)!r}"


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(ENVIRONMENT_EXEMPT)}


def _torch_state() -> dict[str, Any] | None:
    """Torch's process-wide switches; ``None`` as long as nobody has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "distributed"):
        return None
    distributed = torch.distributed
    return {
        "intra-op threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "gradients enabled": torch.is_grad_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "process group": distributed.is_available() and distributed.is_initialized(),
    }


def _new_threads(before: Snapshot) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if not t.daemon and t.ident not in before.threads]


def _new_processes(before: Snapshot) -> list[psutil.Process]:
    multiprocessing.active_children()  # reaps those that have ended
    new = [p for p in _descendants() if (p.pid, p.create_time()) not in before.processes]
    # Chromium starts and ends its services when it likes; they end with the browser, which is looked at.
    # Ray's actors of a cluster live as long as the fixture that started it.
    return [p for p in new if not any(name in _command(p) for name in ("--type=utility", "ray::"))]


def _descendants() -> list[psutil.Process]:
    """Living descendants of this process, the orphaned ones included."""
    mark = os.environ.get(TOKEN_VARIABLE, "")
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    found = set(_children(os.getpid()))
    if mark and sys.platform == "linux":
        others = set(psutil.pids()) - found - {os.getpid()}
        _strangers.intersection_update(others)  # a number may come again
        for pid in others - _strangers:
            (found if _has_mark(pid, mark) else _strangers).add(pid)
    # One resource tracker and one fork server a process, alive until its end, are multiprocessing's design; those of
    # the tests' commands end with this process.
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    own = getattr(sys.modules.get("tests.commands"), "_servers", {}).values()
    kept = {getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)}
    kept |= {getattr(process, "pid", None) for process in own}
    processes = []
    for pid in found - kept:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return [process for process in processes if _alive(process)]


#: Processes without the mark: looking at each of them twice in every test took seven milliseconds.
_strangers: set[int] = set()
_HAS_CHILDREN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()


def _children(pid: int) -> Iterator[int]:
    """The numbers of the descendants of a process."""
    if not _HAS_CHILDREN:
        yield from (process.pid for process in psutil.Process(pid).children(recursive=True))
        return
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text(encoding="ascii").split()):
                yield child
                yield from _children(child)


def _has_mark(pid: int, mark: str) -> bool:
    try:
        return f"{TOKEN_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "?"


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()


def _wait_until_none(look: Callable[[], list[Any]]) -> list[Any]:
    deadline = time.monotonic() + GRACE_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
