"""How the studio started a run, and the labels that users gave it: ``.studio/starts/<folder>/``.

A run has no folder until its command has made one, and a resume is not visible until its first heartbeat. Until
then, and when the command fails before, these records are the only source.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from lockstep.errors import RunFolderError, StorageError
from lockstep.launch.failure.records import LAUNCHER_FILE
from lockstep.studio.home import Home, remove_folder
from lockstep.studio.problems import in_progress
from lockstep.studio.processes import Identity, Started, is_alive, last_lines, launch, works_on
from lockstep.telemetry.files import FileContent, make_folders, names_in, read_json, storage_error, write_json
from lockstep.telemetry.rundir import Beat, RunDir

_MAX_BYTES = 256 << 10
#: The command ends after the run is marked as ended: ranks exit, loggers finish. That is slow on a busy machine.
_ENDING_S = 60.0


class Start(Started):
    """One start of a run: the command, its process, and the attempt that the run had reached before."""

    task: str
    attempt_before: int = 0
    devices: list[str] = Field(default_factory=list)
    #: Where its output begins in the file, in bytes: earlier starts wrote to the same one.
    output_from: int = 0
    #: The command as a person would type it, where ``arguments`` name a configuration file instead.
    shown: list[str] = Field(default_factory=list)


class Labels(FileContent):
    """The labels of a run: name and tags (``None`` where the run's own record has them), and what only the page has."""

    name: str | None = None
    tags: tuple[str, ...] | None = None
    notes: str = ""
    pinned: bool = False


class _Launcher(FileContent):
    """The process in ``logs/launcher.json``."""

    pid: int
    created: float
    host: str


class Starts:
    """The studio's own notes on the runs of one folder."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def begin(
        self, name: str, arguments: Sequence[str], *, task: str, attempt_before: int, devices: list[str],
        config: Mapping[str, Any] | None = None, shown: Sequence[str] = (),
    ) -> Start:  # fmt: skip
        """Start the command of run ``name``, whose output goes to its ``output.log``.

        Args:
            config: settings that the command reads from a file.

        Raises:
            ApiError: its last start is still running.
            StorageError: it cannot be started.
        """
        folder = self._home.start(name)
        before = self.read(name)
        if before is not None and is_alive(before.process):
            raise in_progress(name)
        try:
            folder.mkdir(parents=True, exist_ok=attempt_before > 0 or before is not None)
        except FileExistsError:
            raise in_progress(name, "it has just been started") from None
        except OSError as error:
            raise storage_error(error, folder) from error
        output = self.output(name)
        more = {
            "task": task,
            "attempt_before": attempt_before,
            "devices": devices,
            "output_from": output.stat().st_size if output.exists() else 0,
            "shown": list(shown) or (before.shown if before is not None else []),
        }
        try:
            return launch(Start, folder / "start.json", arguments, config, output, output, **more)
        except BaseException:
            if before is None and attempt_before == 0:
                with contextlib.suppress(StorageError):
                    self.forget(name)
            raise

    def read(self, name: str) -> Start | None:
        """The last start of a run by a studio; ``None`` for a run that was started elsewhere."""
        try:
            return Start.model_validate(read_json(self._home.start(name) / "start.json", max_bytes=_MAX_BYTES))
        except (RunFolderError, ValidationError):
            return None

    def wait_for_end(self, name: str) -> None:
        """Wait until the command of a run that has ended exits. Raises :class:`ApiError`."""
        start = self.read(name)
        deadline = time.monotonic() + _ENDING_S
        while start is not None and is_alive(start.process):
            if time.monotonic() >= deadline:
                raise in_progress(name)
            time.sleep(0.05)

    def names(self) -> list[str]:
        """Runs that a studio has started."""
        return [name for name in names_in(self._home.starts) if not name.startswith(".")]

    def output(self, name: str) -> Path:
        """The file of the command's output: moved to the run's ``logs`` as soon as that folder exists."""
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

    def was_made(self, name: str, start: Start) -> bool:
        """Whether the command had made the run's folder: what it printed was moved there."""
        made = start.attempt_before > 0 or not (self._home.start(name) / "output.log").exists()
        return made and not is_alive(start.process)

    def last_words(self, name: str, start: Start) -> str:
        """The end of what this start's command printed."""
        return "\n".join(last_lines(self.output(name), 40, skip_bytes=start.output_from)[0])

    def labels(self, name: str) -> Labels:
        """The labels that the run's own record does not have yet."""
        try:
            return Labels.model_validate(read_json(self._home.start(name) / "labels.json", max_bytes=_MAX_BYTES))
        except (RunFolderError, ValidationError):
            return Labels()

    def label(self, name: str, labels: Labels) -> None:
        """Keep labels until :meth:`settle` can write them into the record. Raises :class:`StorageError`."""
        folder = self._home.start(name)
        make_folders(folder)
        write_json(folder / "labels.json", labels.model_dump())

    def settle(self, run: RunDir) -> None:
        """Write name and tags into the record of a run that has ended: while it runs, the file has another writer."""
        labels = self.labels(run.path.name)
        changes: dict[str, Any] = {}
        if labels.name is not None:
            changes["name"] = labels.name or None
        if labels.tags is not None:
            changes["tags"] = list(labels.tags)
        if changes:
            with contextlib.suppress(StorageError, RunFolderError):
                run.update(**changes)
                self.label(run.path.name, labels.model_copy(update={"name": None, "tags": None}))

    def target(self, run: RunDir) -> Identity | None:
        """The process of this machine to signal for the run, identified by pid, creation time and its open files.

        The command that the studio started leads its own process group. For a run from a terminal it is the launcher,
        since it would restart killed ranks, or the one process that trains; their groups may contain other commands.
        """
        start, beat = self.read(run.path.name), run.progress()
        if start is not None and is_alive(start.process):
            return start.process
        named: list[_Launcher | Beat] = []
        with contextlib.suppress(RunFolderError, ValidationError):  # there is none: one process trains
            named.append(_Launcher.model_validate(read_json(run.logs / LAUNCHER_FILE)))
        if beat is not None and not beat.ended:
            named.append(beat)
        here = [Identity(one.pid, one.created) for one in named if one.host == socket.gethostname()]
        return next((process for process in here if is_alive(process) and works_on(process, run.path)), None)

    def forget(self, name: str) -> None:
        """Remove the studio's notes on a run. Raises :class:`StorageError`."""
        remove_folder(self._home.start(name), self._home.starts)
