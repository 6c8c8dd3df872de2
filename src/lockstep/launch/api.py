"""Starting and resuming runs, for the command line and the library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.hardware import World, read_world
from lockstep.launch import run_claim
from lockstep.launch.engines import node
from lockstep.launch.meeting.membership import Team, meeting
from lockstep.launch.meeting.preparation import PlanRequest, Start, TrainRequest, begin_attempt, prepare_together
from lockstep.launch.prepare import settle
from lockstep.launch.rank import train_as_rank
from lockstep.launch.start import train_with_retries
from lockstep.launch.stop import stop as stop
from lockstep.rundir.folder import RunDir


def train(
    task: Task | type[Task] | str, overrides: Mapping[str, Any], *, resume: bool = False, accept_data: bool = False
) -> RunResult:
    """Train ``task`` with ``overrides``, nested settings that differ from the defaults; see :func:`lockstep.train`."""
    world = read_world(os.environ)
    built, whole = settle(task, overrides)
    request = TrainRequest(resume, overrides, isinstance(task, Task), accept_data)

    def prepare(team: Team, claim: ExitStack) -> Start:
        return prepare_together(team, built, whole, request, claim)

    if world.from_outside:
        return train_as_rank(world, whole, prepare)
    if whole.launch.nodes not in (None, "1"):
        return node.train_on_node(built, whole, request)
    with meeting(World(), whole) as team, ExitStack() as claim:
        return train_with_retries(team, prepare(team, claim))


def resume(
    run: RunDir,
    *,
    task: Task | type[Task] | None = None,
    devices: str | None = None,
    rescale_batch: bool = False,
    accept_data: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> RunResult:
    """Resume a run on ``devices``, with ``overrides`` of its settings, nested; see :meth:`lockstep.Run.resume`."""
    run_claim.refuse_running(run)
    config = run_claim.changed_config(run, overrides or {}, devices, task_is_given=task is not None)
    built = run_claim.task_again(run, config, task, is_named=True)
    request = PlanRequest(run, built, config, accept_data=accept_data, hold=not rescale_batch)
    with run_claim.claimed(run), meeting(World(), config) as team:
        return train_with_retries(team, begin_attempt(team, request))
