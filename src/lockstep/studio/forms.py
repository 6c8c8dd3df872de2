"""Before a run: devices, tasks, the schema, the plan of the form's settings with its labels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from lockstep.config import Precision, RunConfig, resolve
from lockstep.config.load import merge, to_yaml
from lockstep.errors import ConfigError, LockstepError, PrecisionError, TaskError, UsageError
from lockstep.events import Note
from lockstep.hardware.detect import Device
from lockstep.hardware.resolve import Placement, choose_default, parse, resolve_placement, select
from lockstep.hardware.world import World
from lockstep.studio import settings
from lockstep.studio.commands import owner, works_on
from lockstep.studio.home import Home
from lockstep.studio.index import RunIndex
from lockstep.studio.planner import Planner, refusal
from lockstep.studio.schemas import PlanBody, TaskBody, problem_of
from lockstep.studio.settings import OfferedTasks, RunRequest


@dataclass(eq=False)
class Forms:
    """Requests about this machine, and about settings that are not a run yet."""

    _home: Home
    _index: RunIndex
    _planner: Planner
    offered: OfferedTasks
    #: Flags of ``lockstep train`` and the setting of each.
    _flags: Mapping[str, str]
    #: The machine's devices; free memory and users as of now with ``refresh=True``.
    devices: Callable[..., list[Device]]

    def list_devices(self, refresh: bool = False) -> dict[str, Any]:
        detected = self.devices(refresh=refresh)
        return {
            "devices": [self._used(device.as_dict()) for device in detected],
            "default": list(choose_default(detected).devices),
            "runs": self._index.users(),
        }

    def _used(self, device: dict[str, Any]) -> dict[str, Any]:
        """Add user and run of each of its processes to ``device``, if the system names them."""
        going = self._index.going() if device["users"] else []
        for user in device["users"]:
            user["owner"] = owner(user["pid"])
            user["run"] = next((run["id"] for run in going if works_on(user["pid"], Path(run["path"]))), None)
        return device

    def check_devices(self, names: Sequence[str]) -> None:
        """Raise :class:`LockstepError` for devices that this machine does not have, and too many CPU ranks."""
        settings.check_ranks(names)
        select(parse(names), self.devices())

    def tasks(self) -> dict[str, Any]:
        return {"tasks": self._planner.tasks(list(self.offered))}

    def task_files(self) -> dict[str, Any]:
        """List the tasks of the working folder's Python files that are not offered yet."""
        files = settings.task_files(Path.cwd(), self._home.runs_dir)
        return {"files": [file for file in files if settings.class_path(str(Path.cwd() / file)) not in self.offered]}

    def add_task(self, body: TaskBody) -> dict[str, Any]:
        """Offer a task of :meth:`task_files` until the studio ends. Raises :class:`TaskError`."""
        if body.path not in settings.task_files(Path.cwd(), self._home.runs_dir):
            raise TaskError(
                f"{body.path[:200]!r} is not a task here",
                why=f"the page takes Python files in {Path.cwd()} and its folders, and none of a run",
                fix="start the studio with --task FILE.py:Class",
            )
        added = settings.class_path(str(Path.cwd() / body.path))
        self.offered[added] = None
        return {"added": added, **self.tasks()}

    def described(self, task: str) -> Mapping[str, Any]:
        described: Mapping[str, Any] = next(each for each in self.tasks()["tasks"] if each["name"] == task)
        if described["error"] is not None:
            raise refusal({**described["error"], "code": "TASK_NOT_USABLE"})
        return described

    @functools.cached_property
    def schema(self) -> dict[str, Any]:
        return {
            "schema": RunConfig.model_json_schema(),
            "defaults": resolve().model_dump(mode="json"),
            "refused": list(settings.REFUSED),
        }

    def checked(self, body: PlanBody) -> RunRequest:
        request = settings.check(body.task, body.config, self.offered, self._home)
        if body.name:
            request.settings["name"] = body.name
        return request

    def startable(self, body: PlanBody) -> RunRequest:
        """Check a form as :meth:`checked` does, and the task's settings against its schema."""
        request = self.checked(body)
        schema = self.described(request.task)["schema"]
        unknown = (request.settings.get("task") or {}).keys() - schema.get("properties", {}).keys() - {"datamodule"}
        if unknown and not schema.get("additionalProperties"):
            raise ConfigError(
                f"the task has no setting {min(unknown)!r:.100}",
                why=f"{request.task} knows {', '.join(schema.get('properties', {})) or 'none'}",
                fix="check its spelling",
            )
        return request

    def train_words(self, request: RunRequest) -> list[str]:
        return ["train", request.task, *settings.as_flags(request.for_command(), self._flags)]

    def place(self, request: RunRequest) -> list[str]:
        return list(_place(resolve(request.mapping()), self.devices()).devices)

    def preview(self, body: PlanBody) -> dict[str, Any]:
        return self._preview(self.checked(body))

    def _preview(self, request: RunRequest) -> dict[str, Any]:
        words = self.train_words(request)
        if self._home.runs_dir != Path.cwd() / "runs":
            words += ["--runs-dir", str(self._home.runs_dir)]
        return {**settings.command_of(words), "yaml": to_yaml(request.mapping())}

    def plan(self, body: PlanBody) -> dict[str, Any]:
        """Labels, notes and plan; a mistake in the settings is part of the answer."""
        config = resolve()
        devices = self.devices()
        request = placement = plan = problem = None
        try:
            request = self.checked(body)
            config = resolve(request.mapping())
            placement = _place(config, devices)
            # A plan must not download data: the run does.
            plan = self._planner.plan(request.task, merge(request.mapping(), {"data": {"download": False}}), devices)
        except LockstepError as error:
            if request is None and not isinstance(error, ConfigError | TaskError):
                raise
            problem = error
        # Missing data will be downloaded: the run may start without a plan.
        later = placement is not None and config.data.download and getattr(problem, "code", "") == "DATA_NOT_USABLE"
        notes = [asdict(note) for note in placement.notes] if placement is not None else []
        if later:
            text = "The data is downloaded when the run starts; the plan is made then."
            notes.append(asdict(Note("data_downloaded_later", text)))
        reason = problem.what if problem is not None and not later else None
        return {
            "run": {"enabled": reason is None, "reason": reason},
            "problem": problem_of(problem) if problem else None,
            "labels": _labels(placement, plan),
            "notes": plan["notes"] if plan is not None else notes,
            "plan": plan,
            "warnings": _warnings(placement, self._index.users()),
            "precisions": _precisions(config, devices),
            "preview": self._preview(request) if request is not None else None,
        }


def _place(config: RunConfig, devices: Sequence[Device]) -> Placement:
    return resolve_placement(config.hardware, config.distributed, World(), devices)


def _labels(placement: Placement | None, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    gpus = placement is not None and placement.accelerator == "gpu"
    several = placement is not None and placement.world_size > 1 and not placement.spec.divides
    batch = plan["batch"] if plan else {"ranks": 1, "devices_per_rank": 1, "accumulate": 1}
    workers = plan["loader"]["num_workers"] if plan else 0
    ranks = batch["ranks"]
    in_all = f", {workers * ranks} in all" if ranks > 1 and workers else ""
    rate = plan["decisions"]["lr"] if plan else {}
    return {
        "effective_batch": plan and plan["effective_batch"],
        "effective_batch_shown": ranks * batch["devices_per_rank"] > 1 or batch["accumulate"] > 1,
        "multi_gpu": "Multi-GPU (DDP) will be used automatically." if gpus and several else None,
        "cpu_ignored": next((n.text for n in placement.notes if n.key == "cpu_ignored"), None) if placement else None,
        "learning_rate": f"Learning rate {rate['shown']}: {rate['reason']}" if plan else None,
        "workers": f"Loader workers: {workers} per rank{in_all}" if plan else None,
    }


def _precisions(config: RunConfig, devices: Sequence[Device]) -> list[dict[str, Any]]:
    """List the precisions, with the reason against each one that the chosen devices cannot compute."""
    answers = []
    for precision in get_args(Precision):
        reason = None
        try:
            _place(config.with_values(hardware={"precision": precision}), devices)
        except PrecisionError as error:
            reason = f"{error.what}: {error.why}"
        except UsageError:
            pass  # another setting is wrong, and `problem` says so
        answers.append({"value": precision, "supported": reason is None, "reason": reason})
    return answers


def _warnings(placement: Placement | None, users: Mapping[str, Sequence[str]]) -> list[str]:
    if placement is None or placement.accelerator != "gpu":
        return []
    return [
        f"{device} is used by {', '.join(users[device])}, which {'is' if len(users[device]) == 1 else 'are'} running: "
        "both will be slower, and may run out of memory"
        for device in dict.fromkeys(placement.devices)
        if users.get(device)
    ]
