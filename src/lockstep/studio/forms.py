"""What the form needs before a run: devices, tasks, the schema, and the plan of its settings."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig, resolve
from lockstep.config.load import merge
from lockstep.errors import ConfigError, LockstepError
from lockstep.hardware.device import Device, choose_default, parse, select
from lockstep.hardware.monitor import SystemSource
from lockstep.studio import planning, settings
from lockstep.studio.home import Home
from lockstep.studio.index import RunIndex
from lockstep.studio.planner import Planner
from lockstep.studio.problems import ApiError
from lockstep.studio.processes import Identity, owner, works_on
from lockstep.studio.schemas import PlanBody
from lockstep.studio.settings import OfferedTasks, Wanted
from lockstep.tasks import BUILT_IN
from lockstep.telemetry.rundir import LIVE

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


class Forms:
    """Requests about settings that are not a run yet.

    Args:
        flags: flags of ``lockstep train`` and the setting of each.
        detect: ``detect(refresh=…)`` gives the machine's devices.
    """

    def __init__(
        self, home: Home, index: RunIndex, planner: Planner, tasks: OfferedTasks, flags: Mapping[str, str], detect: Any
    ) -> None:
        self._home = home
        self._index = index
        self._planner = planner
        self._tasks = tasks
        self._flags = flags
        self._detect = detect
        self._source: SystemSource | None = None
        self._looking = threading.Lock()

    @property
    def task_names(self) -> tuple[str, ...]:
        return self._tasks.names

    def devices(self, *, refresh: bool = False) -> list[Device]:
        """The machine's devices; free memory and users as of now with ``refresh``."""
        found: list[Device] = self._detect(refresh=refresh)
        return found

    def list_devices(self, refresh: bool = False) -> dict[str, Any]:
        found = self.devices(refresh=refresh)
        return {
            "devices": [self._used(device.as_dict()) for device in found],
            "load": self._sample() if refresh else None,
            "default": list(choose_default(found).devices),
            "runs": self._index.users(),
        }

    def _used(self, device: dict[str, Any]) -> dict[str, Any]:
        """``device`` with the user and the run of each of its processes, where the system says."""
        going = [one for one in self._index.summaries() if one["status"] in LIVE] if device["users"] else []
        for user in device["users"]:
            user["owner"], process = owner(user["pid"]), Identity(user["pid"], 0.0)
            user["run"] = next((run["id"] for run in going if works_on(process, Path(run["path"]))), None)
        return device

    def _sample(self) -> dict[str, Any] | None:
        """What the machine does now (:mod:`lockstep.hardware.monitor`); ``None`` at first, and without an answer."""
        with self._looking, contextlib.suppress(Exception):  # drivers fail in many ways
            if self._source is None:
                self._source = SystemSource(detect=self.devices).__enter__()
                return None  # a load is that since the last look
            return self._source.sample()
        return None

    def close(self) -> None:
        """Let go of the driver."""
        if self._source is not None:
            self._source.__exit__()

    def check_devices(self, names: Sequence[str]) -> None:
        """Raises :class:`LockstepError` for devices that this machine does not have, and too many CPU ranks."""
        settings.check_ranks(names)
        select(parse(names), self.devices())

    def tasks(self) -> dict[str, Any]:
        described = self._planner.tasks(self._tasks.names)
        data = self._tasks.data_modules
        return {
            "tasks": [
                {**task, "built_in": task["name"] in BUILT_IN, "datamodule": data.get(task["name"])}
                for task in described
            ],
        }

    def warm(self) -> None:
        """Let the helper process import the tasks; what goes wrong is reported to the page that asks."""
        with contextlib.suppress(LockstepError):
            self.tasks()

    def schema(self) -> dict[str, Any]:
        return self._schema

    @functools.cached_property
    def _schema(self) -> dict[str, Any]:
        return {
            "schema": RunConfig.model_json_schema(),
            "defaults": resolve().model_dump(mode="json"),
            "sections": [{"name": name, "title": title} for name, title in _SECTIONS.items()],
            "refused": list(settings.REFUSED),
            "flags": dict(self._flags),
        }

    def wanted(self, body: PlanBody) -> Wanted:
        """The request, checked. Raises :class:`LockstepError`."""
        wanted = settings.check(body.task, body.config, self._tasks, self._home)
        if body.name:
            wanted.settings["name"] = body.name
        return wanted

    def startable(self, body: PlanBody) -> Wanted:
        """:meth:`wanted`, with the task's own settings checked against its schema. Raises :class:`LockstepError`."""
        wanted = self.wanted(body)
        schema = self._described(wanted.task)["schema"]
        unknown = (wanted.settings.get("task") or {}).keys() - schema.get("properties", {}).keys() - {"datamodule"}
        if unknown and not schema.get("additionalProperties"):
            raise ConfigError(
                f"the task has no setting {min(unknown)!r:.100}",
                why=f"{wanted.task} knows {', '.join(schema.get('properties', {})) or 'none'}",
                fix="check its spelling",
            )
        return wanted

    def train_words(self, wanted: Wanted) -> list[str]:
        """What follows ``lockstep`` to train this."""
        return settings.train_arguments(wanted, self._flags)

    def preview(self, body: PlanBody) -> dict[str, Any]:
        return self._preview(self.wanted(body))

    def _preview(self, wanted: Wanted) -> dict[str, Any]:
        words = self.train_words(wanted)
        if self._home.runs_dir != Path.cwd() / "runs":
            words += ["--runs-dir", str(self._home.runs_dir)]
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
            return planning.answer(error)
        config, devices = resolve(wanted.mapping()), self.devices()
        placement, plan, problem = None, None, None
        try:
            placement = planning.place(config, devices)
            # A plan must not download data: the run does.
            plan = self._planner.plan(wanted.task, merge(wanted.mapping(), {"data": {"download": False}}), devices)
        except LockstepError as error:
            problem = error
        later = placement is not None and config.data.download and getattr(problem, "code", "") == "DATA_NOT_USABLE"
        return planning.answer(problem, placement, plan, later=later) | {
            "warnings": planning.warnings(placement, self._index.users()),
            "precisions": planning.precisions(config, devices),
            "preview": self._preview(wanted),
        }

    def place(self, wanted: Wanted) -> list[str]:
        """The devices of a run with these settings. Raises :class:`LockstepError` as the command would."""
        return list(planning.place(resolve(wanted.mapping()), self.devices()).devices)

    def defaults_of(self, task: str) -> Mapping[str, Any]:
        """The task's own default settings. Raises :class:`LockstepError` when it cannot be used."""
        defaults: Mapping[str, Any] = self._described(task)["defaults"]
        return defaults

    def _described(self, task: str) -> Mapping[str, Any]:
        all_tasks = self._planner.tasks(self._tasks.names)
        described: Mapping[str, Any] = next(one for one in all_tasks if one["name"] == task)
        if (error := described["error"]) is not None:
            raise ApiError("TASK_NOT_USABLE", 422, error["message"], why=error.get("why", ""), fix=error.get("fix", ""))
        return described
