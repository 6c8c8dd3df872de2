"""What can be done with the runs of one folder: start, read, label, delete, stop, resume, copy, evaluate, export."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query

from lockstep.errors import LockstepError, RunFolderError
from lockstep.studio import details, settings
from lockstep.studio.forms import Forms
from lockstep.studio.home import Home, modified_ns, remove_folder
from lockstep.studio.index import RunIndex
from lockstep.studio.launch_records import Jobs, Labels, Starts
from lockstep.studio.processes import Identity, is_alive, last_lines, send
from lockstep.studio.schemas import (
    ApiError,
    EvaluateBody,
    ExportBody,
    LabelBody,
    ResumeBody,
    RunName,
    StartBody,
    in_progress,
    run_not_found,
)
from lockstep.telemetry.lookup import or_else
from lockstep.telemetry.rundir import LIVE, new_run_id


@dataclass(eq=False)
class Runs:
    """Requests about runs; each is named by its id or its folder."""

    _home: Home
    _index: RunIndex
    _starts: Starts
    _jobs: Jobs
    _forms: Forms
    _kill_after_s: float
    _watches: set[asyncio.Task[None]] = field(default_factory=set)
    _settings: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    #: Held from checking a run until it is started or deleted.
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def start(self, body: StartBody) -> dict[str, Any]:
        """Start the command of a new run; returns at once. Raises :class:`LockstepError`."""
        wanted = self._forms.startable(body)
        chosen = self._forms.place(wanted)
        name = body.id or new_run_id()
        folder = self._home.run(name)
        words, shown = ["train", wanted.task, "--save-dir", str(folder)], self._forms.train_words(wanted)
        with self._changing:
            if os.path.lexists(folder):
                raise in_progress(name, "it has been started already")
            self._starts.begin(
                name, words, task=wanted.task, attempt_before=0, devices=chosen, config=wanted.mapping(), shown=shown
            )
        self._starts.label(name, Labels(name=body.name or None, tags=tuple(body.tags) if body.tags else None))
        return self._index.summary(name)

    def detail(self, name: RunName) -> dict[str, Any]:
        summary = self._index.summary(name)
        run = self._index.run_folder(name)
        start = self._starts.read(run.path.name)
        output, _ = last_lines(self._starts.output(run.path.name), 40)
        return {
            **details.describe(run, summary, start),
            "jobs": [job for job in self._jobs.all() if job["run"] in {summary["id"], summary["location"]}],
            "start_output": "\n".join(output) or None,
        }

    def label(self, name: RunName, body: LabelBody) -> dict[str, Any]:
        location = self._index.summary(name)["location"]
        given = {key: getattr(body, key) for key in body.model_fields_set}
        if "name" in given:
            given["name"] = body.name or ""
        if "tags" in given:
            given["tags"] = tuple(dict.fromkeys(body.tags or ()))
        self._starts.label(location, self._starts.labels(location).model_copy(update=given))
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
        self._refuse_live(name)
        self._starts.wait_for_end(self._index.locate(name))
        with self._changing:
            self._refuse_live(name)
            yield

    def _refuse_live(self, name: str) -> None:
        """Raises :class:`ApiError` when there is no such run, or it is running."""
        folder = self._home.run(self._index.locate(name))
        if not os.path.lexists(folder) and self._starts.read(folder.name) is None:
            raise run_not_found(name)
        try:
            summary = self._index.summary(name)
        except RunFolderError:
            if not os.path.lexists(folder / "run.json"):
                raise
            return  # damaged: it is not running
        if summary["status"] in LIVE:
            raise in_progress(name)

    def _resume_words(self, name: str, body: ResumeBody) -> list[str]:
        run = self._index.run(name)
        if body.devices is not None:
            self._forms.check_devices(body.devices)
        changes: dict[str, Any] = {} if body.devices is None else {"hardware": {"selected_devices": body.devices}}
        changes["training"] = body.model_dump(include={"epochs", "max_steps"}, exclude_none=True)
        words = settings.as_flags(changes, {"--devices": "hardware.selected_devices"})
        return ["resume", str(run.path), *["--rescale-batch"] * body.rescale_batch, *words]

    def resume_preview(self, name: RunName, body: ResumeBody) -> dict[str, Any]:
        return settings.command_of(self._resume_words(name, body))

    def resume(self, name: RunName, body: ResumeBody) -> dict[str, Any]:
        """Start the command that resumes a run. Raises :class:`LockstepError`."""
        words = self._resume_words(name, body)
        with self._ended(name):
            summary = self._index.summary(name)
            location, devices = self._index.locate(name), body.devices or summary["devices"]
            attempt = max(1, summary["attempt"])
            self._starts.begin(location, words, task=summary["task"], attempt_before=attempt, devices=devices)
        return self._index.summary(name)

    async def stop(self, name: str) -> dict[str, Any]:
        """SIGTERM, after which it ends with a checkpoint; SIGKILL if it does not. Raises :class:`ApiError`."""
        summary = await asyncio.to_thread(self._index.summary, name)
        if summary["status"] not in LIVE:
            raise ApiError("NOT_RUNNING", 409, f"run {name} is {summary['status']}, not running", fix="reload the page")
        target = await asyncio.to_thread(self._starts.target, self._index.run_folder(name))
        if target is None or not await asyncio.to_thread(send, target, signal.SIGTERM):
            what = f"run {name} runs on {summary['host'] or 'another machine'}"
            why = "a signal reaches only processes of this machine and user"
            raise ApiError("RUN_NOT_USABLE", 409, what, why=why, fix=f"run `lockstep stop {name}` there")
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

    def evaluate(self, name: RunName, body: EvaluateBody) -> dict[str, Any]:
        words = ["--split", body.split, "--checkpoint", body.checkpoint]
        return self._begin_job("evaluate", name, *words, *(["--devices", body.device] if body.device else []))

    def export(self, name: RunName, body: ExportBody) -> dict[str, Any]:
        words = ["--checkpoint", body.checkpoint, *([] if body.program else ["--no-program"])]
        return self._begin_job("export", name, *words)

    def report(self, name: RunName) -> dict[str, Any]:
        return self._begin_job("report", name)

    def _begin_job(self, kind: str, name: str, *words: str) -> dict[str, Any]:
        """Start ``lockstep kind`` on the run, whose result is a JSON document. Raises :class:`LockstepError`."""
        folder, summary = self._index.run(name).path, self._index.summary(name)
        if summary["starting"]:
            raise in_progress(name)
        return self._jobs.begin(kind, [kind, str(folder), *words, "--json"], run=summary["id"])

    def duplicate(self, name: RunName) -> dict[str, Any]:
        config = self._index.run(name).config()
        if config.task.name not in self._forms.offered.names:
            what = f"this run's task, {config.task.name}, is not in the list"
            raise ApiError("TASK_NOT_USABLE", 422, what, fix=f"start the studio with --task {config.task.name}")
        form, left_out = details.form_of(config, self._forms.described(config.task.name)["defaults"])
        if form.get("init_from") is not None:
            try:
                form["init_from"] = settings.run_in(form["init_from"], self._home)
            except ApiError:
                left_out.append(f"init_from={form.pop('init_from')}")
        name = self._index.summary(name)["name"] or name
        return {
            "task": config.task.name,
            "config": settings.for_page(form),
            "name": f"{name} copy"[:200],
            "left_out": left_out,
        }

    def metrics(self, name: RunName) -> dict[str, Any]:
        run = self._index.run_folder(name)
        return {"epochs": or_else(run.epochs, []), "evaluations": or_else(run.evaluations, [])}

    def compare(self, run: Annotated[list[str], Query(min_length=1, max_length=20)]) -> dict[str, Any]:
        return details.compare([self._index.run(name) for name in run], [self._index.summary(name) for name in run])

    def log(
        self,
        name: RunName,
        file: Annotated[str | None, Query(alias="name")] = None,
        tail: Annotated[int, Query(ge=1, le=5000)] = 200,
    ) -> dict[str, Any]:
        run = self._index.run_folder(name)
        names = details.log_names(run)
        output = self._starts.output(run.path.name)
        if output.exists() and "output.log" not in names:
            names = ["output.log", *names]
        chosen = file if file is not None else next(iter(names), None)
        if chosen is None:
            return {"name": None, "lines": [], "truncated": False, "names": names}
        if chosen not in names:
            raise ApiError("NOT_FOUND", 404, f"run {name} has no log {chosen[:100]!r}", fix=f"choose from {names}")
        path = output if chosen == "output.log" else run.logs / chosen
        found, truncated = last_lines(path, tail)
        return {"name": chosen, "lines": found, "truncated": truncated, "names": names}

    def files(self, name: RunName) -> dict[str, Any]:
        """The files of a run, by path, without what a link leads to."""
        return {"files": details.files(self._index.run_folder(name).path)}

    def file(self, name: RunName, path: str) -> Path:
        """One of them. Raises :class:`ApiError` when there is none."""
        folder = self._index.run_folder(name).path
        if path not in {file["path"] for file in details.files(folder)}:
            raise ApiError("NOT_FOUND", 404, f"run {name} has no file {path[:200]!r}", fix="reload the list")
        return folder / path

    def settings(self) -> dict[str, Any]:
        """By run, the settings that are not the ``same`` in all runs."""
        found = {}
        for summary in self._index.summaries():
            file, name = self._home.run(summary["location"]) / "config.yaml", summary["id"]
            with contextlib.suppress(RunFolderError):
                if self._settings.get(name, (-1, {}))[0] != (stamp := modified_ns(file)):
                    self._settings[name] = (stamp, details.settings_of(file))
                found[name] = self._settings[name][1]
        keys = {key for one in found.values() for key in one}
        first: dict[str, Any] = next(iter(found.values()), {})
        differ = {key for key in keys if any(one.get(key) != first.get(key) for one in found.values())}
        return {
            "runs": {name: {key: one[key] for key in differ & one.keys()} for name, one in found.items()},
            "same": {key: value for key, value in first.items() if key not in differ},
        }
