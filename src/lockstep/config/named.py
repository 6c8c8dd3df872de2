"""Code and targets that the user has named on this machine; checked by all readers of run folders and configurations.

A run folder is data. Its files may name classes and scripts, whose import or start runs code, and addresses and
folders, which a run writes to. Each of these is used only if the user has named it: on this command line, in this
program, or before. The list is in the user's state folder (XDG Base Directory Specification).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.load import parse_yaml
from lockstep.errors import TaskError


@dataclass(frozen=True)
class Reference:
    """Code, or an address or folder to write to, outside a run folder.

    Attributes:
        setting: the setting or file that names it.
        value: value of the setting.
        entry: line in the list.
    """

    setting: str
    value: Any
    entry: str

    @property
    def words(self) -> list[str]:
        """Arguments of a command line that name it."""
        return ["--set", f"{self.setting}={yaml_word(self.value)}"]


def code_in(config: Mapping[str, Any]) -> list[Reference]:
    """List the classes and files that a configuration (nested settings) would import."""
    return list(_code_in(config))


def _code_in(config: Mapping[str, Any]) -> Iterator[Reference]:
    task, optimizer = (_section(config, name) for name in ("task", "optimizer"))
    names = {
        "task.name": task.get("name"),
        "task.datamodule": task.get("datamodule"),
        "optimizer.name": optimizer.get("name"),
    }
    name = str(task.get("name"))
    if name.startswith(("__main__:", "lockstep.")) and ".py" not in name:  # a program's task, or one of Lockstep's
        del names["task.name"]
    for setting, value in names.items():
        if isinstance(value, str) and (":" in value or value.endswith(".py")):
            yield Reference(setting, value, _line(whole_name(value)))
    if task.get("cli"):  # sections of LightningCLI may name anything anywhere
        yield Reference("task.cli", task["cli"], f"sha256:{_hash(task['cli'])}")


def targets_in(config: Mapping[str, Any]) -> list[Reference]:
    """List the addresses and folders that a training with a configuration (nested settings) would write to."""
    telemetry = _section(config, "telemetry")
    data = _section(config, "data")
    settings: dict[str, Any] = {
        "storage.mirror": _section(config, "storage").get("mirror"),
        "telemetry.mlflow_uri": telemetry.get("mlflow_uri"),
    }
    if telemetry.get("wandb"):  # to the user's account
        settings["telemetry.wandb"] = True
    if data.get("download"):
        settings["data.data_dir"] = str(Path(data["data_dir"]).absolute()) if data.get("data_dir") else None
    if trainer := _section(config, "task").get("trainer"):  # default_root_dir, for one
        settings["task.trainer"] = trainer
    return [
        Reference(setting, value, f"{setting}={_hash(value) if isinstance(value, Mapping) else _line(str(value))}")
        for setting, value in settings.items()
        if value
    ]


def references_in(config: Mapping[str, Any]) -> list[Reference]:
    """List all that a training with a configuration (nested settings) would import or write to."""
    return [*code_in(config), *targets_in(config)]


def script_reference(path: str, arguments: Sequence[str], folder: str) -> Reference:
    """Return the reference of a script that ``lockstep run`` starts with ``arguments`` in the working ``folder``."""
    return Reference("script.json", path, f"script={json.dumps([path, *arguments, folder])}")


class Named:
    """The list of references that the user has named on this machine."""

    @property
    def file(self) -> Path:
        """The list, one entry a line."""
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(state) / "lockstep" / "known-tasks"

    def entries(self) -> set[str]:
        try:
            return set(self.file.read_text(encoding="utf-8").splitlines())
        except (OSError, ValueError, RuntimeError):  # RuntimeError: the user has no home
            return set()

    def add(self, references: Iterable[Reference]) -> None:
        """Add references that the user has named. If the list cannot be written, they must be named each time."""
        new = sorted({reference.entry for reference in references} - self.entries())
        if not new:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write("".join(f"{entry}\n" for entry in new))
        except (OSError, RuntimeError) as error:
            _warn_unwritable(str(error), new[0])

    def missing(self, references: Iterable[Reference], current: Collection[Reference] = ()) -> list[Reference]:
        """Return the references that the user has named neither before nor now (``current``)."""
        entries = self.entries() | {reference.entry for reference in current}
        return [reference for reference in references if reference.entry not in entries]

    def require(
        self,
        references: Iterable[Reference],
        source: str,
        current: Collection[Reference] = (),
        *,
        command: Callable[[Sequence[Reference]], str] | None = None,
    ) -> None:
        """Raise :class:`TaskError` unless the user has named all ``references``, before or now (``current``).

        Args:
            source: run or configuration that contains the references, for the message.
            command: returns the command that names missing references; default: ``lockstep plan``, for code.
        """
        references = list(references)
        missing = self.missing(references, current)
        if missing:
            first = missing[0]
            value = f" {first.value[:300]}" if isinstance(first.value, str) else ""
            raise TaskError(
                f"{source} has {first.setting}{value}, which you have not named on this machine",
                why="it would run code or write there, and a file from elsewhere could name anything",
                fix=f"if you trust it, name it: {(command or partial(self._plan_command, references))(missing)}",
            )

    def _plan_command(self, references: Sequence[Reference], missing: Sequence[Reference]) -> str:
        """Return a command that names the ``missing`` references and starts nothing."""
        if any(reference.setting == "task.cli" for reference in missing):
            return "lockstep lightning fit, with the sections that task.cli has in its config.yaml"
        task = [reference.entry for reference in references if reference.setting == "task.name"]
        words = [word for reference in missing if reference.setting != "task.name" for word in reference.words]
        command = shlex.join(["lockstep", "plan", *(task or ["har"]), *words])  # any task names an optimizer
        return command if self._is_writable() else f"XDG_STATE_HOME=DIR {command} (DIR: a folder that you can write)"

    def _is_writable(self) -> bool:
        with contextlib.suppress(OSError, RuntimeError):
            folder = next(folder for folder in self.file.parents if folder.exists())
            return folder.is_dir() and os.access(self.file if self.file.exists() else folder, os.W_OK)
        return False


named = Named()


@functools.cache
def _warn_unwritable(problem: str, entry: str) -> None:
    sys.stderr.write(
        f"warning: the list of what you have named cannot be written ({problem}), so later commands will not know that "
        f"you named {entry}: set the environment variable XDG_STATE_HOME to a folder that you can write and keep\n"
    )


def whole_name(name: str) -> str:
    """Return the name of a class or a file of code, with the absolute path of the file."""
    path, colon, attribute = (name, "", "") if name.endswith(".py") else name.rpartition(":")
    return f"{Path(path).resolve()}{colon}{attribute}" if path.endswith(".py") else name


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _line(text: str) -> str:
    """Escape ``text`` for one line of the list."""
    return text if text.isprintable() else json.dumps(text)


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def yaml_word(value: Any) -> str:
    """Return the shortest text that ``--set`` reads as ``value``."""
    with contextlib.suppress(yaml.YAMLError):
        if isinstance(value, str) and parse_yaml(value) == value:
            return value
    return json.dumps(value, ensure_ascii=False)
