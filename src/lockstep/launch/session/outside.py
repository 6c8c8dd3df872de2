"""Joining a session on ranks that ``torchrun`` or ``srun`` started: they agree on the run and its folders."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, NamedTuple

from lockstep.config import RunConfig
from lockstep.hardware import Placement, World
from lockstep.launch.health.watchdog import watched
from lockstep.launch.local.environment import JOB
from lockstep.launch.local.rank_output import rank_output
from lockstep.launch.nodes.membership import Team, join
from lockstep.launch.nodes.preparation import place_together
from lockstep.launch.nodes.replication import share_run
from lockstep.launch.nodes.run_owner import agree, mark_job
from lockstep.launch.run_claim import claimed
from lockstep.launch.session.record import new_folder
from lockstep.telemetry.rundir import RunDir


class Agreed(NamedTuple):
    """The run of all ranks, as this one sees it; see :class:`lockstep.launch.session.join.Joined`."""

    run: RunDir
    placement: Placement
    found: bool
    keeps: bool


def agree_outside(
    team: Team, store: Any, world: World, config: RunConfig, *, resume: bool, ending: ExitStack
) -> Agreed:
    """Find or make the run, and watch for hangs from here on, as no launcher does. Collective."""
    job = os.environ.get(JOB)
    placement = place_together(team, config, world)
    keeping = agree(team, config, resume=resume, job=job)
    share_run(team, keeping, config)
    run, keeps, found = RunDir(keeping.path), world.rank in keeping.keepers, bool(keeping.found)
    team.together(lambda: ending.enter_context(claimed(run)), here=found and keeps)
    team.together(lambda: new_folder(config, keeping.run_id), here=keeps and not found)
    team.together(lambda: mark_job(run, job), here=keeps)
    if placement.backend == "nccl" and store is not None:
        join(store, "nccl", world, config.distributed.timeout_s, placement.devices)
    ending.enter_context(watched(run, world, store, timeout_s=config.launch.hang_timeout_s, keeps=keeps))
    ending.enter_context(rank_output(run.logs, world.rank))
    return Agreed(run, placement, found, keeps)
