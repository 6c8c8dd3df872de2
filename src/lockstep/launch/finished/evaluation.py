"""The metrics of a checkpoint: on one device in this process, on several on a rank for each.

The ranks are started in a temporary folder: that of the run is only read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.config import RunConfig, resolve
from lockstep.engine.reopened import Evaluation, Reopened, reopen
from lockstep.engine.runner import runner_of
from lockstep.engine.runtime import rank_device, runtime
from lockstep.engine.task import Task
from lockstep.hardware import World
from lockstep.hardware.detect import usable_cores
from lockstep.launch.finished.reopen import find_step
from lockstep.launch.local.on_ranks import RankLimits, run_on_ranks
from lockstep.launch.local.worker import Rank
from lockstep.launch.meeting.membership import group
from lockstep.launch.prepare import place
from lockstep.launch.run_claim import plan_of, task_again, warn
from lockstep.rundir.folder import RunDir
from lockstep.tasks.registry import pack_task

#: The parts of a run's data.
SPLITS = ("train", "val", "test")
#: How long a rank may take to end after a stop: it has nothing to save.
STOP_GRACE_S = 5.0

#: The computation of each rank; its result is the same on all of them.
Compute = Callable[[Reopened], dict[str, Any]]


def evaluate(
    run: RunDir,
    data: Any = "test",
    *,
    devices: str | None = None,
    checkpoint: str | int = "best",
    task: Task | type[Task] | None = None,
) -> dict[str, Any]:
    """Evaluate one checkpoint on ``data``, the same on any number of devices; see :meth:`lockstep.Run.evaluate`.

    Each sample counts once. Every rank has the whole model; of a run with ``strategy: fsdp`` its shard.
    """
    split, source = source_of(data)
    built = task_again(run, run.config(), task)
    step = find_step(run, checkpoint)
    metrics = compute(_measured, evaluation_on(run, devices, split, step, source), built)
    samples = {"split": split} if source is None else {"data": str(data) if isinstance(source, Path) else "a data set"}
    return {"run": run.read().id, **samples, "step": step, **metrics}


def source_of(data: Any) -> tuple[str, Any]:
    """Return the split that ``data`` names, and ``None``; else ``test``, and the file's path or the data set."""
    if isinstance(data, str) and data in SPLITS:
        return data, None
    return "test", Path(data).resolve() if isinstance(data, str | os.PathLike) else data


def _measured(reopened: Reopened) -> dict[str, Any]:
    return runner_of(reopened.task).evaluate(reopened)


def evaluation_on(
    run: RunDir, devices: str | None, split: str, step: int, data: Any, *, whole: bool = False
) -> Evaluation:
    """Describe an evaluation, with the run's configuration and plan on ``devices``.

    ``whole``: every rank has the whole model, also of a run with ``strategy: fsdp``.
    """
    plan = plan_of(run)
    config = _config_on(run.config(), devices, "auto")
    placement = place(config, World())
    if plan.sharded and placement.world_size > 1 and not whole:  # one device has nothing to divide
        config = _config_on(run.config(), devices, plan.strategy.name)
        placement = place(config, World())
    for note in placement.notes:
        warn(note.text)
    cores = usable_cores() // placement.world_size
    workers = {name: min(getattr(plan.loader, name), cores) for name in ("num_workers", "most_workers")}
    threads = replace(plan.decisions["threads"], value=min(plan.threads, max(1, cores)))
    changes = {
        "decisions": {**plan.decisions, "threads": threads},
        "placement": placement.as_dict(),
        "loader": plan.loader.model_copy(update=workers),
    }
    return Evaluation(run, config, plan.model_copy(update=changes), split, step, data)


def _config_on(config: RunConfig, devices: str | None, strategy: str) -> RunConfig:
    """Return the run's configuration on other devices, with the backend that they need."""
    selected: Any = devices
    if selected is None and config.hardware.selected_devices not in (None, ("all",)):
        selected = config.hardware.selected_devices[:1]
    hardware = {"selected_devices": selected, "strategy": strategy}
    return resolve(config.model_dump(mode="json"), {"hardware": hardware, "distributed": {"backend": "auto"}})


def compute(function: Compute, evaluation: Evaluation, task: Task) -> dict[str, Any]:
    """Call ``function`` on a rank for each device: on one device in this process.

    Raises:
        LockstepError: that of the rank that failed. KeyboardInterrupt: a stop was requested.
    """
    config = evaluation.config
    plan = evaluation.plan
    ranks = int(plan.placement["world_size"])
    if ranks == 1:
        with group(World(), config, plan.placement, evaluation.run.logs) as team:
            return function(reopen(evaluation, task, team.world, team.collectives))
    runner_of(task).check_evaluation(plan.placement["devices"])
    with TemporaryDirectory(prefix="lockstep-evaluate-") as path:
        folder = RunDir.create(Path(path, "ranks"), config, run_id=evaluation.run.read().id, command=sys.argv)
        results: list[dict[str, Any]] = run_on_ranks(
            _on_rank,
            function,
            evaluation,
            pack_task(task, config),
            folder=folder,
            ranks=ranks,
            limits=RankLimits(threads=plan.threads, stop_grace_s=STOP_GRACE_S),
        )
        return results[0]


def _on_rank(rank: Rank, function: Compute, evaluation: Evaluation, make_task: Callable[[], Task]) -> dict[str, Any]:
    """Evaluate as one of the ranks; the result is the same on all of them."""
    config = evaluation.config
    plan = evaluation.plan
    world = rank.world
    task = make_task()
    device = rank_device(tuple(plan.placement["devices"]), world)
    with (
        group(world, config, plan.placement, rank.folder.logs) as team,
        runtime(plan, device, detect_anomaly=False, ranks=world.size),
    ):
        return function(reopen(evaluation, task, world, team.collectives))
