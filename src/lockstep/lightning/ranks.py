"""Ranks of ``lockstep lightning``: started by Lockstep's launcher, each runs the same command."""

from __future__ import annotations

import sys
from typing import Any

from lockstep.config import resolve
from lockstep.hardware.world import World
from lockstep.launch.local.on_ranks import call_on_ranks, failure_of
from lockstep.launch.temporary import temporary_folder
from lockstep.telemetry.rundir import RunDir, utc_now

_STOPPED = (130, 143)


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
    code = call_on_ranks(folder, ranks, _be_rank, cli_class, arguments, keeps)
    if code in _STOPPED and folder.read().status in ("pending", "running"):
        folder.update(status="stopped", completed_at=utc_now())  # before training began, or without waiting
    if code == 0 or code in _STOPPED:
        return code
    error = failure_of(folder, f"the launcher ended with exit code {code}")
    folder.update(status="failed", completed_at=utc_now(), error=str(error))
    raise error


def _be_rank(run: RunDir, world: World, cli_class: type[Any], arguments: dict[str, Any], keeps: bool) -> int:
    code: int = cli_class(**arguments, run_dir=run if keeps else None).exit_code
    return code
