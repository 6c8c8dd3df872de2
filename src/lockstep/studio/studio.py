"""What the API does, without HTTP: one method a request."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import json_schema, resolve
from lockstep.errors import ConfigError, RunFolderError
from lockstep.hardware.device import Device
from lockstep.hardware.selection import choose_default, parse, select
from lockstep.report.write import write_report
from lockstep.studio import details, planning, settings
from lockstep.studio.config_store import SavedConfigs
from lockstep.studio.home import Home, iso, remove_folder
from lockstep.studio.index import RunIndex
from lockstep.studio.jobs import Jobs
from lockstep.studio.launch_records import Labels, Starts
from lockstep.studio.planner import Planner
from lockstep.studio.problems import ApiError, in_progress, run_not_found
from lockstep.studio.reading import last_lines
from lockstep.studio.schemas import LabelBody, PlanBody, ResumeBody, StartBody
from lockstep.studio.settings import Wanted
from lockstep.studio.stopping import Stops
from lockstep.studio.tasks import BUILT_IN, OfferedTasks
from lockstep.telemetry.records import versions
from lockstep.telemetry.rundir import new_run_id, utc_now
from lockstep.telemetry.summary import LIVE

#: How long a run may take to end with a checkpoint before it is killed.
KILL_AFTER_S = 60.0
_SECTIONS = {
    "task": "Task",
    "hardware": "Hardware",
    "training": "Training",
    "optimizer": "Optimizer",
    "scheduler": "Schedule",
    "data": "Data",
    "validation": "Validation",
    "checkpoint": "Checkpoints",
    "distributed": "Communication between ranks",
    "fsdp": "Sharding (strategy fsdp)",
    "pipeline": "Pipeline (strategy pipeline)",
    "telemetry": "Logging",
    "launch": "Launching",
    "lightning": "Lightning",
    "debug": "Debugging",
}


@dataclass(frozen=True)
class Options:
    """Options from the command line.

    Attributes:
        runs_dir: where runs are found and made.
        tasks: built-in tasks and those given at the start; the page can start no others.
        flags: flags of ``lockstep train`` and the setting of each.
        verbs: the commands that this version has.
        kill_after_s: how long a stopped run may take to save a checkpoint and end.
    """

    runs_dir: Path
    tasks: OfferedTasks
    flags: Mapping[str, str]
    verbs: tuple[str, ...]
    kill_after_s: float = KILL_AFTER_S


class Studio:
    """State of one server; everything that must outlive it is in files."""

    def __init__(self, options: Options, detect: Any) -> None:
        self.options = options
        self.home = Home(options.runs_dir)
        self.home.make()
        self.starts = Starts(self.home)
        self.index = RunIndex(self.home, self.starts)
        self.jobs = Jobs(self.home)
        self.saved = SavedConfigs(self.home, options.tasks)
        self.stops = Stops(self.index, self.starts, options.kill_after_s)
        self.planner = Planner()
        self.instance = secrets.token_hex(8)
        self.started_at = utc_now()
        self._detect = detect
        self._drawing = threading.Lock()
        #: Held from checking a run until it is started or deleted.
        self._changing = threading.Lock()

    def hello(self) -> dict[str, Any]:
        """Who answers; first message of every WebSocket."""
        return {"instance": self.instance, "version": versions()["lockstep"]}

    def about(self) -> dict[str, Any]:
        return {
            **self.hello(),
            "runs_dir": str(self.home.runs_dir),
            "started_at": iso(self.started_at.timestamp()),
            "kill_after_s": self.options.kill_after_s,
            "host": socket.gethostname(),
            "verbs": sorted(self.options.verbs),
        }

    # What is here.

    def devices(self, *, refresh: bool = False) -> list[Device]:
        """The machine's devices; free memory and users as of now with ``refresh``."""
        found: list[Device] = self._detect(refresh=refresh)
        return found

    def list_devices(self, *, refresh: bool) -> dict[str, Any]:
        found = self.devices(refresh=refresh)
        return {
            "devices": [device.as_dict() for device in found],
            "default": list(choose_default(found).devices),
            "runs": self.index.users(),
        }

    def tasks(self) -> dict[str, Any]:
        described = self.planner.tasks(self.options.tasks.names)
        data = self.options.tasks.data_modules
        return {
            "tasks": [
                {**task, "built_in": task["name"] in BUILT_IN, "datamodule": data.get(task["name"])}
                for task in described
            ],
        }

    def schema(self) -> dict[str, Any]:
        return {
            "schema": json_schema(),
            "defaults": resolve().model_dump(mode="json"),
            "sections": [{"name": name, "title": title} for name, title in _SECTIONS.items()],
            "refused": list(settings.REFUSED),
        }

    # Before a run.

    def wanted(self, body: PlanBody) -> Wanted:
        """The request, checked. Raises :class:`LockstepError`."""
        wanted = settings.check(body.task, body.config, self.options.tasks, self.home)
        if body.name:
            wanted.settings["name"] = body.name
        return wanted

    def preview(self, wanted: Wanted) -> dict[str, Any]:
        words = settings.train_arguments(wanted, self.options.flags)
        if self.home.runs_dir != Path.cwd() / "runs":
            words += ["--runs-dir", str(self.home.runs_dir)]
        return {
            "command": settings.command_text(words),
            "argv": ["lockstep", *words],
            "yaml": settings.as_yaml(wanted),
        }

    def plan(self, body: PlanBody) -> dict[str, Any]:
        """Labels, notes and plan; what is wrong with the settings is part of the answer."""
        try:
            wanted = self.wanted(body)
        except ConfigError as error:
            return planning.refusal(error)
        answer = planning.make_answer(wanted, self.devices(), self.index.users(), self.planner.plan)
        return {**answer, "preview": self.preview(wanted)}

    # Runs.

    def start(self, body: StartBody) -> dict[str, Any]:
        """Start the command of a new run; returns at once. Raises :class:`LockstepError`."""
        wanted = self.wanted(body)
        chosen = self._check_devices(wanted)
        name = body.id or new_run_id()
        folder = self.home.run(name)
        words = [*settings.train_arguments(wanted, self.options.flags), "--save-dir", str(folder)]
        with self._changing:
            if os.path.lexists(folder):
                raise in_progress(name, "it has been started already")
            self.starts.begin(name, words, task=wanted.task, attempt_before=0, devices=chosen)
        self.starts.label(name, Labels(body.name or None, tuple(body.tags) if body.tags else None))
        return self.index.summary(name)

    def _check_devices(self, wanted: Wanted) -> list[str]:
        """Refuse at once what the command would refuse in some seconds."""
        config = resolve(wanted.mapping())
        placement, problem = planning.place(config, self.devices())
        if placement is None:
            assert problem is not None
            raise problem
        return list(placement.devices)

    def detail(self, name: str) -> dict[str, Any]:
        summary = self.index.summary(name)
        run = self.index.run_folder(name)
        start = self.starts.read(run.path.name)
        output, _ = last_lines(self.starts.output(run.path.name), 40)
        return {
            **details.describe(run, summary, start),
            "jobs": [job for job in self.jobs.all() if job["run"] in {summary["id"], summary["location"]}],
            "start_output": "\n".join(output) or None,
        }

    def label(self, name: str, body: LabelBody) -> dict[str, Any]:
        location = self.index.summary(name)["location"]
        kept = self.starts.labels(location)
        given = body.model_fields_set
        self.starts.label(
            location,
            Labels(
                (body.name or "") if "name" in given else kept.name,
                tuple(dict.fromkeys(body.tags or ())) if "tags" in given else kept.tags,
            ),
        )
        return self.index.summary(name)

    def delete(self, name: str) -> dict[str, Any]:
        location = self.index.locate(name)
        folder = self.home.run(location)
        self._refuse_live(name)
        self.starts.wait_for_end(location)
        with self._changing:
            self._refuse_live(name)
            if os.path.lexists(folder):
                remove_folder(folder, self.home.runs_dir)
            if self.home.start(location).exists():
                self.starts.forget(location)
        return {"deleted": name}

    def _refuse_live(self, name: str) -> None:
        """Raises :class:`ApiError` when there is no such run, or it is running."""
        folder = self.home.run(self.index.locate(name))
        if not os.path.lexists(folder) and self.starts.read(folder.name) is None:
            raise run_not_found(name)
        try:
            summary = self.index.summary(name)
        except RunFolderError:
            if not os.path.lexists(folder / "run.json"):
                raise
            return  # damaged: it is not running
        if summary["status"] in LIVE:
            raise in_progress(name)

    def check_devices(self, names: Sequence[str]) -> None:
        """Raises :class:`DeviceError` for devices that this machine does not have."""
        select(parse(names), self.devices())

    def resume_words(self, name: str, body: ResumeBody) -> list[str]:
        run = self.index.run(name)
        if body.devices is not None:
            self.check_devices(body.devices)
        training = {"epochs": body.epochs, "max_steps": body.max_steps}
        changes = {key: value for key, value in training.items() if value is not None}
        return settings.resume_arguments(
            run.path,
            devices=body.devices,
            rescale_batch=body.rescale_batch,
            changes={"training": changes} if changes else {},
        )

    def resume(self, name: str, body: ResumeBody) -> dict[str, Any]:
        """Start the command that resumes a run. Raises :class:`LockstepError`."""
        words = self.resume_words(name, body)
        if self.index.summary(name)["status"] in LIVE:
            raise in_progress(name)
        location = self.index.locate(name)
        self.starts.wait_for_end(location)
        with self._changing:
            summary = self.index.summary(name)
            if summary["status"] in LIVE:
                raise in_progress(name)
            devices, attempt = body.devices or summary["devices"], max(1, summary["attempt"])
            self.starts.begin(location, words, task=summary["task"], attempt_before=attempt, devices=devices)
        return self.index.summary(name)

    def duplicate(self, name: str) -> dict[str, Any]:
        config = self.index.run(name).config()
        if config.task.name not in self.options.tasks.names:
            raise ApiError(
                "TASK_NOT_USABLE",
                422,
                f"this run's task, {config.task.name}, is not in the list",
                fix=f"start the studio with --task {config.task.name}",
            )
        form, left_out = details.form_of(config, self._defaults_of(config.task.name))
        if form.get("init_from") is not None:
            try:
                form["init_from"] = settings.run_in(form["init_from"], self.home)
            except ApiError:
                left_out.append(f"init_from={form.pop('init_from')}")
        name = self.index.summary(name)["name"] or name
        return {
            "task": config.task.name,
            "config": settings.for_page(form),
            "name": f"{name} copy"[:200],
            "left_out": left_out,
        }

    def _defaults_of(self, task: str) -> Mapping[str, Any]:
        """The task's own default settings. Raises :class:`LockstepError` when it cannot be used."""
        described = next(one for one in self.planner.tasks(self.options.tasks.names) if one["name"] == task)
        if (error := described["error"]) is not None:
            raise ApiError("TASK_NOT_USABLE", 422, error["message"], why=error.get("why", ""), fix=error.get("fix", ""))
        defaults: Mapping[str, Any] = described["defaults"]
        return defaults

    def log(self, name: str, file: str | None, lines: int) -> dict[str, Any]:
        run = self.index.run_folder(name)
        names = details.log_names(run)
        output = self.starts.output(run.path.name)
        if output.exists() and "output.log" not in names:
            names = ["output.log", *names]
        chosen = file if file is not None else next(iter(names), None)
        if chosen is None:
            return {"name": None, "lines": [], "truncated": False, "names": names}
        if chosen not in names:
            raise ApiError("NOT_FOUND", 404, f"run {name} has no log {chosen[:100]!r}", fix=f"choose from {names}")
        path = output if chosen == "output.log" else run.logs / chosen
        found, truncated = last_lines(path, lines)
        return {"name": chosen, "lines": found, "truncated": truncated, "names": names}

    def report(self, name: str) -> bytes:
        """The page that ``lockstep report`` writes of this run, as it is now.

        Raises:
            UnsupportedError: matplotlib is not installed. RunFolderError, StorageError: it cannot be made.
        """
        run = self.index.run(name)
        with self._drawing:
            page, *_ = write_report([str(run.path)], self.home.runs_dir, self.home.start(run.path.name) / "report")
            return page.read_bytes()

    def begin_job(self, kind: str, words: Sequence[str], *, run: str | None = None) -> dict[str, Any]:
        """Start a command whose result is a JSON document. Raises :class:`LockstepError`."""
        if words[0] not in self.options.verbs:
            raise ApiError("NOT_SUPPORTED", 422, f"this version has no `lockstep {words[0]}`", fix="upgrade Lockstep")
        if run is not None:
            self.index.run(run)
            summary = self.index.summary(run)
            if summary["starting"]:
                raise in_progress(run)
            run = summary["id"]
        return self.jobs.begin(kind, words, run=run)
