"""Training where the number of ranks is given: ``torchrun``, ``srun``, or ``lockstep train --nodes`` on several nodes.

The ranks meet, agree on the run and who keeps its folder, and rank 0 makes the plan for all.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.attempt import run_attempt
from lockstep.engine.process.determinism import rank_device
from lockstep.engine.result import RunResult
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import open_datasets, prepare_data
from lockstep.errors import ConfigError
from lockstep.events import Fanout
from lockstep.hardware import parent_death
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.launch.failure.records import Restart
from lockstep.launch.failure.report import restarted
from lockstep.launch.health.watchdog import watched
from lockstep.launch.local.environment import JOB
from lockstep.launch.local.rank_output import rank_output
from lockstep.launch.local.signals import StopRequest
from lockstep.launch.nodes.membership import OWN_SETTINGS, Team, join, meeting
from lockstep.launch.nodes.replication import gather_logs, share_run
from lockstep.launch.nodes.run_owner import Keeping, agree, lowest_sharing, mark_job
from lockstep.launch.prepare import place, plan_for, resume_point
from lockstep.launch.run_claim import (
    changed_config,
    claimed,
    create_folder,
    keep_config,
    overrides_of,
    task_of_run,
    warn,
)
from lockstep.plan import Plan
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.sinks import RunFolderSink, check_sinks, standard_sinks


@dataclass(frozen=True)
class Start:
    """What a rank trains: the same on all of them, but for the folder, the devices and the data's place.

    ``step``: from which it goes on.
    """

    run: RunDir
    task: Task
    config: RunConfig
    plan: Plan
    attempt: int
    step: int
    datasets: Datasets


def train_as_rank(
    task: Task,
    config: RunConfig,
    world: World,
    *,
    resume: bool,
    given: RunConfig | Mapping[str, Any] | None,
    as_given: bool,
    accept_data: bool = False,
    begun: Callable[[RunDir, bool], None] = lambda run, keeps: None,
    restarts: Sequence[Restart] = (),
) -> RunResult:
    """This process is one of ``world.size`` ranks; rank 0 makes the plan for all.

    Args:
        begun: told the run before its first step, and whether this rank writes its folder.
        restarts: what this node's launcher has seen of starts before this one.

    Raises:
        LockstepError: what is wrong, on the first rank of each node; SystemExit, with its exit code, on the others.
    """
    parent_death.die_with_parent(os.getppid())
    timeout_s = config.distributed.timeout_s
    with meeting(world, config) as (team, store), contextlib.ExitStack() as claim:
        job = os.environ.get(JOB)
        keeping = agree(team, config, resume=resume, job=job)
        share_run(team, keeping, config, timeout_s)
        config = _config_of_run(team, keeping, config, given)
        if keeping.found:
            task = task_of_run(task, config, as_given=as_given)
            team.together(
                lambda: claim.enter_context(claimed(RunDir(keeping.path))), here=world.rank in keeping.keepers
            )
        placement = _place(team, config, world)
        start = _prepare(team, keeping, task, config, placement, job, accept_data)
        begun(start.run, world.rank in keeping.keepers)
        device = rank_device(placement.devices, world)
        if store is not None and placement.backend == "nccl":
            join(store, "nccl", world, timeout_s, device=device)
        with _watched(keeping, start, world, store):
            result = _train(keeping, start, world, restarts)
        if dist.is_initialized():
            gather_logs(Team(team.members, world, timeout_s), keeping)
        return result


def _config_of_run(
    team: Team, keeping: Keeping, config: RunConfig, given: RunConfig | Mapping[str, Any] | None
) -> RunConfig:
    """The run's configuration, with this node's own settings in it. Collective."""
    if not keeping.found:
        return config
    run = RunDir(keeping.path)
    whole = team.together(lambda: changed_config(run, overrides_of(given)), here=team.me.rank == 0)
    whole = team.collectives.broadcast(whole)
    assert whole is not None
    return whole if team.me.node_rank == team.members[0].node_rank else with_own_settings(whole, config)


def with_own_settings(shared: RunConfig, own: RunConfig) -> RunConfig:
    """``shared`` but for what each node decides by itself, where ``own`` has a value for it."""
    result, mine = shared.model_dump(mode="json"), own.model_dump(mode="json")
    for key in OWN_SETTINGS:
        section, _, name = key.rpartition(".")
        value = (mine[section] if section else mine)[name]
        if value is not None:
            result = merge(result, {section: {name: value}} if section else {name: value})
    return RunConfig.model_validate(result)


def _place(team: Team, config: RunConfig, world: World) -> Placement:
    """This node's placement, with the devices of all nodes in it. Collective."""
    placement = team.together(lambda: place(config, world))
    assert placement is not None
    if len(team.leads) == 1:
        return placement
    everywhere = team.collectives.all_gather(placement)
    for what in ("accelerator", "strategy", "backend", "precision"):
        values = {getattr(other, what): team.node_of(rank) for rank, other in reversed(list(enumerate(everywhere)))}
        if len(values) > 1:
            error = ConfigError(
                f"the nodes differ in {what}: {', '.join(f'{value} on {node}' for value, node in values.items())}",
                why="one step computes on all of them, in the same way",
                fix="name the devices on each node with --devices, of one kind",
            )
            team.end_if([error])
    return replace(placement, by_node={team.node_of(lead): everywhere[lead].devices for lead in team.leads})


def _prepare(
    team: Team,
    keeping: Keeping,
    task: Task,
    config: RunConfig,
    placement: Placement,
    job: str | None,
    accept_data: bool,
) -> Start:
    """Data, plan and folders. Collective."""
    _prepare_data(team, task, config)
    datasets = team.together(lambda: open_datasets(task, config))
    assert datasets is not None
    run = RunDir(keeping.path)

    def lay_down() -> tuple[Plan, int, int]:
        return _lay_down(keeping, task, config, placement, datasets, job, accept_data=accept_data)

    planned = team.together(lay_down, here=team.me.rank == 0)
    planned = team.collectives.broadcast(planned)
    assert planned is not None
    plan, attempt, step = planned
    plan = plan.model_copy(update={"placement": {**plan.placement, "devices": list(placement.devices)}})
    keeps_too = team.me.rank in keeping.keepers and team.me.rank != 0
    team.together(lambda: _keep_too(keeping, config, plan, step, job), here=keeps_too)
    return Start(run, task, config, plan, attempt, step, datasets)


def _prepare_data(team: Team, task: Task, config: RunConfig) -> None:
    """``prepare()`` once on each node; where nodes share the data's folder, one of them goes first. Collective."""
    folder = config.data.data_dir
    goes_first = folder is None or lowest_sharing(team, folder / "data") == team.me.rank
    for turn in (True, False):
        with team.collectives.main_first(per_node=True):
            if team.is_lead and goes_first is turn:
                prepare_data(task, config)


def _lay_down(
    keeping: Keeping,
    task: Task,
    config: RunConfig,
    placement: Placement,
    datasets: Datasets,
    job: str | None,
    *,
    accept_data: bool,
) -> tuple[Plan, int, int]:
    """On rank 0: the plan, the attempt's number, and the step from which it goes on."""
    run = RunDir(keeping.path)
    check_sinks(config, keeping.path)
    point = resume_point(run, hold=True, accept_data=accept_data, report=warn) if keeping.found else None
    prepared = plan_for(task, config, placement, datasets, point)
    if keeping.found:
        keep_config(run, config)
    else:
        run = create_folder(config, keeping.run_id)
    mark_job(run, job)
    step = point.step if point else 0
    return prepared.plan, run.begin_attempt(prepared.plan.as_dict(), placement.as_dict(), step), step


def _keep_too(keeping: Keeping, config: RunConfig, plan: Plan, step: int, job: str | None) -> None:
    """On another keeper: a run folder of its own for the same attempt."""
    run = RunDir(keeping.path)
    if keeping.found:
        keep_config(run, config)
    else:
        run = create_folder(config, keeping.run_id)
    mark_job(run, job)
    run.begin_attempt(plan.as_dict(), plan.placement, step)


def _watched(
    keeping: Keeping, start: Start, world: World, store: Store | None
) -> contextlib.AbstractContextManager[None]:
    """Lockstep's own launcher looks for hangs; elsewhere the rank does."""
    if world.launcher == "--nodes":
        return contextlib.nullcontext()
    timeout_s = start.config.launch.hang_timeout_s
    return watched(start.run, world, store, timeout_s=timeout_s, keeps=world.rank in keeping.keepers)


def _train(keeping: Keeping, start: Start, world: World, restarts: Sequence[Restart]) -> RunResult:
    run = start.run
    main = world.is_main
    sink = standard_sinks(run, start.config, sys.stdout) if main else Fanout(essential=[RunFolderSink(run)])
    if restarts and world.rank in keeping.keepers:
        sink.emit(restarted(restarts, start.attempt, start.step))
    with StopRequest() as stop_request, rank_output(run.logs, world.rank):
        return run_attempt(
            run,
            world,
            start.task,
            start.config,
            start.plan,
            attempt=start.attempt,
            sink=sink,
            stop_signal=lambda: stop_request.requested,
            datasets=start.datasets,
            keeper=world.rank in keeping.keepers,
        )
