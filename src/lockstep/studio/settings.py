"""The tasks and settings that the page may use, the same settings as a command and as YAML; saved configurations."""

from __future__ import annotations

import ast
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig, resolve
from lockstep.config.load import merge, nested, to_yaml
from lockstep.config.named import code_in, named, references_in, whole_name, yaml_word
from lockstep.errors import ConfigError, RunFolderError, TaskError
from lockstep.rundir.files import MAX_JSON_BYTES, FileContent, read_bytes, write_json
from lockstep.rundir.summary import read_runs
from lockstep.studio.home import Home, is_run_name
from lockstep.studio.schemas import ApiError, PlanBody, not_allowed
from lockstep.tasks import BUILT_IN

#: Settings that name files to write, addresses, or code to import.
REFUSED = {
    "save_dir": "the studio chooses the run's folder",
    "runs_dir": "the studio was started with a runs folder",
    "storage.mirror": "it is an address that the run writes to",
    "telemetry.mlflow_uri": "it is an address that the run writes to",
    "launch.rdzv": "it is an address whose objects the run would load",
    "launch.nodes": "each machine of such a run is started from a terminal there",
    "task.name": "the task is chosen from the list",
    "task.datamodule": "it names code to import",
    "task.trainer": "it names objects of Lightning's Trainer",
    "task.cli": "it may name code to run",
}

#: Processes of one run on the CPU: each imports torch, so a thousand would take the machine down.
MOST_CPU_RANKS = 64
#: A browser keeps larger whole numbers only rounded.
_LARGEST_EXACT = 2**53 - 1

#: Tasks by name, the built-in ones first; of a LightningModule, the LightningDataModule that was named with it.
OfferedTasks = dict[str, str | None]
#: Python files of a folder that are searched for tasks.
_MAX_TASK_FILES = 300
_MAX_SOURCE_BYTES = 1 << 20


def offered_tasks(names: Sequence[str]) -> OfferedTasks:
    """List the built-in tasks and ``names``: each a task's class, or a LightningModule's and its data's with a +.

    A class in a file is named by its absolute path, as runs name it. Raises :class:`TaskError`.
    """
    tasks: OfferedTasks = dict.fromkeys(BUILT_IN)
    for text in names:
        name, plus, data = text.partition("+")
        task = class_path(name)
        data_module = class_path(data) if plus else None
        first = tasks.setdefault(task, data_module) or data_module
        if data_module not in (None, first):
            raise TaskError(
                f"{name} is given with two data modules", fix="give each module once, or derive a class for the other"
            )
        tasks[task] = first
    return tasks


def class_path(name: str) -> str:
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute.isidentifier():
        raise TaskError(f"{name!r} names no class", fix="write --task my_file.py:MyTask")
    if module.endswith(".py") and not Path(module).is_file():
        raise TaskError(f"there is no file {module}", why=f"looked in {Path.cwd()}", fix="check the path")
    return whole_name(name)


def task_classes(file: Path) -> list[str]:
    """Find the classes of tasks and LightningModules in a Python file by their bases, without importing it."""
    try:
        tree = ast.parse(read_bytes(file, max_bytes=_MAX_SOURCE_BYTES))
    except (SyntaxError, ValueError, RecursionError, RunFolderError):
        return []
    tasks: list[str] = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        if any(base.endswith(("Task", "LightningModule")) or base in tasks for base in bases):
            tasks.append(node.name)
    return tasks


def task_files(folder: Path, runs_dir: Path) -> list[str]:
    """List the tasks in the Python files of ``folder`` and its folders, as ``file.py:Class``.

    Links are followed unless they lead out of it; runs are left out.
    """
    tasks: list[str] = []
    for file in sorted([*folder.glob("*.py"), *folder.glob("[!.]*/*.py")])[:_MAX_TASK_FILES]:
        real = Path(os.path.realpath(file))
        is_inside = real.is_relative_to(os.path.realpath(folder))
        is_in_run = any(os.path.lexists(parent / "run.json") for parent in real.parents)
        if is_inside and not is_in_run and not real.is_relative_to(os.path.realpath(runs_dir)):
            tasks += [f"{file.relative_to(folder)}:{name}" for name in task_classes(file)]
    return tasks


@dataclass(frozen=True)
class RunRequest:
    """A checked request: a task of the list and sparse, nested settings, in which a run is named by its id."""

    task: str
    settings: dict[str, Any]
    runs_dir: Path

    def for_command(self) -> dict[str, Any]:
        """Return the settings for a command in any working folder: a run is named by its folder."""
        source = self.settings.get("init_from")
        return self.settings if source is None else self.settings | {"init_from": str(self.runs_dir / source)}

    def mapping(self) -> dict[str, Any]:
        """Return :meth:`for_command` as a configuration file has it, with the task's name."""
        return merge(self.for_command(), {"task": {**(self.settings.get("task") or {}), "name": self.task}})


def check(task: str, config: Mapping[str, Any], tasks: OfferedTasks, home: Home) -> RunRequest:
    """Check a request. Raises :class:`ApiError` for settings that the page may not set, :class:`ConfigError`."""
    if task not in tasks:
        raise ApiError(
            "TASK_NOT_USABLE",
            422,
            f"there is no task {task[:100]!r} here",
            why=f"the studio knows {', '.join(tasks)}",
            fix="start the studio with --task FILE.py:Class to add one",
        )
    accepted: dict[str, Any] = {}
    for key, value in flatten(config):
        refused = next((name for name in REFUSED if f"{key}.".startswith(f"{name}.")), None)
        if refused is None:
            accepted[key] = value
        elif value is not None and (key, value) != ("task.datamodule", tasks[task]):  # as a saved configuration has it
            raise not_allowed(refused, REFUSED[refused])
    settings = nested(accepted)
    if tasks[task] is not None:
        settings = merge(settings, {"task": {"datamodule": tasks[task]}})
    if settings.get("init_from") is not None:
        settings["init_from"] = run_in(settings["init_from"], home)
    read = resolve(settings, {"task": {"name": task}})
    offered = references_in({"task": {"name": task, "datamodule": tasks[task]}})
    named.require(code_in(read.model_dump(mode="json")), "this configuration", offered)
    check_ranks(read.hardware.selected_devices or ())
    # As they were read: ``gpu:0,gpu:1`` is a list. Only the task can read its settings.
    values = read.model_dump(mode="json", exclude={"task"}) | {"task": settings.get("task")}
    for key, value in settings.items():
        settings[key] = {name: values[key][name] for name in value} if isinstance(value, Mapping) else values[key]
    return RunRequest(task, settings, home.runs_dir)


def check_ranks(devices: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for more processes on the CPU than the page starts."""
    ranks = sum(device == "cpu" for device in devices)
    if ranks > MOST_CPU_RANKS:
        refusal = ConfigError(
            f"{ranks} ranks on the CPU are too many",
            why=f"the page starts at most {MOST_CPU_RANKS}",
            fix="select fewer, or start this run from a terminal",
        )
        refusal.settings = {"hardware.selected_devices": refusal.what}
        raise refusal


def for_page(value: Any) -> Any:
    """Convert whole numbers that a browser would round to texts, which mean the same."""
    if isinstance(value, Mapping):
        return {key: for_page(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [for_page(item) for item in value]
    return str(value) if isinstance(value, int) and abs(value) > _LARGEST_EXACT else value


def run_in(ref: object, home: Home) -> str:
    """Return the folder's name of the run that ``ref`` names: by its id, its folder's name or its folder."""
    name = str(ref).removeprefix(f"{home.runs_dir}/")
    if is_run_name(name):
        if (home.run(name) / "run.json").is_file():
            return name
        for run, record in read_runs(home.runs_dir):
            if record.id == name:
                return run.path.name
    raise not_allowed("init_from", "it must be a run of this runs folder")


def flatten(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted key, value)`` of every setting; a section without fixed fields (``task``) is one value."""
    for key, value in config.items():
        field = RunConfig.model_fields.get(key)
        if field is None or not isinstance(field.annotation, type) or not hasattr(field.annotation, "model_fields"):
            yield key, value
        elif isinstance(value, Mapping):
            for name, item in value.items():
                if not name.isidentifier():  # `--set` would read a part of it as a value
                    raise ConfigError(f"unknown setting {f'{key}.{name}'!r:.100}", fix="check its spelling")
                yield f"{key}.{name}", item
        else:
            raise ConfigError(f"`{key}` must be a section", why=f"it is {value!r:.100}", fix=f"write `{key}: {{…}}`")


def command_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the command as words, and as a line for a shell."""
    words = ["lockstep", *arguments]
    return {"argv": words, "command": shlex.join(words)}


def as_flags(settings: Mapping[str, Any], flags: Mapping[str, str]) -> list[str]:
    """Return the words of a command with these settings, as typed by a person; ``flags``: its settings by flag."""
    by_key = {key: flag for flag, key in flags.items()}
    words: list[str] = []
    for key, value in flatten(settings):
        flag = by_key.get(key)
        if flag is None or value is None or value is False or isinstance(value, dict):
            words += ["--set", f"{key}={yaml_word(value)}"]
        elif value is True:
            words.append(flag)
        else:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words += [f"{flag}={text}"] if text.startswith("-") or not text else [flag, text]
    return words


class SavedConfig(FileContent):
    """The task's name and sparse settings, as the form has them."""

    task: str
    config: dict[str, Any]


@dataclass(frozen=True)
class SavedConfigs:
    """One JSON file each."""

    _home: Home
    _tasks: OfferedTasks

    def list(self) -> dict[str, Any]:
        saved = {file.stem: SavedConfig.read(file, MAX_JSON_BYTES) for file in self._home.configs.glob("*.json")}
        return {"configs": [{"name": name, "task": config.task} for name, config in sorted(saved.items()) if config]}

    def save(self, name: str, body: PlanBody) -> dict[str, Any]:
        """Keep a configuration; one of this name is replaced."""
        request = check(body.task, body.config, self._tasks, self._home)
        saved = SavedConfig(task=body.task, config=request.settings)
        write_json(self._home.config(name), saved.model_dump())
        return self.load(name)

    def load(self, name: str) -> dict[str, Any]:
        """Return a saved configuration, also as YAML."""
        saved = SavedConfig.read(self._home.config(name), MAX_JSON_BYTES)
        if saved is None:
            raise ApiError("CONFIG_NOT_FOUND", 404, f"there is no configuration {name!r}", fix="reload")
        request = RunRequest(saved.task, saved.config, self._home.runs_dir)
        return {"name": name, "task": saved.task, "config": for_page(saved.config), "yaml": to_yaml(request.mapping())}

    def delete(self, name: str) -> dict[str, Any]:
        self.load(name)
        self._home.config(name).unlink(missing_ok=True)
        return {"deleted": name}
