"""Finding runs: those in a folder, and the one that a word means; reading files that may be damaged."""

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
    """What ``read`` returns of a run folder; ``otherwise`` where it is not there or damaged: that hides no run."""
    try:
        return read()
    except RunFolderError:
        return otherwise


def planned_epochs(run: RunDir) -> int | None:
    """How many epochs the newest plan has, if there is one."""
    epochs = or_else(run.plan, {}).get("epochs")
    return epochs if isinstance(epochs, int) else None


def list_runs(root: Path, report: Callable[[str], None] | None = None) -> list[RunDir]:
    """Runs in the folders right under ``root``, newest first.

    Folders that hold no run are passed over; of a run that cannot be read, ``report`` hears why.
    """
    return [run for run, _ in _runs_and_records(Path(root), report)]


def _runs_and_records(root: Path, report: Callable[[str], None] | None = None) -> list[tuple[RunDir, RunRecord]]:
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
                report(f"{error.what}: {error.why}")
    return sorted(found, key=lambda pair: (pair[1].created_at, pair[1].id), reverse=True)


def find_run(ref: str, runs_dir: Path) -> RunDir:
    """The run that ``ref`` means: a folder, an id, the beginning of one id, or ``last``.

    The beginning may leave out ``run-``. Raises :class:`RunFolderError` when there is no such run,
    or several.
    """
    if not ref or "\0" in ref:
        raise RunFolderError("no run was named", fix="give a folder, an id, the beginning of an id, or `last`")
    here = Path(ref)
    if os.sep in ref or os.path.lexists(here / "run.json"):
        return RunDir.open(here)
    runs = _runs_and_records(runs_dir)
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
    raise RunFolderError(
        f"there is no run {ref!r}",
        why=why,
        fix=f"did you mean {close[0]}?" if close else "`lockstep runs` lists the runs",
    )
