"""Predictions of a model for a data set, in index order: of a task's checkpoint, and in a session's loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from lockstep._compat.torch import tree_map
from lockstep.data.reader import Collate
from lockstep.data.requests import BatchRequest
from lockstep.engine.distributed.staging import to_host
from lockstep.engine.evaluate import Evaluator, check_rows, has_rows
from lockstep.engine.task import Task
from lockstep.engine.trained import bare
from lockstep.engine.training_data import collate_of
from lockstep.errors import TaskError
from lockstep.rundir.heartbeat import Activity, pulse

Row = dict[str, Any]


def predictions(
    evaluator: Evaluator, task: Task, model: nn.Module, dataset: Any, *, with_loss: bool = False
) -> Iterator[list[list[Row]]]:
    """Yield the rows of as many chunks as there are ranks, on rank 0. Collective.

    Where ``dataset`` has ``names``, rows have that of their sample as ``file``; ``with_loss``: and its ``loss``.
    """
    names = getattr(dataset, "names", None)

    def rows_of(batch: Any, request: BatchRequest) -> list[Row]:
        columns = to_host(task.predict(bare(model), batch))
        rows = table_rows(columns, range(request.start, request.stop), "the task's predict()")
        if with_loss:
            losses = _sample_losses(task, model, batch, request.size)
            rows = [{**row, "loss": loss} for row, loss in zip(rows, losses, strict=True)]
        return rows if names is None else [{**row, "file": names[row["index"]]} for row in rows]

    return evaluator.rounds(model, dataset, collate_of(task), rows_of)


def _sample_losses(task: Task, model: nn.Module, batch: Any, samples: int) -> list[float]:
    """Compute the mean loss of each sample; one of a task that sums is computed on its sample alone."""
    try:
        total, count = task.loss(bare(model), batch)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise TaskError(
            "the loss of each sample cannot be computed",
            why=f"loss() of {type(task).__name__}: {type(error).__name__}: {error}",
            fix="give data with targets, as the loss takes them; or predict without --loss (loss=True)",
        ) from error
    if total.dim() == 1 and len(total) == samples:
        return [float(value) for value in total.float().tolist()]
    if samples == 1:
        return [float(total.sum()) / float(count) if count else math.nan]

    def sample_of(value: Any, position: int) -> Any:
        has_samples = isinstance(value, Tensor) and value.dim() and len(value) == samples
        return value[position : position + 1] if has_samples else value

    alone = (tree_map(partial(sample_of, position=position), batch) for position in range(samples))
    return [_sample_losses(task, model, sample, 1)[0] for sample in alone]


def predicted_rows(
    evaluator: Evaluator, model: nn.Module, dataset: Any, collate: Collate, predict: Callable[[Any], Any]
) -> Iterator[tuple[Any, ...]]:
    """Yield what ``predict(batch)`` returns for each batch of ``dataset``, in index order, on every rank. Collective.

    The batches are the same for any number of ranks. Modules are in evaluation mode, and random generators, gradients
    and modes are afterwards as they were.
    """

    def rows_of(batch: Any, request: BatchRequest) -> tuple[Any, ...]:
        rows = predict(batch)
        rows = rows if isinstance(rows, (tuple, list)) else (rows,)
        check_rows(rows, request.size, "predict(batch)")
        return tuple(to_host(rows))

    for results in evaluator.rounds(model, dataset, collate, rows_of, on_all_ranks=True):
        for rows in results:
            pulse.at(Activity.EVALUATING)
            yield rows


def refuse_without_predictions(task: Task) -> None:
    """Raise :class:`TaskError` for a task with neither ``predict`` nor ``evaluate``."""
    if type(task).predict is Task.predict and type(task).evaluate is Task.evaluate:
        raise _no_predictions()


def _no_predictions() -> TaskError:
    return TaskError(
        "the task has no predictions",
        why="without predict(), the columns are what evaluate() returns, and that is nothing",
        fix='define predict(self, model, batch) in the task: return for example {"class": …, "probability": …}',
    )


def table_rows(columns: Any, indices: Sequence[int], method: str) -> list[Row]:
    """Return a row for each sample, with its index; ``method`` is what returned ``columns``.

    Raises:
        TaskError: there is a column without an entry for each sample.
    """
    is_mapping = isinstance(columns, Mapping)
    size = len(indices)
    if is_mapping and not columns:
        raise _no_predictions()
    if not is_mapping or not all(has_rows(column, size) for column in columns.values()):
        raise TaskError(
            f"{method} must return a column for each name, with one entry per sample",
            why=f"for {size} samples it returned {type(columns).__name__}"
            + (f" with {', '.join(map(str, columns))}" if is_mapping else ""),
            fix='return for example {"class": names, "probability": probabilities}',
        )
    lists = {str(name): _plain(column) for name, column in columns.items()}
    return [
        {"index": index, **{name: column[number] for name, column in lists.items()}}
        for number, index in enumerate(indices)
    ]


def _plain(value: Any) -> Any:
    """Convert to numbers, texts and lists; numbers of 32 bits and less with their seven digits."""
    if isinstance(value, Tensor):
        value = (value.float() if value.is_floating_point() and value.itemsize < 4 else value).detach().numpy()
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return [_plain(row) for row in value] if value.ndim > 1 else [float(f"{x:.7g}") for x in value.tolist()]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
