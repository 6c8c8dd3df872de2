"""Which classes of the user's own a file may name: those that this user has trained by name on this machine.

A configuration or a run folder that came from elsewhere could name any class, and importing a class runs its
module. So a class path in a file is imported only when it has been given on a command line or to
:func:`lockstep.train` before; a list of these is kept in the user's state folder (XDG Base Directory Specification).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import TaskError


def class_paths(task: Mapping[str, Any]) -> set[str]:
    """The class paths in the section ``task`` of a configuration: its name, a data module's, and ``optimizer``.

    Files are named by their whole paths; built-in tasks have none. Sections of LightningCLI, which may name anything
    anywhere, and a checkpoint file that may run code count as a whole, by their hash.
    """
    named = (task.get("name"), task.get("datamodule"), task.get("optimizer"))
    found = {_whole(name) for name in named if isinstance(name, str) and ":" in name}
    if task.get("cli") or task.get("weights_only") is False:
        content = json.dumps([task.get("cli"), task.get("weights_only"), str(task.get("ckpt_path"))], sort_keys=True)
        found.add(f"sha256:{hashlib.sha256(content.encode()).hexdigest()}")
    return found


def named_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``task`` of a configuration, and as ``optimizer`` the name of its optimizer."""
    task, optimizer = config.get("task"), config.get("optimizer")
    section = dict(task) if isinstance(task, Mapping) else {}
    return {**section, "optimizer": optimizer.get("name")} if isinstance(optimizer, Mapping) else section


def remember(paths: Iterable[str]) -> None:
    """Note that the user has named these. Where that cannot be written down, they will have to be named again."""
    new = sorted(set(paths) - known())
    with contextlib.suppress(OSError):
        if new:
            _file().parent.mkdir(parents=True, exist_ok=True)
            with _file().open("a", encoding="utf-8") as file:
                file.write("".join(f"{path}\n" for path in new))


def require_known(task: Mapping[str, Any], source: str, given: Collection[str] = ()) -> None:
    """Refuse to import what only a file names."""
    unknown = sorted(class_paths(task) - known() - set(given))
    if unknown:
        raise TaskError(
            f"{source} names the class {unknown[0]}, which you have not trained on this machine",
            why="importing it runs its code, and a file from elsewhere could name anything",
            fix=f"if you trust it, say so once: {_naming(task)}",
        )


def _naming(task: Mapping[str, Any]) -> str:
    """The command that names the classes of ``task``, and starts nothing."""
    name, data = task.get("name"), task.get("datamodule")
    if task.get("cli"):
        return "lockstep lightning fit, with the sections that task.cli has in its config.yaml"
    command = ["lockstep", "plan", _whole(str(name))]
    if isinstance(data, str) and ":" in data:
        command += ["--set", f"task.datamodule={_whole(data)}"]
    if isinstance(task.get("optimizer"), str) and ":" in task["optimizer"]:
        command += ["--set", f"optimizer.name={task['optimizer']}"]
    return shlex.join(command)


def _whole(name: str) -> str:
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).resolve()}:{attribute}" if place.endswith(".py") else name


def known() -> set[str]:
    try:
        return set(_file().read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return set()


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lockstep" / "known-tasks"
