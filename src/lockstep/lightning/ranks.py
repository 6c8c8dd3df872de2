"""Ranks of ``lockstep lightning``: started by Lockstep's launcher, each runs the same command."""

from __future__ import annotations

import sys
from typing import Any

from lockstep.config import resolve
from lockstep.errors import LockstepError
from lockstep.launch.local.on_ranks import RanksStopped, run_on_ranks, temporary_folder
from lockstep.launch.local.worker import Rank
from lockstep.telemetry.rundir import RunDir, utc_now


def run_in_ranks(run: RunDir | None, ranks: int, cli_class: type[Any], arguments: dict[str, Any]) -> int:
    """Let ``ranks`` processes run ``cli_class(**arguments)``; returns the exit code of all.

    Args:
        run: the run folder of a fit; ``None`` uses a temporary one.

    Raises:
        LockstepError: a rank failed; which one and why.
    """
    if run is not None:
        return _run(run, ranks, cli_class, arguments, keeps=True)
    with temporary_folder("lockstep-lightning-") as path:
        folder = RunDir.create(path / "run", resolve({}), run_id="run-00000000", command=sys.argv)
        return _run(folder, ranks, cli_class, arguments, keeps=False)


def _run(folder: RunDir, ranks: int, cli_class: type[Any], arguments: dict[str, Any], *, keeps: bool) -> int:
    try:
        code: int = max(run_on_ranks(_be_rank, cli_class, arguments, keeps, folder=folder, ranks=ranks, redirect=False))
    except RanksStopped as stopped:
        code = 0 if folder.read().status == "completed" else stopped.exit_code
    except LockstepError as error:
        folder.update(status="failed", completed_at=utc_now(), error=str(error))
        raise
    if code and folder.read().status in ("pending", "running"):
        folder.update(status="stopped", completed_at=utc_now())  # before training began, or without waiting
    return code


def _be_rank(rank: Rank, cli_class: type[Any], arguments: dict[str, Any], keeps: bool) -> int:
    code: int = cli_class(**arguments, run_dir=rank.folder if keeps else None).exit_code
    return code
