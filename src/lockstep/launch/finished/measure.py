"""The metrics of a checkpoint, computed by one rank with the others."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.checkpoint.store import Snapshot
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.evaluate import evaluate, evaluation
from lockstep.engine.lightning.module_task import ModuleTask
from lockstep.engine.optim.precision import Precision
from lockstep.engine.process.runtime import rank_device
from lockstep.engine.resume import load_weights, restoring
from lockstep.engine.state import TrainState
from lockstep.engine.strategies.build import divide
from lockstep.engine.strategies.partition import Undivided
from lockstep.engine.task import Context, Datasets, Task
from lockstep.engine.trained import Callbacks, build_model
from lockstep.errors import DataError, UnsupportedError
from lockstep.hardware import World
from lockstep.launch.finished.reopen import Evaluation, as_restored, restore


def refuse_several(task: Task, devices: Sequence[str]) -> None:
    """Raise :class:`UnsupportedError` for a ``LightningModule`` on several devices."""
    if isinstance(task, ModuleTask):
        raise UnsupportedError(
            f"a LightningModule is evaluated on one device, not on {', '.join(devices)}",
            why="it logs means over its batches, which several ranks would divide differently",
            fix=f"name one: --devices {devices[0]}",
        )


#: What each rank computes, from the task, its data, a checkpoint and the other ranks: the same on all of them.
Compute = Callable[[Evaluation, Task, Datasets | None, Snapshot, World, Collectives], dict[str, Any]]


def measure(
    wanted: Evaluation,
    task: Task,
    datasets: Datasets | None,
    snapshot: Snapshot,
    world: World,
    collectives: Collectives,
) -> dict[str, Any]:
    """``samples`` and ``metrics`` of a checkpoint, the same on all ranks. Collective.

    Args:
        datasets: the run's; ``None``: the file ``wanted.data``.
    """
    config, plan, split = wanted.config, wanted.plan, wanted.split
    device = rank_device(tuple(plan.placement["devices"]), world)
    if isinstance(task, ModuleTask) and datasets is not None:
        from lockstep.engine.lightning.evaluate import evaluate_module

        load_weights(task.module, snapshot.model, wanted.run.path)
        metrics, samples = evaluate_module(task, split, device, plan.placement["precision"], config.training.seed)
        return {"samples": samples, "metrics": metrics}
    subject = opened(wanted, task, datasets, snapshot, world, collectives, task.evaluation_data)
    with evaluation(task, subject.model, Callbacks(task)):
        values = evaluate(
            subject.evaluated,
            subject.model,
            subject.dataset,
            collectives,
            batch_size=plan.eval_batch_size,
            device=device,
            precision=subject.precision,
            loader=plan.loader,
            seed=plan.seed,
            step=snapshot.step,
            ghosts=plan.sharded,
            report=_reporter(len(subject.dataset), collectives),
        )
    return {"samples": len(subject.dataset), "metrics": {f"{split}_{name}": value for name, value in values.items()}}


def _reporter(total: int, collectives: Collectives) -> Callable[[int], None]:
    """Prints on rank 0 how many of ``total`` samples are done, at most once a second."""
    last = time.monotonic()

    def report(done: int) -> None:
        nonlocal last
        if collectives.is_main and time.monotonic() - last >= 1:
            last = time.monotonic()
            print(f"evaluating: {done:,} of {total:,} samples", file=sys.stderr, flush=True)

    return report


class Subject(NamedTuple):
    """A model with the weights of a checkpoint, on the device of a rank, and the data for it.

    ``evaluated``: the task as evaluations ask it, where the model is divided.
    """

    model: nn.Module
    evaluated: Task
    dataset: Any
    device: torch.device
    precision: Precision


def opened(
    wanted: Evaluation,
    task: Task,
    datasets: Datasets | None,
    snapshot: Snapshot,
    world: World,
    collectives: Collectives,
    read: Callable[[Path], Any],
) -> Subject:
    """What to evaluate. Collective where the model is divided.

    Args:
        read: opens ``wanted.data``, where that is given instead of ``datasets``.
    """
    config, plan, split = wanted.config, wanted.plan, wanted.split
    device = rank_device(tuple(plan.placement["devices"]), world)
    data = datasets or Datasets(None, test=read(Path(str(wanted.data))))
    if getattr(data, split, None) is None:
        raise DataError(f"this task has no {split} data", fix="choose --split val or --split test")
    precision = Precision(plan.placement["precision"], device, 1.0)
    with restoring(f"the checkpoint of step {snapshot.step}"):
        task.context = Context(TrainState.from_state_dict(snapshot.trainer["state"]))
    model, evaluated = build_model(task), task
    if plan.sharded:
        divided = divide(Undivided(task, model, config, plan, data, device, world, collectives))
        evaluated = divided.strategy(task, precision, plan, world).evaluating(task)
    else:
        model = model.to(device)
    restore(task, model, snapshot, wanted.run.path)
    dataset = getattr(as_restored(task, config, data) if datasets is not None else data, split)
    return Subject(model, evaluated, dataset, device, precision)
