"""Finding runs: all in a folder, or the one that a user named; reading files that may be damaged."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import RunFolderError
from lockstep.telemetry.files import absolute, is_folder, names_in
from lockstep.telemetry.records import RunRecord
from lockstep.telemetry.rundir import RunDir

T = TypeVar("T")


def or_else(read: Callable[[], T], otherwise: Any) -> T | Any:
    """What ``read`` returns of a run folder; ``otherwise`` if the file is missing or damaged."""
    try:
        return read()
    except RunFolderError:
        return otherwise


def one_line(error: RunFolderError) -> str:
    """What cannot be read, and why."""
    return f"{error.what}: {error.why}" if error.why else error.what


def read_runs(root: Path, report: Callable[[str], None] | None = None) -> list[tuple[RunDir, RunRecord]]:
    """Runs in the folders directly below ``root`` with their records, newest first.

    Folders without a run are skipped; for a run that cannot be read, ``report`` receives the reason.
    """
    found = []
    root = absolute(root)
    for name in names_in(root):
        run = RunDir(root / name)
        if name.startswith(".") or not os.path.lexists(run.run_file):
            continue
        try:
            found.append((run, run.read()))
        except RunFolderError as error:
            if report is not None:
                report(one_line(error))
    return sorted(found, key=lambda pair: (pair[1].created_at, pair[1].id), reverse=True)


def find_run(ref: str, runs_dir: Path) -> RunDir:
    """The run that ``ref`` names: a folder, an id, the beginning of an id (with or without ``run-``), or ``last``.

    Raises:
        RunFolderError: no run has this name, or several have.
    """
    if not ref or "\0" in ref:
        raise RunFolderError("no run was named", fix="give a folder, an id, the beginning of an id, or `last`")
    here = Path(ref)
    if os.sep in ref or os.path.lexists(here / "run.json"):
        return RunDir.open(here)
    runs = read_runs(runs_dir)
    if ref == "last" and runs:
        return runs[0][0]
    exact = [run for run, record in runs if ref in {record.id, run.path.name}]
    near = exact or [run for run, record in runs if record.id.startswith((ref, f"run-{ref}"))]
    if len(near) == 1:
        return near[0]
    if near:
        raise RunFolderError(
            f"{ref!r} means several runs: {', '.join(run.path.name for run in near[:5])}",
            fix="give more of the id, or the folder",
        )
    if is_folder(here):
        return RunDir.open(here)
    ids = [record.id for _, record in runs]
    close = difflib.get_close_matches(ref, ids, n=1)
    why = f"{runs_dir} holds {len(runs)} runs" if runs else f"{runs_dir} holds no runs"
    listed = f"`lockstep runs` lists the runs of {runs_dir}; name one elsewhere (--save-dir) by its folder"
    raise RunFolderError(
        f"there is no run {ref!r}",
        why=why,
        fix=f"did you mean {close[0]}?" if close else listed,
    )
