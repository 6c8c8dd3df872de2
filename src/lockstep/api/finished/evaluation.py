"""The metrics of a checkpoint, on any devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.api.finished.ranks import compute
from lockstep.api.finished.reopen import find_step, plan_of
from lockstep.config import RunConfig, resolve
from lockstep.engine.reopened import Evaluation, Reopened
from lockstep.engine.runner import runner_of
from lockstep.engine.task import Task
from lockstep.hardware import World
from lockstep.hardware.detect import usable_cores
from lockstep.launch.prepare import placement_of
from lockstep.launch.run_claim import task_again, warn
from lockstep.rundir.folder import RunDir

#: The parts of a run's data.
SPLITS = ("train", "val", "test")


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
    split, source = source_of(data, SPLITS)
    built = task_again(run, run.config(), task)
    step = find_step(run, checkpoint)
    evaluation = evaluation_on(run, devices, split, step, source)
    placement = evaluation.plan.placement
    if placement["world_size"] > 1:
        runner_of(built).check_evaluation(placement["devices"])
    metrics = compute(_measured, evaluation, built)
    samples = {"split": split} if source is None else {"data": str(data) if isinstance(source, Path) else "a data set"}
    return {"run": run.read().id, **samples, "step": step, **metrics}


def source_of(data: Any, splits: Sequence[str]) -> tuple[str, Any]:
    """Return the split that ``data`` names, and ``None``; else ``test``, and the file's path or the data set."""
    if isinstance(data, str) and data in splits:
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
    placement = placement_of(config, World())
    if plan.sharded and placement.world_size > 1 and not whole:  # one device has nothing to divide
        config = _config_on(run.config(), devices, plan.strategy.name)
        placement = placement_of(config, World())
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
