"""Compute the metrics of a checkpoint with other ranks, from a model divided as in training."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lockstep.data.arrays import by_row
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.evaluate import Evaluator, evaluate, evaluation
from lockstep.engine.optim.precision import Precision, cast
from lockstep.engine.rank_context import RankContext
from lockstep.engine.reopened import Reopened, as_restored
from lockstep.engine.resume import restore_weights, restoring
from lockstep.engine.state import TrainState
from lockstep.engine.strategies.build import divide
from lockstep.engine.task import Context, Datasets, Task
from lockstep.engine.trained import Callbacks, build_model
from lockstep.errors import DataError


def measure(reopened: Reopened) -> dict[str, Any]:
    """Compute ``samples`` and ``metrics`` of a checkpoint, the same on all ranks. Collective."""
    task = reopened.task
    subject = opened(reopened, task.evaluation_data)
    with evaluation(task, subject.model, Callbacks(task)):
        report = _reporter(len(subject.dataset), reopened.collectives)
        values = evaluate(subject.evaluator, subject.task, subject.model, subject.dataset, report=report)
    return {
        "samples": len(subject.dataset),
        "metrics": {f"{reopened.evaluation.split}_{name}": value for name, value in values.items()},
    }


def _reporter(total: int, collectives: Collectives) -> Callable[[int], None]:
    """Make a function that prints on rank 0 how many of ``total`` samples are done, at most once a second."""
    last = time.monotonic()

    def report(done: int) -> None:
        nonlocal last
        if collectives.is_main and time.monotonic() - last >= 1:
            last = time.monotonic()
            print(f"evaluating: {done:,} of {total:,} samples", file=sys.stderr, flush=True)

    return report


class Subject(NamedTuple):
    """A model with the weights of a checkpoint, on the device of a rank, and the data for it.

    ``task``: as evaluations ask it, where the model is divided.
    """

    model: nn.Module
    task: Task
    dataset: Any
    evaluator: Evaluator


def opened(reopened: Reopened, read: Callable[[Path], Any]) -> Subject:
    """Build the subject of an evaluation; ``read`` opens the path of ``evaluation.data``. Collective if divided."""
    request, task, datasets, snapshot, world, collectives, device = reopened
    plan = request.plan
    split = request.split
    source = request.data
    data = datasets or Datasets(None, test=by_row(read(source) if isinstance(source, Path) else source))
    if getattr(data, split, None) is None:
        splits = [name for name in ("val", "test") if getattr(data, name, None) is not None]
        raise DataError(
            f"this task has no {split} data",
            fix=f"choose --split {splits[0]}" if splits else f"return {split}= from Task.datasets()",
        )
    precision = Precision(plan.placement["precision"], device, 1.0)
    with restoring(f"the checkpoint of step {snapshot.step}"):
        task._lockstep_context = Context(TrainState.from_state_dict(snapshot.trainer["state"]))
    model = cast(build_model(task), plan.placement["precision"])
    evaluated = task
    if plan.sharded:
        divided = divide(RankContext(request.run, world, request.config, plan, device, collectives), task, model, data)
        evaluated = divided.strategy(task, precision).evaluating(task)
    else:
        model = model.to(device)
    restore_weights(task, model, snapshot, request.run.path)
    dataset = getattr(as_restored(task, request.config, data) if datasets is not None else data, split)
    return Subject(model, evaluated, dataset, Evaluator.of_plan(plan, collectives, device, precision, snapshot.step))
