"""The temporary folder of a node whose ranks an attached engine starts: it names the run that they have begun."""

from __future__ import annotations

from pathlib import Path

from lockstep.launch.failure.report import failure_line
from lockstep.rundir.files import read_json, write_json
from lockstep.rundir.folder import RunDir

_BEGUN = "begun.json"


def note_run(folder: RunDir, run: RunDir) -> None:
    """Record the run that the ranks of this node have begun."""
    write_json(folder.path / _BEGUN, str(run.path))


def begun_run(folder: RunDir) -> RunDir:
    """Return the run that the ranks of this node have begun; else the node's folder."""
    path = folder.path / _BEGUN
    return RunDir(Path(read_json(path))) if path.exists() else folder


def failure_reason(folder: RunDir) -> str:
    """Return the first line of the failure of the run that the ranks have begun; empty without one."""
    return failure_line(begun_run(folder))
