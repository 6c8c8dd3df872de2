"""Saved configurations, and configuration files pasted into the page."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import yaml

from lockstep.config.load import parse_yaml
from lockstep.errors import ConfigError, RunFolderError
from lockstep.studio import settings
from lockstep.studio.home import Home, iso
from lockstep.studio.problems import ApiError
from lockstep.studio.schemas import PlanBody, YamlBody
from lockstep.studio.settings import OfferedTasks, Wanted
from lockstep.telemetry.rundir import read_json, write_json


class SavedConfigs:
    """One JSON file each: the task's name and sparse settings, as the form has them."""

    def __init__(self, home: Home, tasks: OfferedTasks) -> None:
        self._home = home
        self._tasks = tasks

    def list(self) -> dict[str, Any]:
        """Names, tasks and times; files without a configuration are skipped."""
        found = []
        for file in sorted(self._home.configs.glob("*.json")):
            with contextlib.suppress(RunFolderError, KeyError, TypeError):
                kept = read_json(file)
                found.append({"name": file.stem, "task": kept["task"], "saved_at": kept["saved_at"]})
        return {"configs": found}

    def save(self, name: str, body: PlanBody) -> dict[str, Any]:
        """Keep a configuration; one of this name is replaced. Raises :class:`LockstepError`."""
        wanted = settings.check(body.task, body.config, self._tasks, self._home)
        saved_at = iso(time.time())
        write_json(self._home.config(name), {"task": body.task, "config": wanted.settings, "saved_at": saved_at})
        return self.load(name)

    def load(self, name: str) -> dict[str, Any]:
        """One configuration, also as YAML. Raises :class:`ApiError` when there is none of this name."""
        try:
            kept = read_json(self._home.config(name))
            wanted = Wanted(kept["task"], kept["config"], self._home.runs_dir)
        except (RunFolderError, KeyError, TypeError):
            raise ApiError("CONFIG_NOT_FOUND", 404, f"there is no configuration {name!r}", fix="reload") from None
        config = settings.for_page(wanted.settings)
        return {"name": name, "task": wanted.task, "config": config, "yaml": settings.as_yaml(wanted)}

    def delete(self, name: str) -> dict[str, Any]:
        """Forget a configuration. Raises :class:`ApiError` when there is none of this name."""
        self.load(name)
        self._home.config(name).unlink(missing_ok=True)
        return {"deleted": name}

    def parse(self, body: YamlBody) -> dict[str, Any]:
        """A configuration file's text as the form has it. Raises :class:`LockstepError`."""
        try:
            content = parse_yaml(body.yaml)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise ConfigError("this is not valid YAML", why=_place_of(error), fix="correct that line") from None
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise ConfigError("this has no settings", why="its top level must be a mapping", fix="write `section:`")
        if "defaults" in content:
            raise ConfigError(
                "`defaults` names files, which the page cannot read", fix="paste the content of these files"
            )
        task = content.get("task") or {}
        if not isinstance(task, dict):
            raise ConfigError("`task` must be a section", fix="write `task: {name: har}`")
        name = str(task.get("name", self._tasks.names[0]))
        form = {**content, "task": {key: value for key, value in task.items() if key != "name"}}
        form = {key: value for key, value in form.items() if value is not None and key not in settings.REFUSED}
        wanted = settings.check(name, form, self._tasks, self._home)
        return {"task": wanted.task, "config": settings.for_page(wanted.settings)}


def _place_of(error: Exception) -> str:
    """The parser's message, with the line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: {problem}"[:500] if mark is not None else problem[:500]
