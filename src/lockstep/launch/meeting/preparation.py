"""Decisions that precede the training: the run, its folder, the devices and the plan. Collective.

Every start takes this way: the ranks of ``torchrun``, ``srun`` or an engine together; the caller of local ranks, alone,
for them. Rank 0 writes the run folder, which all nodes share.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import RunConfig
from lockstep.engine.resume import resume_point
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import open_datasets, prepare_data
from lockstep.errors import ConfigError
from lockstep.events import Restarted
from lockstep.hardware import Placement
from lockstep.launch import run_claim
from lockstep.launch.meeting.membership import Team
from lockstep.launch.prepare import RunInputs, placement_of, plan_for, with_precision
from lockstep.planning import Plan
from lockstep.rundir.files import absolute, storing
from lockstep.rundir.folder import RunDir, new_run_id
from lockstep.rundir.heartbeat import announce
from lockstep.telemetry.sinks import check_sinks


class PreviousStart(NamedTuple):
    """The run that this node's ranks trained before they were started again.

    ``restarts``: number of failures after which it has. ``reason``: of the last one in one line, if known.
    """

    run: str
    restarts: int
    reason: str


@dataclass(frozen=True)
class TrainRequest:
    """The user's request on this node.

    Attributes:
        resume: train the unfinished run in ``save_dir``, if there is one.
        given: settings that differ from the defaults.
        as_given: the task is the caller's object, not made from a name or class.
        accept_data: resume on other training data of the same length, too.
        previous: of ranks that were started again.
    """

    resume: bool
    given: Mapping[str, Any]
    as_given: bool
    accept_data: bool = False
    previous: PreviousStart | None = None


@dataclass(frozen=True)
class PlanRequest:
    """An attempt whose plan is still to be made.

    Attributes:
        new_id: of a run whose folder is still to be made.
        is_resume: the run has been trained before.
        accept_data: as in :class:`TrainRequest`.
        hold: keep the global batch of a run that is resumed.
        change: completes the plan before it is recorded.
    """

    run: RunDir
    task: Task
    config: RunConfig
    new_id: str | None = None
    is_resume: bool = True
    accept_data: bool = False
    hold: bool = True
    change: Callable[[Plan], Plan] = lambda plan: plan


@dataclass(frozen=True)
class Start:
    """An attempt that is about to begin: the same on all ranks, except the devices and the data's folder.

    Attributes:
        datasets: opened already; ``None``: the rank opens them.
        step: of the checkpoint that the attempt resumes; 0 without one.
        restarted: the event that rank 0 reports, where the ranks were started again.
    """

    run: RunDir
    task: Task
    config: RunConfig
    datasets: Datasets | None
    plan: Plan
    attempt: int
    step: int
    restarted: Restarted | None = None


class NodeRun(NamedTuple):
    """A run that a node has found. ``step``: the last one that it had finished."""

    run_id: str
    step: int
    previous: PreviousStart | None


class AgreedRun(NamedTuple):
    """The run that all ranks train.

    Attributes:
        node_runs: the runs that the nodes have found; empty for a new run, whose folder is still to be made.
    """

    run: RunDir
    run_id: str
    node_runs: Sequence[NodeRun]

    @property
    def is_resume(self) -> bool:
        return bool(self.node_runs)


def prepare_together(
    team: Team, task: Task, config: RunConfig, request: TrainRequest, claim: contextlib.ExitStack
) -> Start:
    """Agree on a new run or one to resume, and begin an attempt. Collective.

    ``claim`` gets the claim on a run that is resumed.
    """
    agreed = agree_on_run(team, config, resume=request.resume, claim=claim, previous=request.previous)
    run = agreed.run
    if not agreed.is_resume:
        return begin_attempt(team, PlanRequest(run, task, config, new_id=agreed.run_id, is_resume=False))
    changed = team.together(lambda: run_claim.changed_config(run, request.given))  # with this node's devices
    assert changed is not None
    config = changed
    task = run_claim.task_of_run(task, config, as_given=request.as_given)
    start = begin_attempt(team, PlanRequest(run, task, config, accept_data=request.accept_data))
    restarted = _restarted(agreed.node_runs, config.launch.max_restarts, start)
    return replace(start, restarted=restarted if team.world.is_main else None)


def begin_attempt(team: Team, request: PlanRequest) -> Start:
    """Place the ranks, open the data, make the plan and record the attempt. Collective."""
    task = request.task
    team.together(lambda: check_sinks(request.config, request.run.path), here=team.world.is_main)
    placement = place_together(team, request.config)
    config = with_precision(request.config, placement)
    _prepare_data(team, task, config)
    datasets = team.together(lambda: open_datasets(task, config))
    assert datasets is not None
    return plan_together(team, replace(request, config=config), placement, datasets)


def _restarted(node_runs: Sequence[NodeRun], allowed: int, start: Start) -> Restarted | None:
    """Return the event of a restart, after which ``start`` resumes; ``None``: the ranks start for the first time."""
    previous = [node.previous for node in node_runs if node.previous is not None]
    if not previous:
        return None
    reason = next(filter(None, (node.reason for node in previous)), "a node was lost, or joined")
    lost_steps = max(0, max(node.step for node in node_runs) - start.step)
    number = max(1, *(node.restarts for node in previous))
    return Restarted(number, allowed, start.attempt, start.step, lost_steps, reason)


def agree_on_run(
    team: Team,
    config: RunConfig,
    *,
    resume: bool,
    claim: contextlib.ExitStack,
    previous: PreviousStart | None = None,
) -> AgreedRun:
    """Find the run to resume, and claim it, or name a new one. Collective.

    ``claim`` gets the claim.

    Raises :class:`UsageError`: the nodes found different runs, one that is still running, or see different folders.
    """
    is_first_start = not any(team.collectives.all_gather(previous is not None))

    def look() -> NodeRun | None:
        run = run_claim.existing_run(config, resume) if is_first_start else previous and RunDir.open(Path(previous.run))
        if run is None:
            return None
        beat = run.progress()
        return NodeRun(run.read().id, beat.step if beat else 0, previous)

    everywhere = team.collectives.all_gather(team.together(look, here=team.is_lead))
    runs_by_rank = {rank: node for rank, node in enumerate(everywhere) if node is not None}
    team.refuse_different(
        {rank: node.run_id for rank, node in runs_by_rank.items()},
        "have different runs",
        why="the ranks can resume only one",
        fix="name a --save-dir on storage that all nodes share",
    )
    new_id = team.collectives.broadcast(new_run_id(config.save_dir))
    node_runs = list(runs_by_rank.values())
    run_id = node_runs[0].run_id if node_runs else new_id
    run = RunDir(absolute(config.save_dir or config.runs_dir / run_id))
    _refuse_other_folders(team, run.path)
    if node_runs:
        team.together(lambda: claim.enter_context(run_claim.claimed(run)), here=team.world.is_main)
    return AgreedRun(run, run_id, node_runs)


def _refuse_other_folders(team: Team, path: Path) -> None:
    """End every rank where a node sees another folder at ``path`` than rank 0. Collective.

    Rank 0 leaves a file beside ``path``. Its name is a new one, so that no network file system remembers that there is
    no such file.
    """
    if len(team.leads) == 1:
        return
    probe = path.with_name(f".{path.name}.{team.collectives.broadcast(uuid.uuid4().hex)}")

    def touch() -> None:
        with storing(probe):
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()

    try:
        team.together(touch, here=team.world.is_main)
        for rank, is_shared in enumerate(team.collectives.all_gather(probe.exists())):
            if not is_shared:
                error = ConfigError(
                    f"this node sees another folder as {path} than node {team.node_of(0)}",
                    why="rank 0 writes the run folder, and every node reads it when it resumes",
                    fix="name a --save-dir on storage that all nodes share",
                )
                team.end_if([*[None] * rank, error])
    finally:
        if team.world.is_main:
            probe.unlink(missing_ok=True)


def plan_together(team: Team, request: PlanRequest, placement: Placement, datasets: Datasets) -> Start:
    """Make the plan on rank 0, for all ranks, and record the attempt in the run folder. Collective."""
    run = request.run
    config = request.config
    inputs: RunInputs | None = None

    def make() -> tuple[Plan, int, int]:
        nonlocal inputs
        point = None
        warn = run_claim.warn
        if request.is_resume:
            point = resume_point(run, hold=request.hold, accept_data=request.accept_data, report=warn)
        inputs = plan_for(request.task, config, placement, datasets, point)
        plan = request.change(inputs.plan)
        step = point.step if point else 0
        if request.new_id is not None:
            run_claim.create_folder(config, request.new_id)
        else:
            run.keep_config(config)
        return plan, run.begin_attempt(plan.as_dict(), plan.placement, step), step

    made = team.collectives.broadcast(team.together(make, here=team.world.is_main))
    assert made is not None
    plan, attempt, step = made
    local = plan.model_copy(update={"placement": {**plan.placement, "devices": list(placement.devices)}})
    return Start(run, request.task, config, inputs.datasets if inputs else datasets, local, attempt, step)


def begin_again(start: Start, number: int, reason: str) -> Start:
    """Begin the next attempt after failure ``number``, at the latest checkpoint, with the same plan."""
    run = start.run
    plan = start.plan
    beat = run.progress()
    last_step = beat.step if beat else 0
    announce(run.heartbeat_file, last_step, handing_over=True)  # the run is not lost
    if run.keep_config(start.config):
        run_claim.warn(
            f"{run.config_file} was edited while the run trained; it is as it was: a restart keeps the settings"
        )
    point = resume_point(run, hold=True, report=run_claim.warn)
    step = point.step if point else 0
    attempt = run.begin_attempt(plan.as_dict(), plan.placement, step)
    allowed = start.config.launch.max_restarts
    event = Restarted(number, allowed, attempt, step, max(0, last_step - step), reason)
    return replace(start, attempt=attempt, step=step, restarted=event)


def place_together(team: Team, config: RunConfig) -> Placement:
    """Place this node, with the devices of all nodes. Collective."""
    placement = team.together(lambda: placement_of(config, team.world))
    assert placement is not None
    if len(team.leads) == 1:
        return placement
    everywhere = team.collectives.all_gather(placement)
    for name in ("accelerator", "strategy", "backend", "precision"):
        team.refuse_different(
            {rank: getattr(other, name) for rank, other in enumerate(everywhere)},
            f"differ in {name}",
            why="one step computes on all of them, in the same way",
            fix="name the devices on each node with --devices, of one kind",
        )
    return replace(placement, by_node={team.node_of(lead): everywhere[lead].devices for lead in team.leads})


def _prepare_data(team: Team, task: Task, config: RunConfig) -> None:
    """Call ``prepare()`` once on each node, on rank 0's first: nodes may share the data's folder. Collective."""
    for goes_first in (True, False):
        with team.collectives.main_first(per_node=True):
            if team.is_lead and team.world.is_main is goes_first:
                prepare_data(task, config)
