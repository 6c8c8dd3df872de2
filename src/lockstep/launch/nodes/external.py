"""Training where the number of ranks is given: ``torchrun``, ``srun``, or ``lockstep train --nodes`` on several nodes.

The ranks meet, agree on the run and who writes its folder, and rank 0 makes the plan for all.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lockstep.config import RunConfig
from lockstep.engine.attempt import run_attempt
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.hardware import World, parent_death
from lockstep.launch.failure.records import read_launcher, restarted
from lockstep.launch.failure.watchdog import watched
from lockstep.launch.local.worker import Rank
from lockstep.launch.nodes.membership import Team, join, meeting
from lockstep.launch.nodes.preparation import Start, TrainRequest, prepare_together
from lockstep.launch.nodes.run_owner import gather_logs
from lockstep.launch.process.rank_log import rank_output
from lockstep.launch.process.signals import StopRequest
from lockstep.telemetry.sinks import RunFolderSink, standard_sinks


def train_as_rank(
    task: Task,
    config: RunConfig,
    world: World,
    request: TrainRequest,
    launched: Rank | None = None,
    begun: Callable[[Start], None] = lambda start: None,
) -> RunResult:
    """This process is one of ``world.size`` ranks; rank 0 makes the plan for all.

    ``launched``: as what Lockstep's launcher of this node has started it. ``begun`` is called with what this rank
    trains. Raises :class:`LockstepError` on the first rank of each node, SystemExit with its code on the others.
    """
    parent_death.die_with_parent(os.getppid())
    with meeting(world, config) as (team, store), contextlib.ExitStack() as claim:
        start = prepare_together(team, world, task, config, request, claim)
        run, what, keeps = start.run, start.what, start.keeps
        begun(start)
        if store is not None and what.placement.backend == "nccl":
            join(store, "nccl", world, config.distributed.timeout_s, what.placement.devices, run.logs)
        with contextlib.ExitStack() as training:
            limits = what.config.launch
            how: dict[str, Any] = {"timeout_s": limits.hang_timeout_s, "keeps": keeps}
            how["launcher"] = launched.folder.logs if launched is not None else None
            training.enter_context(watched(run, world, store, **how))
            stop = launched.stop if launched is not None else training.enter_context(StopRequest())
            sink = standard_sinks(run, what.config, sys.stdout) if world.is_main else RunFolderSink(run)
            restarts = read_launcher(launched.folder).restarts if launched is not None else ()
            if restarts and keeps:
                sink.emit(restarted(restarts, start.attempt, start.step))
            training.enter_context(rank_output(run.logs, world.rank))
            how = {"attempt": start.attempt, "sink": sink, "keeper": keeps, "datasets": what.datasets}
            how["stop_signal"] = lambda: stop.requested
            result = run_attempt(run, world, what.task, what.config, start.plan, **how)
        if dist.is_initialized():
            gather_logs(Team(team.members, world, config.distributed.timeout_s), start.keeping)
        return result
