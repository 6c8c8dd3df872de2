"""The temporary folder of a node whose ranks an attached engine starts: what its processes leave for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.launch.failure.report import error_of, failure_line
from lockstep.rundir.folder import RunDir, read_json, write_json

#: The run that the ranks have begun.
_BEGUN = "begun.json"
#: The error of the ranks.
ERROR = "error.json"
#: The result of the first rank.
RESULT = "result.json"


def content_of(folder: RunDir, name: str) -> Any:
    """The content of a JSON file of the folder; ``None`` without one."""
    path = folder.path / name
    return read_json(path) if path.exists() else None


def raise_error(folder: RunDir) -> None:
    """Raise the error that an engine has left in the folder."""
    error = content_of(folder, ERROR)
    if error is not None:
        raise error_of(error)


def note_run(folder: RunDir, run: RunDir) -> None:
    """Record the run that the ranks of this node have begun."""
    write_json(folder.path / _BEGUN, str(run.path))


def begun_run(folder: RunDir) -> RunDir:
    """The run that the ranks of this node have begun; else the node's folder."""
    path = content_of(folder, _BEGUN)
    return folder if path is None else RunDir(Path(path))


def failure_reason(folder: RunDir) -> str:
    """The first line of the failure of the run that the ranks have begun; empty without one."""
    return failure_line(begun_run(folder))
