"""What the page may ask for, and the command and YAML that say the same."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep.config import RunConfig, resolve
from lockstep.config.load import merge, parse_set
from lockstep.errors import ConfigError
from lockstep.studio.home import Home
from lockstep.studio.problems import ApiError, not_allowed
from lockstep.studio.tasks import OfferedTasks

#: Settings that name files to write, addresses, or code to import.
REFUSED = {
    "save_dir": "the studio chooses the run's folder",
    "runs_dir": "the studio was started with a runs folder",
    "telemetry.upload_to": "it is an address that the run writes to",
    "telemetry.mlflow_uri": "it is an address that the run writes to",
    "task.name": "the task is chosen from the list",
    "task.datamodule": "it names code to import",
    "task.trainer": "it names objects of Lightning's Trainer",
}


@dataclass(frozen=True)
class Wanted:
    """A checked request: a task of the list and sparse, nested settings."""

    task: str
    settings: dict[str, Any]

    def mapping(self) -> dict[str, Any]:
        """The settings as a configuration file has them, the task's name included."""
        return merge(self.settings, {"task": {**(self.settings.get("task") or {}), "name": self.task}})


def check(task: str, config: Mapping[str, Any], tasks: OfferedTasks, home: Home) -> Wanted:
    """The request, if the page may make it; with the data module that was named with its task, if one was.

    Raises:
        ApiError: a task that is not in the list, or a setting that is not the page's.
        ConfigError: an unknown key or a bad value.
    """
    if task not in tasks.names:
        raise ApiError(
            "TASK_NOT_USABLE",
            422,
            f"there is no task {task[:100]!r} here",
            why=f"the studio knows {', '.join(tasks.names)}",
            fix="start the studio with --task FILE.py:Class to add one",
        )
    data_module = tasks.data_modules.get(task)
    for key, value in flatten(config):
        if key == "task.datamodule" and value == data_module:
            continue  # a configuration that was saved here
        parents = {key.rsplit(".", depth)[0] for depth in range(key.count(".") + 1)}
        for refused in parents & REFUSED.keys():
            if value is not None:
                raise not_allowed(refused, REFUSED[refused])
    settings = without_refused(config)
    if data_module is not None:
        settings = merge(settings, {"task": {"datamodule": data_module}})
    if settings.get("init_from") is not None:
        settings["init_from"] = str(_run_folder(settings["init_from"], home))
    wanted = Wanted(task, settings)
    resolve(wanted.mapping())
    return wanted


def without_refused(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the keys that are not the page's, and without sections that are empty then."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key in RunConfig.model_fields:
            inner = {name: item for name, item in value.items() if f"{key}.{name}" not in REFUSED}
            if inner:
                kept[key] = inner
        elif key not in REFUSED:
            kept[key] = value
    return kept


def _run_folder(ref: object, home: Home) -> Path:
    folder = home.run(str(ref)) if isinstance(ref, str) and "/" not in ref else None
    if folder is None or not (folder / "run.json").is_file():
        raise not_allowed("init_from", "it must be a run of this runs folder")
    return folder


def flatten(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``(dotted key, value)`` of every setting; a task's own settings stay whole.

    Raises:
        ConfigError: a section that is not one.
    """
    for key, value in config.items():
        field = RunConfig.model_fields.get(key)
        section = field is not None and isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields")
        if not section:
            yield key, value
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{name}", item) for name, item in value.items())
        else:
            raise ConfigError(f"`{key}` must be a section", why=f"it is {value!r:.100}", fix=f"write `{key}: {{…}}`")


def train_arguments(wanted: Wanted, flags: Mapping[str, str]) -> list[str]:
    """What follows ``lockstep`` to train this, as a person would type it.

    Args:
        flags: the flags of ``lockstep train`` and the setting that each one stands for.
    """
    return ["train", wanted.task, *_as_flags(wanted.settings, flags)]


def resume_arguments(
    folder: Path, *, devices: list[str] | None, rescale_batch: bool, changes: Mapping[str, Any]
) -> list[str]:
    """What follows ``lockstep`` to go on with a run."""
    words = ["resume", str(folder)]
    if devices is not None:
        words += _flag("--devices", ",".join(devices))
    if rescale_batch:
        words.append("--rescale-batch")
    return [*words, *_as_flags(changes, {})]


def command_text(arguments: list[str]) -> str:
    """The command for people: what can be pasted into a shell."""
    return shlex.join(["lockstep", *arguments])


def as_yaml(wanted: Wanted) -> str:
    """What differs from the defaults, as a configuration file."""
    return yaml.safe_dump(wanted.mapping(), sort_keys=False, allow_unicode=True)


def _as_flags(settings: Mapping[str, Any], flags: Mapping[str, str]) -> list[str]:
    by_key = {key: flag for flag, key in flags.items()}
    words: list[str] = []
    for key, value in flatten(settings):
        flag = by_key.get(key)
        if flag is None or value is None or value is False or isinstance(value, dict):
            words += ["--set", f"{key}={_yaml_word(value)}"]
        elif value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += _flag(flag, ",".join(map(str, value)))
        else:
            words += _flag(flag, str(value))
    return words


def _flag(flag: str, value: str) -> list[str]:
    return [f"{flag}={value}"] if value.startswith("-") or not value else [flag, value]


def _yaml_word(value: Any) -> str:
    """The shortest text that ``--set`` reads back as ``value``."""
    if isinstance(value, str):
        try:
            if parse_set(f"value={value}") == {"value": value}:
                return value
        except ConfigError:
            pass
    return json.dumps(value, ensure_ascii=False)
