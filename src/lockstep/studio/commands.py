"""The commands that the studio starts, which outlive it: runs, with the labels that users gave them, and jobs.

A job (evaluate, export, report, doctor, benchmark) is in ``.studio/jobs/<id>/``, a run in ``.studio/starts/<folder>/``.
A run has no folder until its command has made one, and a resume is not visible until its first heartbeat. Until
then, and when the command fails before, these records are the only source.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from pydantic import Field

from lockstep.config.load import to_yaml
from lockstep.errors import RunFolderError, StorageError
from lockstep.launch.failure.records import LAUNCHER_FILE
from lockstep.rundir import files
from lockstep.rundir.files import FileContent, names_in, write_json
from lockstep.rundir.folder import RunDir, or_else
from lockstep.rundir.heartbeat import CREATED_TOLERANCE_S, age_difference_s
from lockstep.rundir.heartbeat import works_on as works_on
from lockstep.studio.home import Home, iso, modified_ns, remove_folder
from lockstep.studio.schemas import ApiError, in_progress
from lockstep.studio.settings import command_of

_MAX_RECORD_BYTES = 256 << 10
_MAX_LOG_BYTES = 1 << 20
_MAX_RESULT_BYTES = 4 << 20
_MAX_REPORT_BYTES = 64 << 20
#: The command ends after the run is marked as ended: ranks exit, loggers finish. That is slow on a busy machine.
_ENDING_S = 60.0
_KEPT_JOBS = 50
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


class Command(FileContent):
    """A command in a separate session, as its record keeps it."""

    arguments: list[str]
    pid: int
    created: float
    at: float

    # Of a run.
    task: str = ""
    #: The attempt that the run had reached before.
    attempt_before: int = 0
    devices: list[str] = Field(default_factory=list)
    #: Where its output begins in the file, in bytes: earlier starts wrote to the same one.
    output_from: int = 0
    #: The command as a person would type it, where ``arguments`` name a configuration file instead.
    shown: list[str] = Field(default_factory=list)

    # Of a job.
    kind: str = ""
    run: str | None = None
    stopped: bool = False

    @property
    def process(self) -> Identity:
        return Identity(self.pid, self.created, group=True)


def launch(
    file: Path, arguments: Sequence[str], config: Mapping[str, Any] | None, out: Path, err: Path, **more: Any
) -> Command:
    """Start ``lockstep`` with ``arguments``, and write its record, with ``more``, to ``file``.

    ``config`` has settings that it reads from a file: a word of a command could be read as another setting. Its output
    is appended to ``out`` and ``err``. Raises :class:`StorageError`.
    """
    arguments = list(arguments)
    if config is not None:
        files.write_text(file.parent / "config.yaml", to_yaml(config))
        arguments += ["--config", str(file.parent / "config.yaml")]
    # -P: the current folder must not decide what `lockstep` is, as it does not for the installed command.
    words = [sys.executable, "-P", "-m", "lockstep", *arguments]
    try:
        with out.open("ab") as output, err.open("ab") as errors:
            to: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
            child = subprocess.Popen(words, start_new_session=True, **to)
    except (OSError, ValueError) as error:
        raise StorageError("the command could not be started", why=str(error), fix="free memory or processes") from None
    with _lock:
        _children[child.pid] = child
    created = 0.0  # of a process that has ended already
    with contextlib.suppress(psutil.Error):
        created = psutil.Process(child.pid).create_time()
    record = Command(arguments=arguments, pid=child.pid, created=created, at=time.time(), **more)
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
    try:
        off_s = age_difference_s(identity.pid, identity.created)
    except psutil.AccessDenied:
        return False
    if off_s is None:
        reap()
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
    """The last lines of a text file beyond ``skip_bytes``, and whether there are more; none when it cannot be read."""
    try:
        with files.open_regular(file) as stream:
            start = max(skip_bytes, stream.seek(0, os.SEEK_END) - _MAX_LOG_BYTES)
            stream.seek(start)
            text = stream.read(_MAX_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return [], False
    # A progress bar overwrites its line: what the terminal would still show is what follows the last return.
    found = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    if not found[-1]:
        found.pop()
    return found[-lines:], start > skip_bytes or len(found) > lines


class Labels(FileContent):
    """The labels of a run: name and tags (``None`` where the run's own record has them), and what only the page has."""

    name: str | None = None
    tags: tuple[str, ...] | None = None
    notes: str = ""
    pinned: bool = False

    def for_record(self) -> dict[str, Any]:
        given = self.model_dump(mode="json", include={"name", "tags"}, exclude_none=True)
        return given | {key: None for key in given if given[key] == ""}


class _Launcher(FileContent):
    pid: int
    created: float
    host: str


class Starts:
    """The studio's own notes on the runs of one folder, each named by its folder."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def begin(
        self, name: str, arguments: Sequence[str], *, task: str, attempt_before: int, devices: list[str],
        config: Mapping[str, Any] | None = None, shown: Sequence[str] = (),
    ) -> Command:  # fmt: skip
        """Start the command of a run, which has ended. Raises :class:`ApiError`, :class:`StorageError`."""
        folder = self._home.start(name)
        before = self.read(name)
        if before is not None and is_alive(before.process):
            raise in_progress(name)
        files.make_folders(folder)
        output = self.output(name)
        begins = output.stat().st_size if output.exists() else 0
        shown = list(shown) or (before.shown if before is not None else [])
        more = {"task": task, "attempt_before": attempt_before, "devices": devices, "output_from": begins}
        try:
            return launch(folder / "start.json", arguments, config, output, output, shown=shown, **more)
        except BaseException:
            if before is None and attempt_before == 0:
                with contextlib.suppress(StorageError):
                    self.forget(name)
            raise

    def read(self, name: str) -> Command | None:
        """The last start of a run by a studio; ``None`` for a run that was started elsewhere."""
        return Command.read(self._home.start(name) / "start.json", _MAX_RECORD_BYTES)

    def wait_for_end(self, name: str) -> None:
        """Wait until the command of a run that has ended exits. Raises :class:`ApiError`."""
        start = self.read(name)
        deadline = time.monotonic() + _ENDING_S
        while start is not None and is_alive(start.process):
            if time.monotonic() >= deadline:
                raise in_progress(name)
            time.sleep(0.05)

    def names(self) -> list[str]:
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

    def was_made(self, name: str, start: Command) -> bool:
        """Whether the command had made the run's folder: what it printed was moved there."""
        made = start.attempt_before > 0 or not (self._home.start(name) / "output.log").exists()
        return made and not is_alive(start.process)

    def labels(self, name: str) -> Labels:
        """The labels that the run's own record does not have yet."""
        return Labels.read(self._home.start(name) / "labels.json", _MAX_RECORD_BYTES) or Labels()

    def label(self, name: str, labels: Labels) -> None:
        """Keep labels until :meth:`settle` can write them into the record. Raises :class:`StorageError`."""
        files.make_folders(self._home.start(name))
        write_json(self._home.start(name) / "labels.json", labels.model_dump())

    def settle(self, run: RunDir) -> None:
        """Write name and tags into the record of a run that has ended: while it runs, the file has another writer."""
        labels = self.labels(run.path.name)
        if changes := labels.for_record():
            with contextlib.suppress(StorageError, RunFolderError):
                run.update(**changes)
                self.label(run.path.name, labels.model_copy(update={"name": None, "tags": None}))

    def target(self, run: RunDir) -> Identity | None:
        """The process of this machine to signal for the run.

        The command that the studio started leads its own process group. For a run from a terminal it is the launcher,
        since it would restart killed ranks, or the one process that trains; their groups may contain other commands.
        """
        start = self.read(run.path.name)
        beat = run.progress()
        if start is not None and is_alive(start.process):
            return start.process
        launcher = _Launcher.read(run.logs / LAUNCHER_FILE, _MAX_RECORD_BYTES)  # none where one process trains
        named = (launcher, beat if beat is not None and not beat.ended else None)
        here = [Identity(one.pid, one.created) for one in named if one and one.host == socket.gethostname()]
        return next((process for process in here if is_alive(process) and works_on(process.pid, run.path)), None)

    def forget(self, name: str) -> None:
        remove_folder(self._home.start(name), self._home.starts)


class Jobs:
    def __init__(self, home: Home) -> None:
        self._home = home
        self._done: dict[str, dict[str, Any]] = {}
        self._reported: dict[str, tuple[str, str]] = {}

    def begin(
        self, kind: str, arguments: Sequence[str], *, run: str | None = None, config: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Start ``lockstep`` with ``arguments``, which must print one JSON document."""
        for job in [job for job in self.all() if job["status"] != "running"][_KEPT_JOBS - 1 :]:
            with contextlib.suppress(StorageError):
                remove_folder(self._home.job(job["id"]), self._home.jobs)
            self._done.pop(job["id"], None)
        name = f"job-{secrets.token_hex(4)}"
        folder = self._home.job(name)
        files.make_folders(folder)
        words = [*arguments, *(["--out", str(folder)] if kind == "report" else [])]
        try:
            launch(folder / "job.json", words, config, folder / "stdout", folder / "stderr", kind=kind, run=run)
        except BaseException:  # a job without a record would be in no list, and could not be deleted
            with contextlib.suppress(StorageError):
                remove_folder(folder, self._home.jobs)
            raise
        return self.read(name)

    def read(self, name: str) -> dict[str, Any]:
        folder = self._home.job(name)
        if (done := self._done.get(name)) is not None:
            return done
        job = Command.read(folder / "job.json", _MAX_RESULT_BYTES)
        if job is None:
            raise ApiError("JOB_NOT_FOUND", 404, f"there is no job {name}")
        running = is_alive(job.process)
        lines, _ = last_lines(folder / "stderr", 40)
        read_result = partial(files.read_json, folder / "stdout", max_bytes=_MAX_RESULT_BYTES)
        result = None if running else or_else(read_result, None)
        failed = not running and result is None
        ended = max(modified_ns(folder / file) for file in ("stdout", "stderr")) / 1e9
        described = {
            "id": name,
            "kind": job.kind,
            "run": job.run,
            "status": "running" if running else "done" if not failed else "stopped" if job.stopped else "failed",
            "started_at": iso(job.at),
            "ended_at": None if running else iso(ended),
            "command": command_of(job.arguments)["command"],
            "result": result,
            "stopping": running and job.stopped,
            "error": error_of(lines) if failed and not job.stopped else None,
            "output": "\n".join(lines),
        }
        if not running:
            self._done[name] = described
        return described

    def all(self) -> list[dict[str, Any]]:
        """All jobs, newest first."""
        found = []
        for name in names_in(self._home.jobs):
            with contextlib.suppress(ApiError):
                found.append(self.read(name))
        return sorted(found, key=lambda job: str(job["started_at"]), reverse=True)

    def changed(self) -> list[dict[str, Any]]:
        """Jobs whose status or output has changed since the last call."""
        found = {job["id"]: job for job in self.all()}
        before = self._reported
        self._reported = {name: (job["status"], job["output"]) for name, job in found.items()}
        return [job for name, job in found.items() if before.get(name) != self._reported[name]]

    def stop(self, name: str) -> dict[str, Any]:
        """End a job with all its processes."""
        file = self._home.job(name) / "job.json"
        if self.read(name)["status"] == "running" and (job := Command.read(file, _MAX_RESULT_BYTES)) is not None:
            write_json(file, job.model_dump() | {"stopped": True})
            send(job.process, signal.SIGTERM)
        return self.read(name)

    def report(self, name: str) -> bytes:
        if self.read(name)["status"] != "done":
            raise ApiError("JOB_NOT_FOUND", 404, f"job {name} has no report", fix="draw it again")
        return files.read_bytes(self._home.job(name) / "report.html", max_bytes=_MAX_REPORT_BYTES)


def error_of(lines: list[str]) -> dict[str, str]:
    """The command's own error block: what, why and fix."""
    found = {"error": "", "why": "", "fix": ""}
    for line in lines:
        label, colon, text = line.partition(": ")
        if colon and label in found:
            found[label] = text
    message = found.pop("error") or (lines[-1] if lines else "the command ended without a result")
    return {"code": "RUN_FAILED", "message": message, **found}
