"""Short commands: evaluate, export, report, doctor, benchmarks. Like runs, they outlive the studio."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.errors import RunFolderError, StorageError
from lockstep.studio.home import Home, iso, modified_ns, remove_folder
from lockstep.studio.problems import ApiError
from lockstep.studio.processes import Started, is_alive, last_lines, launch, reap, send
from lockstep.studio.settings import command_text
from lockstep.telemetry.files import make_folders, names_in, read_bytes, read_json, write_json

KEEP = 50
_MAX_RESULT_BYTES, _MAX_REPORT_BYTES = 4 << 20, 64 << 20


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
        try:
            job = _Job.model_validate(read_json(folder / "job.json"))
        except (RunFolderError, ValidationError):
            raise ApiError("JOB_NOT_FOUND", 404, f"there is no job {name}", fix="reload the page") from None
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
        for name in self._names():
            with contextlib.suppress(ApiError):
                found.append(self.read(name))
        return sorted(found, key=lambda job: str(job["started_at"]), reverse=True)

    def listed(self) -> dict[str, Any]:
        return {"jobs": self.all()}

    def changed(self) -> list[dict[str, Any]]:
        """Jobs whose status or output has changed since the last call."""
        found = {job["id"]: job for job in self.all()}
        before, self._reported = self._reported, {name: (job["status"], job["output"]) for name, job in found.items()}
        return [job for name, job in found.items() if before.get(name) != self._reported[name]]

    def stop(self, name: str) -> dict[str, Any]:
        """End a job with all its processes."""
        if self.read(name)["status"] == "running":
            file = self._home.job(name) / "job.json"
            job = _Job.model_validate(read_json(file)).model_copy(update={"stopped": True})
            write_json(file, job.model_dump())
            send(job.process, signal.SIGTERM)
        return self.read(name)

    def report(self, name: str) -> bytes:
        """The page that a job has written. Raises :class:`LockstepError` when there is none."""
        if self.read(name)["status"] != "done":
            raise ApiError("JOB_NOT_FOUND", 404, f"job {name} has no report", fix="draw it again")
        return read_bytes(self._home.job(name) / "report.html", max_bytes=_MAX_REPORT_BYTES)

    def _names(self) -> Sequence[str]:
        return [name for name in names_in(self._home.jobs) if name.startswith("job-")]

    def _prune(self) -> None:
        over = [job for job in self.all() if job["status"] != "running"][KEEP - 1 :]
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
        "command_text": command_text(job.arguments),
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
