"""What a model predicts for the samples of a data set, in their order, the same on any number of ranks.

The data set is cut into chunks as in an evaluation (:mod:`.evaluate`): chunk c goes to rank c mod R, and rank 0
gets its rows in index order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.requests import Request
from lockstep.engine.distributed.staging import to_host
from lockstep.engine.evaluate import Evaluator
from lockstep.engine.task import Task
from lockstep.engine.trained import bare
from lockstep.engine.training_data import collate_of
from lockstep.errors import TaskError

Row = dict[str, Any]


def predictions(
    evaluator: Evaluator, task: Task, model: nn.Module, dataset: Any, *, first: int
) -> Iterator[list[list[Row]]]:
    """The rows of as many chunks as there are ranks, on rank 0; the others get empty lists. Collective.

    Args:
        dataset: where it has ``names``, rows have that of their sample as ``file``.
        first: the chunk to begin with.

    Raises:
        TaskError: the task's ``predict`` does not return a value for each sample.
    """
    names = getattr(dataset, "names", None)
    with evaluator.walk(model, dataset, collate_of(task), first=first) as batches, torch.no_grad():
        for request, batch in batches:
            rows: list[Row] = []
            if request.size:
                with evaluator.precision.autocast():
                    found = task.predict(bare(model), batch)
                rows = _rows(to_host(found), request)
                if names is not None:
                    rows = [{**row, "file": names[row["index"]]} for row in rows]
            yield [chunk for chunk in evaluator.collectives.gather(rows) or () if chunk]


def refuse_without_predictions(task: Task) -> None:
    """Raise :class:`TaskError` for a task with neither ``predict`` nor ``evaluate``."""
    if type(task).predict is Task.predict and type(task).evaluate is Task.evaluate:
        raise _nothing()


def _nothing() -> TaskError:
    return TaskError(
        "the task has no predictions",
        why="without predict(), the columns are what evaluate() returns, and that is nothing",
        fix='define predict(self, model, batch) in the task: return for example {"class": …, "probability": …}',
    )


def _rows(columns: Any, request: Request) -> list[Row]:
    """A row for each sample, with its index."""
    if isinstance(columns, Mapping) and not columns:
        raise _nothing()
    sized = isinstance(columns, Mapping) and all(_has_rows(column, request.size) for column in columns.values())
    if not sized:
        raise TaskError(
            "the task's predict() must return a column for each name, with one entry per sample",
            why=f"for {request.size} samples it returned {type(columns).__name__}"
            + (f" with {', '.join(map(str, columns))}" if isinstance(columns, Mapping) else ""),
            fix='return for example {"class": names, "probability": probabilities}',
        )
    lists = {str(name): _plain(column) for name, column in columns.items()}
    return [
        {"index": request.start + place, **{name: column[place] for name, column in lists.items()}}
        for place in range(request.size)
    ]


def _has_rows(column: Any, size: int) -> bool:
    if isinstance(column, (Tensor, np.ndarray)):
        return column.ndim > 0 and len(column) == size
    return isinstance(column, (list, tuple)) and len(column) == size


def _plain(value: Any) -> Any:
    """Numbers, texts and lists; numbers of 32 bits and less with their seven digits."""
    if isinstance(value, Tensor):
        value = (value.float() if value.is_floating_point() and value.itemsize < 4 else value).numpy()
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return [_plain(row) for row in value] if value.ndim > 1 else [float(f"{x:.7g}") for x in value.tolist()]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
