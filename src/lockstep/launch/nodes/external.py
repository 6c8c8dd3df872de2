"""Training where the number of ranks is given: ``torchrun``, ``srun``, or ``lockstep train --nodes`` on several nodes.

The ranks meet and agree on the run; rank 0 makes the plan for all, and writes the run folder, which all nodes see.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from lockstep.config import RunConfig
from lockstep.engine.attempt import run_attempt
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.events import Fanout
from lockstep.hardware import World, parent_death
from lockstep.launch.failure.watchdog import watched
from lockstep.launch.local.worker import Rank
from lockstep.launch.nodes.membership import join, meeting
from lockstep.launch.nodes.preparation import Start, TrainRequest, prepare_together
from lockstep.launch.process.rank_log import rank_output
from lockstep.launch.process.signals import StopRequest
from lockstep.telemetry.sinks import standard_sinks


def train_as_rank(
    task: Task,
    config: RunConfig,
    world: World,
    request: TrainRequest,
    launched: Rank | None = None,
    begun: Callable[[Start], None] = lambda start: None,
) -> RunResult:
    """This process is one of ``world.size`` ranks; rank 0 makes the plan for all.

    ``launched``: as what the agent of `lockstep train --nodes` has started it. ``begun`` is called with what this rank
    trains. Raises :class:`LockstepError` on the first rank of each node, SystemExit with its code on the others.
    """
    parent_death.die_with_parent(os.getppid())
    with meeting(world, config) as (team, store), contextlib.ExitStack() as claim:
        start = prepare_together(team, world, task, config, request, claim)
        run, what = start.run, start.what
        begun(start)
        if store is not None and what.placement.backend == "nccl":
            join(store, "nccl", world, config.distributed.timeout_s, what.placement.devices, run.logs)
        with contextlib.ExitStack() as training:
            limits, logs = what.config.launch, run.logs if launched is not None else None
            training.enter_context(watched(run, world, store, timeout_s=limits.hang_timeout_s, launcher=logs))
            stop = launched.stop if launched is not None else training.enter_context(StopRequest())
            sink = standard_sinks(run, what.config, sys.stdout) if world.is_main else Fanout()
            if start.restarted is not None:
                sink.emit(start.restarted)
            training.enter_context(rank_output(run.logs, world.rank))
            how: dict[str, Any] = {"attempt": start.attempt, "sink": sink, "datasets": what.datasets}
            how["stop_signal"] = lambda: stop.requested
            return run_attempt(run, world, what.task, what.config, start.plan, **how)
