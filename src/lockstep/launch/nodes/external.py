"""Training where the number of ranks is given: ``torchrun``, ``srun``, or ``lockstep train --nodes`` on several nodes.

The ranks meet, agree on the run and who writes its folder, and rank 0 makes the plan for all.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence

import torch.distributed as dist

from lockstep.config import RunConfig
from lockstep.engine.attempt import run_attempt
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.hardware import World, parent_death
from lockstep.launch.failure.records import Restart
from lockstep.launch.failure.report import restarted
from lockstep.launch.health.watchdog import watched
from lockstep.launch.local.rank_output import rank_output
from lockstep.launch.local.signals import StopRequest
from lockstep.launch.nodes.membership import Team, join, meeting
from lockstep.launch.nodes.preparation import Request, Start, prepare_together
from lockstep.launch.nodes.replication import gather_logs
from lockstep.telemetry.sinks import RunFolderSink, standard_sinks


def train_as_rank(
    task: Task,
    config: RunConfig,
    world: World,
    request: Request,
    *,
    begun: Callable[[Start], None] = lambda start: None,
    restarts: Sequence[Restart] = (),
    stop: StopRequest | None = None,
) -> RunResult:
    """This process is one of ``world.size`` ranks; rank 0 makes the plan for all.

    Args:
        begun: called with what this rank trains before its first step.
        restarts: what this node's launcher recorded about starts before this one.
        stop: the process's stop request; ``None`` installs one.

    Raises:
        LockstepError: what is wrong, on the first rank of each node; SystemExit, with its exit code, on the others.
    """
    parent_death.die_with_parent(os.getppid())
    with meeting(world, config) as (team, store), contextlib.ExitStack() as claim:
        start = prepare_together(team, world, task, config, request, claim)
        begun(start)
        if store is not None and start.placement.backend == "nccl":
            join(store, "nccl", world, config.distributed.timeout_s, start.placement.devices, start.run.logs)
        timeout_s = start.config.launch.hang_timeout_s
        with contextlib.ExitStack() as training:
            if world.launcher != "--nodes":  # Lockstep's own launcher detects hangs; elsewhere the rank does
                training.enter_context(watched(start.run, world, store, timeout_s=timeout_s, keeps=start.keeps))
            result = _train(start, world, restarts, stop or training.enter_context(StopRequest()))
        if dist.is_initialized():
            gather_logs(Team(team.members, world, config.distributed.timeout_s), start.keeping)
        return result


def _train(start: Start, world: World, restarts: Sequence[Restart], stop: StopRequest) -> RunResult:
    run = start.run
    sink = standard_sinks(run, start.config, sys.stdout) if world.is_main else RunFolderSink(run)
    if restarts and start.keeps:
        sink.emit(restarted(restarts, start.attempt, start.step))
    with rank_output(run.logs, world.rank):
        return run_attempt(
            run,
            world,
            start.task,
            start.config,
            start.plan,
            attempt=start.attempt,
            sink=sink,
            stop_signal=lambda: stop.requested,
            datasets=start.datasets,
            keeper=start.keeps,
        )
