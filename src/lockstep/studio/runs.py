"""The runs of one folder: start, read, label, delete, stop, resume, copy, compare."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Query
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response, StreamingResponse

from lockstep.checkpoint.store import CheckpointStore
from lockstep.config import RunConfig, dump, resolve
from lockstep.config.load import nested
from lockstep.config.named import named, targets_in
from lockstep.errors import LockstepError, RunFolderError, TaskError
from lockstep.rundir import summary as summaries
from lockstep.rundir.files import names_in, open_regular, read_json
from lockstep.rundir.folder import LIVE, RunDir, new_run_id, or_else
from lockstep.rundir.origin import require_code_named, require_resumable
from lockstep.studio import settings
from lockstep.studio.commands import Identity, Labels, Starts, is_alive, last_lines, send
from lockstep.studio.forms import Forms
from lockstep.studio.home import Home, remove_folder
from lockstep.studio.index import RunIndex
from lockstep.studio.schemas import (
    ApiError,
    LabelBody,
    ResumeBody,
    RunName,
    StartBody,
    in_progress,
)
from lockstep.studio.settings import REFUSED, command_of, flatten

#: A file of a run may do nothing, also not as this site (sandbox).
_FILE_CSP = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; sandbox"
_MAX_TABLES = 4 << 20
_MAX_FILES = 5000
#: ``[index, file]`` of samples by ``"target,prediction"``.
_CELLS = TypeAdapter(dict[str, list[tuple[int, str | None]]])
_MAX_REMARKS = 200
#: Settings that the page may not set, and that a copy gets in another way.
_OF_ITS_OWN = {"save_dir", "runs_dir", "task.name", "task.datamodule"}


@dataclass(eq=False)
class Runs:
    """Requests about runs; each is named by its id or its folder. Refusals raise :class:`LockstepError`."""

    _home: Home
    _index: RunIndex
    _starts: Starts
    _forms: Forms
    _kill_after_s: float
    #: Held from checking a run until it is started or deleted.
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def start(self, body: StartBody) -> dict[str, Any]:
        request = self._forms.startable(body)
        chosen = self._forms.place(request)
        name = body.id or new_run_id()
        folder = self._home.run(name)
        words = ["train", request.task, "--save-dir", str(folder)]
        shown = self._forms.train_words(request)
        with self._changing:
            if os.path.lexists(folder):
                raise in_progress(name, "it has been started already")
            self._starts.begin(
                name, words, task=request.task, attempt_before=0, devices=chosen, config=request.mapping(), shown=shown
            )
        self._starts.label(name, Labels(**body.model_dump(include={"name", "tags"}, exclude_defaults=True)))
        return self._index.summary(name)

    def detail(self, name: RunName) -> dict[str, Any]:
        summary = self._index.summary(name)
        run = self._index.run_folder(name)
        logs = self._logs(run)
        lines, _ = last_lines(next(iter(logs.values()), run.logs), 40)
        config = or_else(run.config, None)
        start = self._starts.read(run.path.name)
        record = run.read() if os.path.lexists(run.run_file) else None
        arguments = start.arguments if start else []
        return {
            **summary,
            "config": config.model_dump(mode="json") if config else None,
            "config_yaml": dump(config) if config else "",
            "plan": or_else(run.plan, {}) or None,
            "checkpoints": CheckpointStore(run.checkpoints).listed(),
            "logs": list(logs),
            "tables": or_else(lambda: read_json(run.path / "tables.json", max_bytes=_MAX_TABLES), None),
            "remarks": or_else(run.remarks, [])[-_MAX_REMARKS:],
            "pictures": _names(run.pictures, ".png"),
            **command_of((start.shown if start else []) or (record.command[1:] if record else []) or arguments),
            "versions": record.versions if record is not None else {},
            "resumable": record is not None and summary["status"] not in LIVE,
            "start_output": "\n".join(lines) or None,
        }

    def confused(self, name: RunName) -> dict[str, Any]:
        """Return the samples of the cells of the run's confusion matrix, by ``"target,prediction"``."""
        file = self._index.run_folder(name).path / "confused.json"
        cells = or_else(lambda: read_json(file, max_bytes=_MAX_TABLES), {})
        try:
            return {"cells": _CELLS.validate_python(cells)}
        except ValidationError:
            return {"cells": {}}

    def label(self, name: RunName, body: LabelBody) -> dict[str, Any]:
        location = self._index.summary(name)["location"]
        changes = body.model_dump(exclude_unset=True)
        if "tags" in changes:
            changes["tags"] = tuple(dict.fromkeys(body.tags or ()))
        self._starts.label(location, Labels(**self._starts.labels(location).changes() | changes))
        return self._index.summary(name)

    def delete(self, name: RunName) -> dict[str, Any]:
        location = self._index.locate(name)
        with self._ended(name):
            remove_folder(self._home.run(location), self._home.runs_dir)
            self._starts.forget(location)
        return {"deleted": name}

    @contextlib.contextmanager
    def _ended(self, name: str) -> Iterator[None]:
        """Keep a run whose command has ended from being started or deleted in the body."""
        folder = self._index.locate(name)
        start = self._starts.read(folder)  # not one that another request begins meanwhile
        self._refuse_live(name)
        self._starts.wait_for_end(folder, start)
        with self._changing:
            self._refuse_live(name)
            yield

    def _refuse_live(self, name: str) -> None:
        """Raise :class:`ApiError` when there is no such run, or it is running."""
        with contextlib.suppress(RunFolderError):  # it is damaged, so it is not running
            if self._index.summary(name)["status"] in LIVE:
                raise in_progress(name)

    def resume(self, name: RunName, body: ResumeBody) -> dict[str, Any]:
        run = self._index.run(name)
        words = ["resume", str(run.path), *["--rescale-batch"] * body.rescale_batch]
        if body.devices is not None:
            self._forms.check_devices(body.devices)
            words += ["--devices", ",".join(body.devices)]
        changes = body.model_dump(include={"epochs", "max_steps"}, exclude_none=True)
        words += settings.as_flags({"training": changes}, {})
        require_resumable(run)
        with self._ended(name):
            summary = self._index.summary(name)
            location = self._index.locate(name)
            devices = body.devices or summary["devices"]
            attempt = max(1, summary["attempt"])
            self._starts.begin(location, words, task=summary["task"], attempt_before=attempt, devices=devices)
        return self._index.summary(name)

    def stop(self, name: RunName) -> dict[str, Any]:
        """SIGTERM, after which it ends with a checkpoint; SIGKILL if it does not."""
        summary = self._index.summary(name)
        if summary["status"] not in LIVE:
            raise ApiError("NOT_RUNNING", 409, f"run {name} is {summary['status']}, not running")
        target = self._starts.target(self._index.run_folder(name))
        if target is None or not send(target, signal.SIGTERM):
            raise RunFolderError(
                f"run {name} runs on {summary['host'] or 'another machine'}",
                why="a signal reaches only processes of this machine and user",
                fix=f"run `lockstep stop {name}` there",
            )
        self._index.stopping(name)
        attempt = summary["attempt"] if summary["status"] == "running" else None
        threading.Thread(target=self._kill_later, args=(name, target, attempt), daemon=True).start()
        return {"id": name, "stopping": True, "kill_after_s": self._kill_after_s}

    def _kill_later(self, name: str, target: Identity, attempt: int | None) -> None:
        """Kill ``target`` if it is still in the ``attempt`` in which it was asked to stop; ``None``: its first."""
        for _ in range(max(1, round(self._kill_after_s))):
            time.sleep(min(1.0, self._kill_after_s))
            if not is_alive(target):
                return
            with contextlib.suppress(LockstepError):
                summary = self._index.summary(name)
                if summary["status"] not in LIVE or attempt not in (None, summary["attempt"]):
                    return
        send(target, signal.SIGKILL)

    def duplicate(self, name: RunName) -> dict[str, Any]:
        config = self._index.run(name).config()
        task = config.task.name
        if task not in self._forms.offered:
            raise TaskError(
                f"this run's task, {task}, is not in the list",
                fix=f"start the studio with --task {task}",
            )
        require_code_named(self._index.run(name))
        form, left_out = _form_of(config, self._forms.described(task)["defaults"])
        if form.get("init_from") is not None:
            try:
                form["init_from"] = settings.run_in(form["init_from"], self._home)
            except ApiError:
                left_out.append(f"init_from={form.pop('init_from')}")
        copy = f"{self._index.summary(name)['name'] or name} copy"[:200]
        return {"task": task, "config": settings.for_page(form), "name": copy, "left_out": left_out}

    def compare(self, run: Annotated[list[str], Query(min_length=1, max_length=20)]) -> dict[str, Any]:
        comparison = summaries.compare([self._index.run(name) for name in run])
        tables = {"metrics": comparison.results, "config": comparison.settings, "plan": comparison.plan}
        rows = {name: [{"key": key, "values": row} for key, row in table.items()] for name, table in tables.items()}
        return {"runs": [self._index.summary(name) for name in run], **rows}

    def log(
        self,
        name: RunName,
        file: Annotated[str | None, Query(alias="name")] = None,
        tail: Annotated[int, Query(ge=1, le=5000)] = 200,
    ) -> dict[str, Any]:
        logs = self._logs(self._index.run_folder(name))
        chosen = file if file is not None else next(iter(logs), None)
        if chosen is None:
            return {"name": None, "lines": [], "truncated": False, "names": []}
        if chosen not in logs:
            raise ApiError("NOT_FOUND", 404, f"run {name} has no log {chosen[:100]!r}", fix=f"choose from {list(logs)}")
        lines, truncated = last_lines(logs[chosen], tail)
        return {"name": chosen, "lines": lines, "truncated": truncated, "names": list(logs)}

    def _logs(self, run: RunDir) -> dict[str, Path]:
        """Text files in ``logs`` by name; the output of the command and the lines of the run first."""
        output = self._starts.output(run.path.name)
        names = sorted(_names(run.logs, ".log"), key=lambda name: (name != "run.log", name))
        return ({output.name: output} if output.exists() else {}) | {name: run.logs / name for name in names}

    def files(self, name: RunName) -> dict[str, Any]:
        return {"files": _files(self._index.run_folder(name).path)}

    def file(self, name: RunName, path: Annotated[str, Query(max_length=1000)]) -> Response:
        """Send a file of the run: logs, pictures and recordings are shown, others downloaded."""
        folder = self._index.run_folder(name).path
        if path not in {file["path"] for file in _files(folder)}:
            raise ApiError("NOT_FOUND", 404, f"run {name} has no file {path[:200]!r}", fix="reload the list")
        file = folder / path
        kind = {".log": "text/plain", ".png": "image/png", ".wav": "audio/wav"}.get(file.suffix)
        headers = {
            "content-security-policy": _FILE_CSP,
            "content-disposition": f"{'inline' if kind else 'attachment'}; filename*=UTF-8''{quote(file.name)}",
        }
        return StreamingResponse(_content_of(file), media_type=kind or "application/octet-stream", headers=headers)

    def settings(self) -> dict[str, Any]:
        """By run, the settings that are not the ``same`` in all runs."""
        of_runs = {
            summary["id"]: {key: value for key, value in settings.items() if key not in {"name", "runs_dir"}}
            for summary in self._index.summaries()
            if (settings := summaries.settings_of(RunDir(self._home.run(summary["location"]))))
        }
        differ = summaries.differences(list(of_runs.values()))
        return {
            "runs": {
                name: {key: settings[key] for key in differ if key in settings} for name, settings in of_runs.items()
            },
            "same": {key: value for key, value in next(iter(of_runs.values()), {}).items() if key not in differ},
        }


def _names(folder: Path, suffix: str) -> list[str]:
    """Files in a folder, unless that is a link, which may lead anywhere."""
    names = names_in(folder) if folder.is_dir() and not folder.is_symlink() else []
    return sorted(name for name in names if name.endswith(suffix) and not name.startswith("."))


def _files(folder: Path) -> list[dict[str, Any]]:
    """Paths, sizes in bytes and times (seconds since the epoch) of the regular files below ``folder``."""
    listed = []
    for base, _, names in os.walk(folder):  # which follows no links
        for name in names:
            file = Path(base, name)
            with contextlib.suppress(OSError):
                status = file.lstat()
                if stat.S_ISREG(status.st_mode) and not name.startswith("."):
                    path = file.relative_to(folder).as_posix()
                    listed.append({"path": path, "bytes": status.st_size, "modified": status.st_mtime})
        if len(listed) > _MAX_FILES:
            break
    return sorted(listed[:_MAX_FILES], key=lambda file: str(file["path"]))


def _content_of(file: Path) -> Iterator[bytes]:
    """Yield a file's content in parts; it may grow meanwhile. Raises :class:`OSError`."""
    with open_regular(file) as stream:
        while part := stream.read(1 << 20):
            yield part


def _form_of(config: RunConfig, task_defaults: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the form's content to start such a run again, and the settings that the page may not set.

    The form starts from the task's defaults: a value that equals a general default may differ from them.
    """
    values: dict[str, Any] = {}
    left_out = []
    foreign = {reference.setting for reference in named.missing(targets_in(config.model_dump(mode="json")))}
    defaults = dict(flatten(resolve(task_defaults).model_dump(mode="json")))
    for key, value in flatten(config.model_dump(mode="json")):
        if key == "name" or (not key.startswith("task.") and defaults.get(key) == value):
            continue
        if key not in REFUSED and key not in foreign:
            values[key] = value
        elif value and key not in _OF_ITS_OWN:
            left_out.append(key)
    return nested(values), left_out
