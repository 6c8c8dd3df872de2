"""What the ranks of several processes decide together before they train: the run, its folders, devices and plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import open_datasets, prepare_data
from lockstep.hardware import Placement, World
from lockstep.launch import run_claim
from lockstep.launch.nodes.membership import OWN_SETTINGS, Team
from lockstep.launch.nodes.run_owner import Keeping, agree, lowest_sharing, share_run
from lockstep.launch.prepare import place, plan_for
from lockstep.planning import Plan
from lockstep.rundir.folder import RunDir
from lockstep.telemetry.sinks import check_sinks


@dataclass(frozen=True)
class TrainRequest:
    """What the user asked for on this node.

    ``resume``: the unfinished run in ``save_dir``, if there is one. ``given``: the settings that differ from the
    defaults. ``as_given``: the task is the caller's object, not made from a name or class. ``accept_data``: resume on
    other training data of the same length, too. ``begun``: the run that the ranks of this node trained before.
    """

    resume: bool
    given: Mapping[str, Any]
    as_given: bool
    accept_data: bool = False
    begun: str | None = None


class Planned(NamedTuple):
    """What a plan is made of; ``accept_data`` as of :class:`TrainRequest`."""

    task: Task
    config: RunConfig
    placement: Placement
    datasets: Datasets
    accept_data: bool = False


@dataclass(frozen=True)
class Start:
    """What a rank trains: the same on all of them, except the folder, the devices and where the data are.

    ``step``: of the checkpoint that the attempt resumes; 0 without one. ``keeps``: whether this rank writes its folder.
    """

    keeping: Keeping
    run: RunDir
    what: Planned
    plan: Plan
    attempt: int
    step: int
    keeps: bool


def prepare_together(
    team: Team, world: World, task: Task, config: RunConfig, request: TrainRequest, claim: contextlib.ExitStack
) -> Start:
    """Agree on the run and its plan, which rank 0 makes. Collective. ``claim`` holds that on a run that is resumed."""
    keeping, run, keeps = _agreed(team, config, request.resume, request.begun)
    found = bool(keeping.found)
    if found:
        whole = team.together(lambda: run_claim.changed_config(run, request.given), here=team.me.rank == 0)
        shared, own = team.collectives.broadcast(whole), config
        assert shared is not None
        config = shared if team.me.node_rank == team.members[0].node_rank else with_own_settings(shared, own)
        task = run_claim.task_of_run(task, config, as_given=request.as_given)
        team.together(lambda: claim.enter_context(run_claim.claimed(run)), here=keeps)
    placement = place_together(team, config, world)
    _prepare_data(team, task, config)
    datasets = team.together(lambda: open_datasets(task, config))
    assert datasets is not None
    team.together(lambda: check_sinks(config, keeping.path), here=world.is_main)

    def begin(plan: Plan, step: int) -> int:
        if not found:
            run_claim.create_folder(config, keeping.run_id)
        return record_attempt(run, config, plan, step)

    what = Planned(task, config, placement, datasets, request.accept_data)
    return Start(keeping, run, what, *plan_together(team, run, what, begin, found=found, keeps=keeps), keeps)


def _agreed(team: Team, config: RunConfig, resume: bool, begun: str | None = None) -> tuple[Keeping, RunDir, bool]:
    """Which run all ranks train, its folder here, and whether this rank writes it. Collective."""
    keeping = agree(team, config, resume=resume, begun=begun)
    share_run(team, keeping, config)
    return keeping, RunDir(keeping.path), team.me.rank in keeping.keepers


def agreed_folder(
    team: Team,
    config: RunConfig,
    create: Callable[[RunConfig, str], RunDir],
    *,
    resume: bool,
    claim: contextlib.ExitStack,
) -> tuple[RunDir, bool, bool]:
    """The folder of a run before its plan is made; whether it was found, and whether this rank writes it. Collective.

    ``create`` makes the folder of a new run with this id.
    """
    keeping, run, keeps = _agreed(team, config, resume)
    found = bool(keeping.found)
    team.together(lambda: claim.enter_context(run_claim.claimed(run)), here=found and keeps)
    team.together(lambda: create(config, keeping.run_id), here=keeps and not found)
    return run, found, keeps


def plan_together(
    team: Team,
    run: RunDir,
    what: Planned,
    begin: Callable[[Plan, int], int],
    change: Callable[[Plan], Plan] = lambda plan: plan,
    *,
    found: bool,
    keeps: bool,
) -> tuple[Plan, int, int]:
    """The plan, which rank 0 makes, the number of the attempt, and the step that it resumes. Collective.

    ``begin`` records the attempt in this rank's run folder, where it ``keeps`` one; returns its number. ``found``:
    whether the run has been trained before.
    """

    def plan_it() -> tuple[Plan, int, int]:
        point, warn = None, run_claim.warn
        if found:
            point = run_claim.resume_point(run, hold=True, accept_data=what.accept_data, report=warn)
        plan, step = change(plan_for(*what[:4], point).plan), point.step if point else 0
        return plan, begin(plan, step), step

    made = team.collectives.broadcast(team.together(plan_it, here=team.me.rank == 0))
    assert made is not None
    plan, attempt, step = made
    own = plan.model_copy(update={"placement": {**plan.placement, "devices": list(what.placement.devices)}})
    team.together(lambda: begin(own, step), here=keeps and team.me.rank != 0)
    return own, attempt, step


def record_attempt(run: RunDir, config: RunConfig, plan: Plan, step: int) -> int:
    """Begin an attempt in the run folder, with its configuration; its number."""
    run_claim.keep_config(run, config)
    return run.begin_attempt(plan.as_dict(), plan.placement, step)


def with_own_settings(shared: RunConfig, own: RunConfig) -> RunConfig:
    """``shared``, with the settings that each node decides from ``own``, if it has a value for them."""
    result, mine = shared.model_dump(mode="json"), own.model_dump(mode="json")
    for key in OWN_SETTINGS:
        section, _, name = key.rpartition(".")
        value = (mine[section] if section else mine)[name]
        if value is not None:
            result = merge(result, {section: {name: value}} if section else {name: value})
    return RunConfig.model_validate(result)


def place_together(team: Team, config: RunConfig, world: World) -> Placement:
    """This node's placement, with the devices of all nodes in it. Collective."""
    placement = team.together(lambda: place(config, world))
    assert placement is not None
    if len(team.leads) == 1:
        return placement
    everywhere = team.collectives.all_gather(placement)
    for what in ("accelerator", "strategy", "backend", "precision"):
        team.refuse_different(
            {rank: getattr(other, what) for rank, other in enumerate(everywhere)},
            f"differ in {what}",
            why="one step computes on all of them, in the same way",
            fix="name the devices on each node with --devices, of one kind",
        )
    return replace(placement, by_node={team.node_of(lead): everywhere[lead].devices for lead in team.leads})


def _prepare_data(team: Team, task: Task, config: RunConfig) -> None:
    """``prepare()`` once on each node; where nodes share the data's folder, one of them goes first. Collective."""
    folder = config.data.data_dir
    goes_first = folder is None or lowest_sharing(team, folder / "data") == team.me.rank
    for turn in (True, False):
        with team.collectives.main_first(per_node=True):
            if team.is_lead and goes_first is turn:
                prepare_data(task, config)
