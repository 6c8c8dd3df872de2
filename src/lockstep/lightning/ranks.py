"""Ranks of ``lockstep lightning``: started by Lockstep's launcher, each runs the same command.

``python -m lockstep.lightning.ranks RUN_FOLDER`` is one rank.
"""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle

from lockstep.config import resolve
from lockstep.errors import RankFailed
from lockstep.hardware.world import World
from lockstep.launch import elastic, failure
from lockstep.launch.temporary import temporary_folder
from lockstep.launch.worker import main
from lockstep.telemetry.rundir import RunDir, utc_now

CALL_FILE = "lightning.pkl"
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
    try:
        # By reference where a class can be imported, by value where it lives in a script or notebook.
        (folder.path / CALL_FILE).write_bytes(cloudpickle.dumps((cli_class, arguments, keeps)))
        code = elastic.launch(folder, ranks, worker_module="lockstep.lightning.ranks")
        if code in _STOPPED and folder.read().status in ("pending", "running"):
            folder.update(status="stopped", completed_at=utc_now())  # before training began, or without waiting
        if code == 0 or code in _STOPPED:
            return code
        report = failure.collect(folder)
        error = report.as_error() if report else RankFailed(f"the launcher ended with exit code {code}")
        folder.update(status="failed", completed_at=utc_now(), error=str(error))
        raise error
    finally:
        (folder.path / CALL_FILE).unlink(missing_ok=True)


def be_rank(run: RunDir, world: World) -> int:
    """What one rank does; returns its exit code."""
    cli_class, arguments, keeps = cloudpickle.loads((run.path / CALL_FILE).read_bytes())
    cli = cli_class(**arguments, run_dir=run if keeps else None)
    code: int = cli.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], be_rank))
