"""The runs of one folder: start, read, label, delete, stop, resume, copy, compare."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query
from pydantic import TypeAdapter, ValidationError

from lockstep.checkpoint.store import CheckpointStore
from lockstep.config import RunConfig, dump, resolve
from lockstep.config.load import nested
from lockstep.config.named import named, targets_in
from lockstep.errors import LockstepError, RunFolderError
from lockstep.rundir import summary as summaries
from lockstep.rundir.files import names_in, open_regular, read_json
from lockstep.rundir.folder import LIVE, RunDir, new_run_id, or_else
from lockstep.rundir.origin import require_code_named, require_resumable
from lockstep.studio import settings
from lockstep.studio.commands import Identity, Labels, Starts, is_alive, last_lines, send
from lockstep.studio.forms import Forms
from lockstep.studio.home import Home, modified_ns, remove_folder
from lockstep.studio.index import RunIndex
from lockstep.studio.schemas import (
    ApiError,
    LabelBody,
    ResumeBody,
    RunName,
    StartBody,
    in_progress,
    run_not_found,
)
from lockstep.studio.settings import REFUSED, command_of, flatten

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
    _watches: set[asyncio.Task[None]] = field(default_factory=set)
    _settings: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
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
        self._starts.label(name, Labels(name=body.name or None, tags=tuple(body.tags) if body.tags else None))
        return self._index.summary(name)

    def detail(self, name: RunName) -> dict[str, Any]:
        summary = self._index.summary(name)
        run = self._index.run_folder(name)
        output = self._starts.output(run.path.name)
        logs = _log_names(run)
        lines, _ = last_lines(run.logs / "run.log" if not output.exists() and "run.log" in logs else output, 40)
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
            "logs": logs,
            "tables": or_else(lambda: read_json(run.path / "tables.json", max_bytes=_MAX_TABLES), None),
            "remarks": or_else(run.remarks, [])[-_MAX_REMARKS:],
            "pictures": _names(run.pictures, ".png"),
            **command_of((start.shown if start else []) or (record.command[1:] if record else []) or arguments),
            "versions": record.versions if record is not None else {},
            "resumable": record is not None and summary["status"] not in LIVE,
            "start_output": "\n".join(lines) or None,
        }

    def confused(self, name: RunName) -> dict[str, Any]:
        """The samples that the run has kept of the cells of its confusion matrix, by ``"target,prediction"``."""
        file = self._index.run_folder(name).path / "confused.json"
        cells = or_else(lambda: read_json(file, max_bytes=_MAX_TABLES), {})
        try:
            return {"cells": _CELLS.validate_python(cells)}
        except ValidationError:
            return {"cells": {}}

    def label(self, name: RunName, body: LabelBody) -> dict[str, Any]:
        location = self._index.summary(name)["location"]
        changes = {key: getattr(body, key) for key in body.model_fields_set}
        if "name" in changes:
            changes["name"] = body.name or ""
        if "tags" in changes:
            changes["tags"] = tuple(dict.fromkeys(body.tags or ()))
        self._starts.label(location, self._starts.labels(location).model_copy(update=changes))
        return self._index.summary(name)

    def delete(self, name: RunName) -> dict[str, Any]:
        location = self._index.locate(name)
        with self._ended(name):
            remove_folder(self._home.run(location), self._home.runs_dir)
            self._starts.forget(location)
        return {"deleted": name}

    @contextlib.contextmanager
    def _ended(self, name: str) -> Iterator[None]:
        """While the context is open, a run that has ended, with its command, is neither started nor deleted."""
        folder = self._index.locate(name)
        start = self._starts.read(folder)  # not one that another request begins meanwhile
        self._refuse_live(name)
        self._starts.wait_for_end(folder, start)
        with self._changing:
            self._refuse_live(name)
            yield

    def _refuse_live(self, name: str) -> None:
        """Raises :class:`ApiError` when there is no such run, or it is running."""
        folder = self._home.run(self._index.locate(name))
        if not os.path.lexists(folder) and self._starts.read(folder.name) is None:
            raise run_not_found(name)
        try:
            if self._index.summary(name)["status"] in LIVE:
                raise in_progress(name)
        except RunFolderError:
            if not os.path.lexists(folder / "run.json"):  # else it is damaged: it is not running
                raise

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

    async def stop(self, name: str) -> dict[str, Any]:
        """SIGTERM, after which it ends with a checkpoint; SIGKILL if it does not."""
        summary = await asyncio.to_thread(self._index.summary, name)
        if summary["status"] not in LIVE:
            raise ApiError("NOT_RUNNING", 409, f"run {name} is {summary['status']}, not running")
        target = await asyncio.to_thread(self._starts.target, self._index.run_folder(name))
        if target is None or not await asyncio.to_thread(send, target, signal.SIGTERM):
            raise ApiError(
                "RUN_NOT_USABLE",
                409,
                f"run {name} runs on {summary['host'] or 'another machine'}",
                why="a signal reaches only processes of this machine and user",
                fix=f"run `lockstep stop {name}` there",
            )
        self._index.stopping(name)
        attempt = summary["attempt"] if summary["status"] == "running" else None
        watch = asyncio.create_task(self._kill_later(name, target, attempt))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return {"id": name, "stopping": True, "kill_after_s": self._kill_after_s}

    async def _kill_later(self, name: str, target: Identity, attempt: int | None) -> None:
        """Kill ``target`` if it is still in the ``attempt`` in which it was asked to stop; ``None``: its first."""
        for _ in range(max(1, round(self._kill_after_s))):
            await asyncio.sleep(min(1.0, self._kill_after_s))
            if not await asyncio.to_thread(is_alive, target):
                return
            with contextlib.suppress(LockstepError):
                summary = await asyncio.to_thread(self._index.summary, name)
                if summary["status"] not in LIVE or attempt not in (None, summary["attempt"]):
                    return
        await asyncio.to_thread(send, target, signal.SIGKILL)

    def duplicate(self, name: RunName) -> dict[str, Any]:
        config = self._index.run(name).config()
        task = config.task.name
        if task not in self._forms.offered:
            raise ApiError(
                "TASK_NOT_USABLE",
                422,
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
        run = self._index.run_folder(name)
        names = _log_names(run)
        output = self._starts.output(run.path.name)
        if output.exists() and "output.log" not in names:
            names = ["output.log", *names]
        chosen = file if file is not None else next(iter(names), None)
        if chosen is None:
            return {"name": None, "lines": [], "truncated": False, "names": names}
        if chosen not in names:
            raise ApiError("NOT_FOUND", 404, f"run {name} has no log {chosen[:100]!r}", fix=f"choose from {names}")
        lines, truncated = last_lines(output if chosen == "output.log" else run.logs / chosen, tail)
        return {"name": chosen, "lines": lines, "truncated": truncated, "names": names}

    def files(self, name: RunName) -> dict[str, Any]:
        return {"files": _files(self._index.run_folder(name).path)}

    def file(self, name: RunName, path: str) -> Path:
        folder = self._index.run_folder(name).path
        if path not in {file["path"] for file in _files(folder)}:
            raise ApiError("NOT_FOUND", 404, f"run {name} has no file {path[:200]!r}", fix="reload the list")
        return folder / path

    def settings(self) -> dict[str, Any]:
        """By run, the settings that are not the ``same`` in all runs."""
        settings_by_run: dict[str, dict[str, Any]] = {}
        for summary in self._index.summaries():
            run = RunDir(self._home.run(summary["location"]))
            name = summary["id"]
            with contextlib.suppress(LockstepError):
                if self._settings.get(name, (-1, {}))[0] != (stamp := modified_ns(run.config_file)):
                    values = flatten(summaries.sections_of(run))
                    keyed = {key: value for key, value in values if key not in {"name", "save_dir", "runs_dir"}}
                    self._settings[name] = (stamp, keyed)
                settings_by_run[name] = self._settings[name][1]
        every = list(settings_by_run.values())
        keys = {key for values in every for key in values}
        first = every[0] if every else {}
        differ = {key for key in keys if any(values.get(key) != first.get(key) for values in every)}
        return {
            "runs": {
                name: {key: values[key] for key in differ & values.keys()} for name, values in settings_by_run.items()
            },
            "same": {key: value for key, value in first.items() if key not in differ},
        }


def _names(folder: Path, suffix: str) -> list[str]:
    """Files in a folder, unless that is a link, which may lead anywhere."""
    names = names_in(folder) if folder.is_dir() and not folder.is_symlink() else []
    return sorted(name for name in names if name.endswith(suffix) and not name.startswith("."))


def _log_names(run: RunDir) -> list[str]:
    """Text files in ``logs``; the output of the command and the lines of the run first."""
    return sorted(_names(run.logs, ".log"), key=lambda name: (name != "output.log", name != "run.log", name))


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


def content_of(file: Path) -> Iterator[bytes]:
    """A file's content in parts; it may grow meanwhile. Raises :class:`OSError`."""
    with open_regular(file) as stream:
        while part := stream.read(1 << 20):
            yield part


def _form_of(config: RunConfig, task_defaults: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The form's content to start such a run again, and the settings that the page may not set.

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
