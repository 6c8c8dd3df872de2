"""Processes that outlive the studio: started in a separate session, identified by pid and creation time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lockstep.config.load import to_yaml
from lockstep.errors import StorageError
from lockstep.telemetry.files import write_text
from lockstep.telemetry.heartbeat import CREATED_TOLERANCE_S, age_difference_s

_children: dict[int, subprocess.Popen[bytes]] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Identity:
    """A process by pid and creation time (seconds since the epoch), a pair that is never reused."""

    pid: int
    created: float


def start_detached(arguments: Sequence[str], out: Path, err: Path | None = None) -> Identity:
    """Start ``lockstep`` with ``arguments`` in a separate session; its output is appended to files.

    Args:
        arguments: what follows ``lockstep``; no shell reads them.
        out: standard output, and standard error too where ``err`` is ``None``.

    Raises:
        StorageError: it cannot be started.
    """
    # -P: the current folder must not decide what `lockstep` is, as it does not for the installed command.
    command = [sys.executable, "-P", "-m", "lockstep", *arguments]
    try:
        with out.open("ab") as output, (err or out).open("ab") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True, close_fds=True
            )
    except (OSError, ValueError) as error:
        raise StorageError("the command could not be started", why=str(error), fix="free memory or processes") from None
    with _lock:
        _children[process.pid] = process
    try:
        return Identity(process.pid, psutil.Process(process.pid).create_time())
    except psutil.Error:  # it has ended already
        return Identity(process.pid, 0.0)


def with_config(arguments: Sequence[str], config: Mapping[str, Any] | None, folder: Path) -> list[str]:
    """``arguments`` that read ``config``, if any, from a file in ``folder``. Raises :class:`StorageError`."""
    if config is None:
        return list(arguments)
    write_text(folder / "config.yaml", to_yaml(config))
    return [*arguments, "--config", str(folder / "config.yaml")]


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


def send(identity: Identity, signum: signal.Signals, *, group: bool = False) -> bool:
    """Signal this process, or the whole group that it leads; return whether it was alive.

    A process that does not lead its group is signalled alone: the others in the group may not belong to the run.
    """
    if not is_alive(identity):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group and os.getpgid(identity.pid) == identity.pid:
            os.killpg(identity.pid, signum)
        else:
            os.kill(identity.pid, signum)
        return True
    return False
