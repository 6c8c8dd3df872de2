"""The commands that the studio started, which outlive it: runs, with the labels that users gave them, and jobs.

A job (evaluate, export, report, doctor, benchmark) is in ``.studio/jobs/<id>/``, a run in ``.studio/starts/<folder>/``.
A run has no folder until its command has made one, and a resume is not visible until its first heartbeat. Until
then, and when the command fails before, these records are the only source.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from lockstep.errors import RunFolderError, StorageError
from lockstep.launch.failure.records import LAUNCHER_FILE
from lockstep.studio.home import Home, iso, modified_ns, remove_folder
from lockstep.studio.processes import Identity, Started, is_alive, last_lines, launch, reap, send, works_on
from lockstep.studio.schemas import ApiError, in_progress
from lockstep.studio.settings import command_of
from lockstep.telemetry.files import FileContent, make_folders, names_in, read_bytes, storage_error, write_json
from lockstep.telemetry.rundir import RunDir

_MAX_BYTES = 256 << 10
#: The command ends after the run is marked as ended: ranks exit, loggers finish. That is slow on a busy machine.
_ENDING_S = 60.0
_KEPT_JOBS = 50
_MAX_RESULT_BYTES, _MAX_REPORT_BYTES = 4 << 20, 64 << 20


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

    def for_record(self) -> dict[str, Any]:
        """Name and tags as the run's own record is to have them, where they were given."""
        given = self.model_dump(mode="json", include={"name", "tags"}, exclude_none=True)
        return given | {key: None for key in given if given[key] == ""}


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
        begins = output.stat().st_size if output.exists() else 0
        shown = list(shown) or (before.shown if before is not None else [])
        more = {"task": task, "attempt_before": attempt_before, "devices": devices, "output_from": begins}
        try:
            return launch(Start, folder / "start.json", arguments, config, output, output, shown=shown, **more)
        except BaseException:
            if before is None and attempt_before == 0:
                with contextlib.suppress(StorageError):
                    self.forget(name)
            raise

    def read(self, name: str) -> Start | None:
        """The last start of a run by a studio; ``None`` for a run that was started elsewhere."""
        return Start.read(self._home.start(name) / "start.json", _MAX_BYTES)

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
        return Labels.read(self._home.start(name) / "labels.json", _MAX_BYTES) or Labels()

    def label(self, name: str, labels: Labels) -> None:
        """Keep labels until :meth:`settle` can write them into the record. Raises :class:`StorageError`."""
        folder = self._home.start(name)
        make_folders(folder)
        write_json(folder / "labels.json", labels.model_dump())

    def settle(self, run: RunDir) -> None:
        """Write name and tags into the record of a run that has ended: while it runs, the file has another writer."""
        labels = self.labels(run.path.name)
        if changes := labels.for_record():
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
        launcher = _Launcher.read(run.logs / LAUNCHER_FILE, _MAX_BYTES)  # none where one process trains
        named = (launcher, beat if beat is not None and not beat.ended else None)
        here = [Identity(one.pid, one.created) for one in named if one and one.host == socket.gethostname()]
        return next((process for process in here if is_alive(process) and works_on(process, run.path)), None)

    def forget(self, name: str) -> None:
        """Remove the studio's notes on a run. Raises :class:`StorageError`."""
        remove_folder(self._home.start(name), self._home.starts)


class _Job(Started):
    kind: str
    run: str | None
    stopped: bool = False


class Jobs:
    """The jobs of one runs folder, each in its own folder."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._done: dict[str, dict[str, Any]] = {}
        self._reported: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()

    def begin(
        self, kind: str, arguments: Sequence[str], *, run: str | None = None, config: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Start ``lockstep`` with ``arguments``, which must print one JSON document. Raises :class:`LockstepError`.

        Args:
            config: settings that the command reads from a file.
        """
        self._prune()
        name = f"job-{secrets.token_hex(4)}"
        folder = self._home.job(name)
        make_folders(folder)
        words = [*arguments, *(["--out", str(folder)] if kind == "report" else [])]
        try:
            launch(_Job, folder / "job.json", words, config, folder / "stdout", folder / "stderr", kind=kind, run=run)
        except BaseException:  # a job without a record would be in no list, and could not be deleted
            with contextlib.suppress(StorageError):
                remove_folder(folder, self._home.jobs)
            raise
        return self.read(name)

    def read(self, name: str) -> dict[str, Any]:
        """One job. Raises :class:`ApiError` when there is none."""
        folder = self._home.job(name)
        with self._lock:
            if name in self._done:
                return self._done[name]
        job = _Job.read(folder / "job.json", _MAX_RESULT_BYTES)
        if job is None:
            raise ApiError("JOB_NOT_FOUND", 404, f"there is no job {name}", fix="reload the page")
        reap()
        running = is_alive(job.process)
        described = _describe(name, job, folder, running)
        if not running:
            with self._lock:
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
        before, self._reported = self._reported, {name: (job["status"], job["output"]) for name, job in found.items()}
        return [job for name, job in found.items() if before.get(name) != self._reported[name]]

    def stop(self, name: str) -> dict[str, Any]:
        """End a job with all its processes."""
        file = self._home.job(name) / "job.json"
        if self.read(name)["status"] == "running" and (job := _Job.read(file, _MAX_RESULT_BYTES)) is not None:
            write_json(file, job.model_dump() | {"stopped": True})
            send(job.process, signal.SIGTERM)
        return self.read(name)

    def report(self, name: str) -> bytes:
        """The page that a job has written. Raises :class:`LockstepError` when there is none."""
        if self.read(name)["status"] != "done":
            raise ApiError("JOB_NOT_FOUND", 404, f"job {name} has no report", fix="draw it again")
        return read_bytes(self._home.job(name) / "report.html", max_bytes=_MAX_REPORT_BYTES)

    def _prune(self) -> None:
        over = [job for job in self.all() if job["status"] != "running"][_KEPT_JOBS - 1 :]
        for job in over:
            with contextlib.suppress(StorageError):
                remove_folder(self._home.job(job["id"]), self._home.jobs)
            with self._lock:
                self._done.pop(job["id"], None)


def _describe(name: str, job: _Job, folder: Path, running: bool) -> dict[str, Any]:
    lines, _ = last_lines(folder / "stderr", 40)
    result = None if running else _result(folder / "stdout")
    failed = not running and result is None
    return {
        "id": name,
        "kind": job.kind,
        "run": job.run,
        "status": "running" if running else "done" if not failed else "stopped" if job.stopped else "failed",
        "started_at": iso(job.at),
        "ended_at": None if running else iso(max(modified_ns(folder / name) for name in ("stdout", "stderr")) / 1e9),
        "command": command_of(job.arguments)["command"],
        "result": result,
        "stopping": running and job.stopped,
        "error": error_of(lines) if failed and not job.stopped else None,
        "output": "\n".join(lines),
    }


def _result(file: Path) -> Any:
    try:
        return json.loads(read_bytes(file, max_bytes=_MAX_RESULT_BYTES), parse_constant=lambda _: None)
    except (RunFolderError, ValueError, RecursionError):
        return None


def error_of(lines: list[str]) -> dict[str, str]:
    """The command's own error block: what, why and fix."""
    found = {"code": "RUN_FAILED", "message": "", "why": "", "fix": ""}
    for line in lines:
        label, colon, text = line.partition(": ")
        key = {"error": "message"}.get(label, label)
        if colon and key in found and key != "code":
            found[key] = text
    return found | {"message": found["message"] or (lines[-1] if lines else "the command ended without a result")}
