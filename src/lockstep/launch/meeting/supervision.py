"""What watches a rank: its launcher, or the rank itself where no launcher of Lockstep sees all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from lockstep.config import RunConfig
from lockstep.launch.failure.watchdog import stops_within, watched
from lockstep.launch.local.worker import Rank
from lockstep.launch.meeting.membership import Team, use_backend
from lockstep.launch.process.rank_log import rank_output
from lockstep.launch.process.signals import StopRequest
from lockstep.rundir.folder import RunDir


def supervise(
    team: Team,
    run: RunDir,
    config: RunConfig,
    placement: Mapping[str, Any],
    launched: Rank | None,
    ending: ExitStack,
) -> StopRequest:
    """Make the process group of ``placement``, and watch this rank where no launcher does; the stop requests of it.

    Collective. ``ending`` ends the watch.
    """
    world = team.world
    limits = config.launch
    use_backend(team, config, placement, run.logs)
    stop = launched.stop if launched is not None else ending.enter_context(StopRequest())
    if world.from_outside:
        logs = None if launched is None else run.logs
        ending.enter_context(watched(run, world, team.store, timeout_s=limits.hang_timeout_s, launcher=logs))
        ending.enter_context(rank_output(run.logs, world.rank))
    elif launched is None and world.size == 1:
        ending.enter_context(stops_within(stop, limits.stop_grace_s))
    return stop
