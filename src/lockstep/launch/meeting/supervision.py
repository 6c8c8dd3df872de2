"""What watches a rank that trains: its watchdog and, where no launcher of Lockstep does, its stop requests and log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lockstep.config import RunConfig
from lockstep.launch.failure import records
from lockstep.launch.failure.watchdog import watched
from lockstep.launch.local.worker import Rank
from lockstep.launch.meeting.membership import Team, use_backend
from lockstep.launch.process.rank_log import rank_output
from lockstep.launch.process.signals import StopRequest
from lockstep.rundir.folder import RunDir


@dataclass(frozen=True)
class Supervision:
    """The watch over a rank: its stop requests; ``on_error`` is called with an error before that is recorded."""

    stop: StopRequest
    on_error: Callable[[BaseException], None] = lambda error: None


def supervise(
    team: Team,
    run: RunDir,
    config: RunConfig,
    placement: Mapping[str, Any],
    launched: Rank | None,
    ending: ExitStack,
) -> Supervision:
    """Make the process group of ``placement``, and watch this rank.

    Collective. ``ending`` ends the watch. ``launched``: of a rank that Lockstep's launcher has started.
    """
    world = team.world
    limits = config.launch
    use_backend(team, config, placement, run.logs)
    stop = launched.stop if launched is not None else ending.enter_context(StopRequest())
    if launched is None and world.is_main:
        with contextlib.suppress(OSError):  # of an earlier attempt on another number of ranks
            records.clear(run.logs)
    if launched is None and not world.from_outside:
        return Supervision(stop)
    record = run if launched is None else None
    watch = watched(run.logs, world, team.store, timeout_s=limits.hang_timeout_s, run=record)
    end_if_hung = ending.enter_context(watch)
    if world.from_outside:
        ending.enter_context(rank_output(run.logs, world.rank))
    return Supervision(stop, end_if_hung)
