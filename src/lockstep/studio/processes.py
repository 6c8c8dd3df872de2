"""Processes that outlive the studio, each in a separate session, identified by pid and creation time; their output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lockstep.config.load import to_yaml
from lockstep.errors import StorageError
from lockstep.telemetry.files import FileContent, open_regular, write_json, write_text
from lockstep.telemetry.heartbeat import CREATED_TOLERANCE_S, age_difference_s

_children: dict[int, subprocess.Popen[bytes]] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Identity:
    """A process by pid and creation time (seconds since the epoch), a pair that is never reused.

    ``group``: all of the process group that it leads is meant.
    """

    pid: int
    created: float
    group: bool = False


class Started(FileContent):
    """A command that the studio started, as its record keeps it."""

    arguments: list[str]
    pid: int
    created: float
    at: float

    @property
    def process(self) -> Identity:
        return Identity(self.pid, self.created, group=True)


Record = TypeVar("Record", bound=Started)


def launch(
    kind: type[Record], file: Path, arguments: Sequence[str], config: Mapping[str, Any] | None, out: Path, err: Path,
    /, **more: Any,
) -> Record:  # fmt: skip
    """Start ``lockstep`` with ``arguments`` in a separate session, and write its record to ``file``.

    Args:
        arguments: what follows ``lockstep``; no shell reads them.
        config: settings that the command reads from a file: a word of a command could be read as another setting.
        out: what its standard output is appended to; ``err``: its standard error.
        more: further fields of the record.

    Raises:
        StorageError: it cannot be started or recorded.
    """
    arguments = list(arguments)
    if config is not None:
        write_text(file.parent / "config.yaml", to_yaml(config))
        arguments += ["--config", str(file.parent / "config.yaml")]
    # -P: the current folder must not decide what `lockstep` is, as it does not for the installed command.
    command = [sys.executable, "-P", "-m", "lockstep", *arguments]
    try:
        with out.open("ab") as output, err.open("ab") as errors:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
    except (OSError, ValueError) as error:
        raise StorageError("the command could not be started", why=str(error), fix="free memory or processes") from None
    with _lock:
        _children[child.pid] = child
    created = 0.0  # of a process that has ended already
    with contextlib.suppress(psutil.Error):
        created = psutil.Process(child.pid).create_time()
    record = kind(arguments=arguments, pid=child.pid, created=created, at=time.time(), **more)
    try:
        write_json(file, record.model_dump())
    except BaseException:
        # Without a record it could not be stopped, and a second start would run at the same time.
        send(record.process, signal.SIGKILL)
        raise
    return record


def reap() -> None:
    """Collect children that have ended, so that they do not stay as zombies."""
    with _lock:
        for pid in [pid for pid, process in _children.items() if process.poll() is not None]:
            del _children[pid]


def is_alive(identity: Identity) -> bool:
    """Whether this process is alive."""
    try:
        off_s = age_difference_s(identity.pid, identity.created)
    except psutil.AccessDenied:
        return False
    if off_s is None:
        reap()
    return off_s is not None and off_s <= CREATED_TOLERANCE_S


def works_on(identity: Identity, folder: Path) -> bool:
    """Whether the process is that of the run in ``folder``: it has something there open, or was started with it.

    Files in the folder, such as ``heartbeat.json``, may name any process; this cannot be written into a file.
    """
    place = folder.resolve()
    try:
        if str(place) in psutil.Process(identity.pid).cmdline():
            return True
        opened = [link.readlink() for link in Path(f"/proc/{identity.pid}/fd").iterdir()]
    except (psutil.Error, OSError):
        return False
    return any(file.is_relative_to(place) for file in opened)


def owner(pid: int) -> str | None:
    """The user of a process, where the system says."""
    with contextlib.suppress(psutil.Error, KeyError):
        return psutil.Process(pid).username()
    return None


def send(identity: Identity, signum: signal.Signals) -> bool:
    """Signal this process or its group; return whether it was alive.

    A process that does not lead its group is signalled alone: the others in the group may not belong to the run.
    """
    if not is_alive(identity):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        leads = identity.group and os.getpgid(identity.pid) == identity.pid
        (os.killpg if leads else os.kill)(identity.pid, signum)
        return True
    return False


def last_lines(file: Path, lines: int, *, max_bytes: int = 1 << 20, skip_bytes: int = 0) -> tuple[list[str], bool]:
    """The last lines of a text file, and whether there are more; none when it cannot be read.

    Args:
        skip_bytes: where to begin in the file.
    """
    try:
        with open_regular(file) as stream:
            start = max(skip_bytes, stream.seek(0, os.SEEK_END) - max_bytes)
            stream.seek(start)
            text = stream.read(max_bytes).decode("utf-8", "replace")
    except OSError:
        return [], False
    # A progress bar overwrites its line: what the terminal would still show is what follows the last return.
    found = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    if not found[-1]:
        found.pop()
    return found[-lines:], start > skip_bytes or len(found) > lines
