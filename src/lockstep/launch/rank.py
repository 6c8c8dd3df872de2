"""One way into a rank, whatever started its process: Lockstep's launcher, ``torchrun``, ``srun``, or an engine.

A rank reads its world from the environment, meets the others, takes the plan that rank 0 makes or has, and trains.
Sessions join in the same way (:mod:`lockstep.api.session_join`), and make the plan later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

from lockstep.config import RunConfig
from lockstep.engine.attempt import run_attempt
from lockstep.engine.rank_context import Attempt
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.events import Fanout, Restarted
from lockstep.hardware import World
from lockstep.launch.local.worker import Rank
from lockstep.launch.meeting.membership import Team, meeting
from lockstep.launch.meeting.preparation import Start
from lockstep.launch.meeting.supervision import supervise
from lockstep.launch.process.signals import Stopped
from lockstep.planning import Plan
from lockstep.telemetry.sinks import standard_sinks


def train_as_rank(
    world: World,
    config: RunConfig,
    prepare: Callable[[Team, ExitStack], Start],
    launched: Rank | None = None,
) -> RunResult:
    """Train as one of ``world.size`` ranks, this process.

    Args:
        prepare: collective; returns the attempt of this rank. It may leave a claim on the run on the stack.
        launched: of a process that Lockstep has started as a rank.

    Raises:
        LockstepError: on the first rank of each node, and on every rank that Lockstep has started.
        SystemExit: with that error's exit code, on the others.
    """
    with meeting(world, config) as team, ExitStack() as ending:
        return train(team, prepare(team, ending), ending, launched)


def train(team: Team, start: Start, ending: ExitStack, launched: Rank | None = None) -> RunResult:
    """Train a prepared attempt as a rank of ``team``; ``ending`` ends the supervision. Collective."""
    supervision = supervise(team, start.run, start.config, start.plan.placement, launched, ending)
    sink = standard_sinks(start.run, start.config, sys.stdout) if team.world.is_main else Fanout()
    if start.restarted is not None:
        sink.emit(start.restarted)
    attempt = Attempt(
        run_dir=start.run,
        world=team.world,
        config=start.config,
        plan=start.plan,
        number=start.attempt,
        sink=sink,
        stop_signal=lambda: supervision.stop.requested,
        on_error=supervision.on_error,
    )
    return run_attempt(attempt, start.task, start.datasets)


def train_as_launched(
    rank: Rank, config: RunConfig, plan: Plan, attempt: int, restarted: Restarted | None, make_task: Callable[[], Task]
) -> None:
    """Train as a rank of Lockstep's launcher, by the plan of its caller. Raises :class:`Stopped` after a stop."""
    start = Start(rank.folder, make_task(), config, None, plan, attempt, step=0, restarted=restarted)
    code = train_as_rank(rank.world, config, lambda team, ending: start, rank).exit_code
    if code:
        raise Stopped(code)
