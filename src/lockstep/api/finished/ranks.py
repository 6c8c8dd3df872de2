"""Calls on a run that is opened again: on one device in this process, on several on a rank for each.

The ranks are started in a temporary folder: that of the run is only read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.engine.reopened import Evaluation, Reopened, reopen
from lockstep.engine.runtime import rank_device, runtime
from lockstep.engine.task import Task
from lockstep.hardware import World
from lockstep.launch.local.on_ranks import RankLimits, run_on_ranks
from lockstep.launch.local.worker import Rank
from lockstep.launch.meeting.membership import group
from lockstep.rundir.folder import RunDir
from lockstep.tasks.registry import pack_task

#: How long a rank may take to end after a stop: it has nothing to save.
STOP_GRACE_S = 5.0

#: The computation of each rank; its result is the same on all of them.
Compute = Callable[[Reopened], dict[str, Any]]


def compute(function: Compute, evaluation: Evaluation, task: Task) -> dict[str, Any]:
    """Call ``function`` on a rank for each device: on one device in this process.

    Raises:
        LockstepError: that of the rank that failed. KeyboardInterrupt: a stop was requested.
    """
    config = evaluation.config
    plan = evaluation.plan
    ranks = int(plan.placement["world_size"])
    if ranks == 1:
        return _compute_as(World(), function, evaluation, task, evaluation.run.logs)
    with TemporaryDirectory(prefix="lockstep-evaluate-") as path:
        results: list[dict[str, Any]] = run_on_ranks(
            _on_rank,
            function,
            evaluation,
            pack_task(task, config),
            folder=RunDir(Path(path)),
            ranks=ranks,
            limits=RankLimits(threads=plan.threads, stop_grace_s=STOP_GRACE_S),
        )
        return results[0]


def _on_rank(rank: Rank, function: Compute, evaluation: Evaluation, make_task: Callable[[], Task]) -> dict[str, Any]:
    return _compute_as(rank.world, function, evaluation, make_task(), rank.folder.logs)


def _compute_as(world: World, function: Compute, evaluation: Evaluation, task: Task, logs: Path) -> dict[str, Any]:
    """Call ``function`` as the rank that ``world`` says."""
    plan = evaluation.plan
    device = rank_device(tuple(plan.placement["devices"]), world)
    with (
        group(world, evaluation.config, plan.placement, logs) as team,
        runtime(plan, device, detect_anomaly=False, ranks=world.size),
    ):
        return function(reopen(evaluation, task, world, team.collectives))
