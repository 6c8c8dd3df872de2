"""The runs that the studio starts, which outlive it, with the labels that users gave them.

A run has no folder until its command has made one, and a resume is not visible until its first heartbeat. Until
then, and when the command fails before, the records in ``.studio/starts/<folder>/`` are the only source.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lockstep.config.load import to_yaml
from lockstep.errors import RunFolderError, StorageError
from lockstep.launch.failure.records import LAUNCHER_FILE
from lockstep.rundir import files
from lockstep.rundir.files import FileContent, write_json
from lockstep.rundir.folder import RunDir
from lockstep.rundir.heartbeat import CREATED_TOLERANCE_S, age_difference_s
from lockstep.rundir.heartbeat import works_on as works_on
from lockstep.studio.home import Home, remove_folder
from lockstep.studio.schemas import in_progress

_MAX_RECORD_BYTES = 256 << 10
_MAX_LOG_BYTES = 1 << 20
#: The command ends after the run is marked as ended: ranks exit, loggers finish. That is slow on a busy machine.
_ENDING_S = 60.0


@dataclass(frozen=True, slots=True)
class Identity:
    """A process by pid and creation time (seconds since the epoch), a pair that is never reused.

    ``group``: all of the process group that it leads is meant.
    """

    pid: int
    created: float
    group: bool = False


class Command(FileContent):
    """A command of a run in a separate session, as its record keeps it."""

    arguments: list[str]
    pid: int
    created: float
    at: float
    task: str
    #: The attempt that the run had reached before.
    attempt_before: int
    devices: list[str]
    #: Where its output begins in the file, in bytes: earlier starts wrote to the same one.
    output_from: int
    #: The command as a person would type it, where ``arguments`` name a configuration file instead.
    shown: list[str]

    @property
    def process(self) -> Identity:
        return Identity(self.pid, self.created, group=True)


def _launch(words: Sequence[str], output: Path) -> Identity:
    """Start ``lockstep`` in a separate session; its output is appended to a file. Raises :class:`StorageError`."""
    try:
        with output.open("ab") as file:
            # -P: the current folder must not decide what `lockstep` is, as it does not for the installed command.
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        raise StorageError("the command could not be started", why=str(error), fix="free memory or processes") from None
    threading.Thread(target=child.wait, name="lockstep-child", daemon=True).start()  # else it stays as a zombie
    created = 0.0  # of a process that has ended already
    with contextlib.suppress(psutil.Error):
        created = psutil.Process(child.pid).create_time()
    return Identity(child.pid, created, group=True)


def is_alive(identity: Identity) -> bool:
    try:
        off_s = age_difference_s(identity.pid, identity.created)
    except psutil.AccessDenied:
        return False
    return off_s is not None and off_s <= CREATED_TOLERANCE_S


def owner(pid: int) -> str | None:
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


def last_lines(file: Path, lines: int, *, skip_bytes: int = 0) -> tuple[list[str], bool]:
    """Return the last lines of a text file beyond ``skip_bytes``, and whether there are more; none if unreadable."""
    try:
        with files.open_regular(file) as stream:
            start = max(skip_bytes, stream.seek(0, os.SEEK_END) - _MAX_LOG_BYTES)
            stream.seek(start)
            text = stream.read(_MAX_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return [], False
    # A progress bar overwrites its line: the terminal shows the text after the last return.
    rows = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    if not rows[-1]:
        rows.pop()
    return rows[-lines:], start > skip_bytes or len(rows) > lines


class Labels(FileContent):
    """Name and tags of a run, as far as they are not in its record yet."""

    name: str | None = None
    tags: tuple[str, ...] = ()

    def changes(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_unset=True)


class _Launcher(FileContent):
    pid: int
    created: float
    host: str


class Starts:
    """The studio's notes on the runs of one folder, each named by its folder."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def begin(
        self, name: str, arguments: Sequence[str], *, task: str, attempt_before: int, devices: list[str],
        config: Mapping[str, Any] | None = None, shown: Sequence[str] = (),
    ) -> Command:  # fmt: skip
        """Start the command of a run, which has ended. Raises :class:`ApiError`, :class:`StorageError`.

        Args:
            arguments: of ``lockstep``.
            config: settings that the command reads from a file: a word of a command could be read as another setting.
            shown: the command as a person would type it; default: that of the start before.
        """
        folder = self._home.start(name)
        before = self.read(name)
        if before is not None and is_alive(before.process):
            raise in_progress(name)
        files.make_folders(folder)
        output = self.output(name)
        output_from = output.stat().st_size if output.exists() else 0
        words = list(arguments)
        child: Identity | None = None
        try:
            if config is not None:
                files.write_text(folder / "config.yaml", to_yaml(config))
                words += ["--config", str(folder / "config.yaml")]
            child = _launch(words, output)
            start = Command(
                arguments=words,
                pid=child.pid,
                created=child.created,
                at=time.time(),
                task=task,
                attempt_before=attempt_before,
                devices=devices,
                output_from=output_from,
                shown=list(shown) or (before.shown if before is not None else []),
            )
            write_json(folder / "start.json", start.model_dump())
        except BaseException:
            if child is not None:  # without a record it could not be stopped, and a second start would run beside it
                send(child, signal.SIGKILL)
            if before is None and attempt_before == 0:
                with contextlib.suppress(StorageError):
                    self.forget(name)
            raise
        return start

    def read(self, name: str) -> Command | None:
        """Return the last start of a run by a studio; ``None`` for a run that was started elsewhere."""
        return Command.read(self._home.start(name) / "start.json", _MAX_RECORD_BYTES)

    def wait_for_end(self, name: str, start: Command | None) -> None:
        """Wait until ``start``, the command of a run that has ended, exits. Raises :class:`ApiError`."""
        deadline = time.monotonic() + _ENDING_S
        while start is not None and is_alive(start.process):
            if time.monotonic() >= deadline:
                raise in_progress(name)
            time.sleep(0.05)

    def output(self, name: str) -> Path:
        """Return the file of the command's output: moved to the run's ``logs`` as soon as that folder exists."""
        here = self._home.start(name) / "output.log"
        logs = RunDir(self._home.run(name)).logs
        if logs.is_dir() and not logs.is_symlink():
            there = logs / "output.log"
            if here.exists() and not there.exists():
                # The command continues to write to the open file, whatever its name.
                with contextlib.suppress(OSError):
                    here.rename(there)
            if there.exists() or not here.exists():
                return there
        return here

    def was_made(self, name: str, start: Command) -> bool:
        """Return whether the command had made the run's folder: its output was moved there."""
        made = start.attempt_before > 0 or not (self._home.start(name) / "output.log").exists()
        return made and not is_alive(start.process)

    def labels(self, name: str) -> Labels:
        """Return the labels that the run's record does not have yet."""
        return Labels.read(self._home.start(name) / "labels.json", _MAX_RECORD_BYTES) or Labels()

    def label(self, name: str, labels: Labels) -> None:
        """Keep labels until :meth:`settle` can write them into the record. Raises :class:`StorageError`."""
        files.make_folders(self._home.start(name))
        write_json(self._home.start(name) / "labels.json", labels.changes())

    def settle(self, run: RunDir) -> None:
        """Write name and tags into the record of a run that has ended: while it runs, the file has another writer."""
        if changes := self.labels(run.path.name).changes():
            with contextlib.suppress(StorageError, RunFolderError):
                run.update(**changes)
                self.label(run.path.name, Labels())

    def target(self, run: RunDir) -> Identity | None:
        """Find the process of this machine to signal for the run.

        The command that the studio started leads a process group. For a run from a terminal it is the launcher,
        since it would restart killed ranks, or the one process that trains; their groups may contain other commands.
        """
        start = self.read(run.path.name)
        beat = run.progress()
        if start is not None and is_alive(start.process):
            return start.process
        launcher = _Launcher.read(run.logs / LAUNCHER_FILE, _MAX_RECORD_BYTES)  # none where one process trains
        records = (launcher, beat if beat is not None and not beat.ended else None)
        host = socket.gethostname()
        processes = [Identity(record.pid, record.created) for record in records if record and record.host == host]
        return next((process for process in processes if is_alive(process) and works_on(process.pid, run.path)), None)

    def forget(self, name: str) -> None:
        remove_folder(self._home.start(name), self._home.starts)
