"""What the ranks of several processes decide together before they train: the run, its folder, devices and plan.

Rank 0 writes the run folder, and all nodes see it: they share a file system.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import open_datasets, prepare_data
from lockstep.errors import ConfigError
from lockstep.events import Restarted
from lockstep.hardware import Placement
from lockstep.launch import run_claim
from lockstep.launch.failure import records
from lockstep.launch.nodes.membership import OWN_SETTINGS, Team
from lockstep.launch.prepare import place, plan_for
from lockstep.planning import Plan
from lockstep.rundir.files import absolute, storing
from lockstep.rundir.folder import RunDir, new_run_id
from lockstep.telemetry.sinks import check_sinks


class Begun(NamedTuple):
    """What the ranks of this node trained before the agent started them again.

    ``restarts``: how many failures it has restarted them after. ``reason``: of the last one in one line, if known.
    """

    run: str
    restarts: int
    reason: str


@dataclass(frozen=True)
class TrainRequest:
    """What the user asked for on this node.

    ``resume``: the unfinished run in ``save_dir``, if there is one. ``given``: the settings that differ from the
    defaults. ``as_given``: the task is the caller's object, not made from a name or class. ``accept_data``: resume on
    other training data of the same length, too. ``begun``: of ranks that were started again.
    """

    resume: bool
    given: Mapping[str, Any]
    as_given: bool
    accept_data: bool = False
    begun: Begun | None = None


class Planned(NamedTuple):
    """What a plan is made of; ``accept_data`` as of :class:`TrainRequest`."""

    task: Task
    config: RunConfig
    placement: Placement
    datasets: Datasets
    accept_data: bool = False


@dataclass(frozen=True)
class Start:
    """What a rank trains: the same on all of them, except the devices and where the data are.

    ``datasets``: opened already; else the rank opens them. ``restarted``: what rank 0 reports, where the ranks were
    started again.
    """

    run: RunDir
    task: Task
    config: RunConfig
    datasets: Datasets | None
    plan: Plan
    attempt: int
    restarted: Restarted | None = None


class Found(NamedTuple):
    """A run that a node has found. ``step``: the last one that it had finished."""

    run_id: str
    step: int
    begun: Begun | None


def launched_start(team: Team, run: RunDir, task: Task, config: RunConfig, *, is_restart: bool) -> Start:
    """What the caller of Lockstep's launcher has planned; after a restart, from the latest checkpoint. Collective."""

    def begin() -> tuple[Plan, int, Restarted | None]:
        plan = run_claim.plan_of(run)
        if not is_restart:
            return plan, run.read().attempt, None
        edited = run.config_file.read_bytes()
        run.keep_config(config)
        if run.config_file.read_bytes() != edited:
            text = f"{run.config_file} was edited while the run trained; it is as it was: a restart keeps the settings"
            run_claim.warn(text)
        point = run_claim.resume_point(run, hold=True, report=run_claim.warn)
        step = point.step if point else 0
        attempt, restarts = run.begin_attempt(run.plan(), plan.placement, step), records.read_launcher(run).restarts
        return plan, attempt, records.restarted(restarts, attempt, step) if restarts else None

    begun = team.collectives.broadcast(team.together(begin, here=team.world.is_main))
    assert begun is not None
    plan, attempt, restarted = begun
    return Start(run, task, config, None, plan, attempt, restarted if team.world.is_main else None)


def prepare_together(
    team: Team, task: Task, config: RunConfig, request: TrainRequest, claim: contextlib.ExitStack
) -> Start:
    """Agree on the run and its plan, which rank 0 makes. Collective. ``claim`` holds that on a run that is resumed."""
    world = team.world
    run, run_id, found = _agree(team, config, request.resume, request.begun)
    if found:
        whole = team.together(lambda: run_claim.changed_config(run, request.given), here=world.is_main)
        shared, own = team.collectives.broadcast(whole), config
        assert shared is not None
        config = shared if team.me.node_rank == team.members[0].node_rank else with_own_settings(shared, own)
        task = run_claim.task_of_run(task, config, as_given=request.as_given)
        team.together(lambda: claim.enter_context(run_claim.claimed(run)), here=world.is_main)
    placement = place_together(team, config)
    _prepare_data(team, task, config)
    datasets = team.together(lambda: open_datasets(task, config))
    assert datasets is not None
    team.together(lambda: check_sinks(config, run.path), here=world.is_main)

    def begin(plan: Plan, step: int) -> int:
        if not found:
            run_claim.create_folder(config, run_id)
        return record_attempt(run, config, plan, step)

    what = Planned(task, config, placement, datasets, request.accept_data)
    plan, attempt, step = plan_together(team, run, what, begin, found=bool(found))
    restarted = _restarted(found, config.launch.max_restarts, attempt, step)
    return Start(run, task, config, datasets, plan, attempt, restarted if world.is_main else None)


def _restarted(found: Sequence[Found], allowed: int, attempt: int, step: int) -> Restarted | None:
    """The event of a restart, after which ``attempt`` resumes from the checkpoint of ``step``."""
    before = [one.begun for one in found if one.begun is not None]
    if not before:
        return None
    reason = next(filter(None, (one.reason for one in before)), "a node was lost, or joined")
    lost_steps = max(0, max(one.step for one in found) - step)
    return Restarted(max(1, *(one.restarts for one in before)), allowed, attempt, step, lost_steps, reason)


def agreed_folder(
    team: Team,
    config: RunConfig,
    create: Callable[[RunConfig, str], RunDir],
    *,
    resume: bool,
    claim: contextlib.ExitStack,
) -> tuple[RunDir, bool]:
    """The folder of a run before its plan is made, and whether it was found. Collective.

    ``create`` makes the folder of a new run with this id.
    """
    run, run_id, found = _agree(team, config, resume)
    is_main = team.me.rank == 0
    team.together(lambda: claim.enter_context(run_claim.claimed(run)), here=bool(found) and is_main)
    team.together(lambda: create(config, run_id), here=is_main and not found)
    return run, bool(found)


def _agree(team: Team, config: RunConfig, resume: bool, begun: Begun | None = None) -> tuple[RunDir, str, list[Found]]:
    """Find the run to resume, or name a new one; its folder, its id, and what the nodes have found. Collective.

    Raises :class:`UsageError`: the nodes found different runs, one that is still running, or see different folders.
    """
    begins = not any(team.collectives.all_gather(begun is not None))

    def look() -> Found | None:
        run = run_claim.existing_run(config, resume) if begins else begun and RunDir.open(Path(begun.run))
        if run is None:
            return None
        beat = run.progress()
        return Found(run.read().id, beat.step if beat else 0, begun)

    everywhere = team.collectives.all_gather(team.together(look, here=team.is_lead))
    found = {rank: one for rank, one in enumerate(everywhere) if one is not None}
    team.refuse_different(
        {rank: one.run_id for rank, one in found.items()},
        "have different runs",
        why="the ranks can resume only one",
        fix="name a --save-dir on storage that all nodes share",
    )
    new_id = team.collectives.broadcast(new_run_id(config.save_dir))
    run_id = next((one.run_id for one in found.values()), new_id)
    path = absolute(config.save_dir or config.runs_dir / run_id)
    for rank, sharing in enumerate(team.collectives.all_gather(lowest_sharing(team, path))):
        if sharing != 0:
            error = ConfigError(
                f"this node sees another folder as {path} than node {team.node_of(0)}",
                why="rank 0 writes the run folder, and every node reads it when it resumes",
                fix="name a --save-dir on storage that all nodes share",
            )
            team.end_if([*[None] * rank, error])
    return RunDir(path), run_id, list(found.values())


def lowest_sharing(team: Team, path: Path) -> int:
    """The lowest of the nodes' first ranks that has the same ``path`` as this rank's node. Collective.

    Each of them leaves a file beside ``path``, and looks whose files it finds there. The name is a new one, so that no
    network file system remembers that there is no such file.
    """
    if len(team.leads) == 1:
        return team.leads[0]
    token = team.collectives.broadcast(uuid.uuid4().hex)
    probes = {rank: path.with_name(f".{path.name}.{token}.{rank}") for rank in team.leads}

    def touch() -> None:
        probe = probes[team.me.rank]
        with storing(probe):
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()

    try:
        team.together(touch, here=team.is_lead)
        visible = next(rank for rank in team.leads if probes[rank].exists()) if team.is_lead else None
        lowest = team.collectives.all_gather(visible)
    finally:
        if team.is_lead:
            with contextlib.suppress(OSError):
                probes[team.me.rank].unlink()
    of_node = lowest[next(lead for lead in team.leads if team.members[lead].node_rank == team.me.node_rank)]
    assert of_node is not None, "the first rank of a node sees its own file"
    return of_node


def plan_together(
    team: Team,
    run: RunDir,
    what: Planned,
    begin: Callable[[Plan, int], int],
    change: Callable[[Plan], Plan] = lambda plan: plan,
    *,
    found: bool,
) -> tuple[Plan, int, int]:
    """The plan, which rank 0 makes, the number of the attempt, and the step that it resumes. Collective.

    ``begin`` records the attempt in the run folder; returns its number. ``found``: whether the run has been trained
    before.
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


def place_together(team: Team, config: RunConfig) -> Placement:
    """This node's placement, with the devices of all nodes in it. Collective."""
    placement = team.together(lambda: place(config, team.world))
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
