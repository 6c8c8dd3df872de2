"""The metrics of a task: made for an evaluation, examined, updated, and their values in rows."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from lockstep.engine.task import Metrics, Task
from lockstep.errors import TaskError


def make_metrics(task: Task) -> Metrics:
    """Make the metrics of ``task`` for one evaluation; a dict becomes a collection in which each has separate states.

    Raises:
        TaskError: neither a dict nor an object with ``update`` and ``compute``, or a metric with the name of the loss.
    """
    metrics = task.metrics()
    if isinstance(metrics, dict | nn.ModuleDict):
        _check_names(metrics)
    if isinstance(metrics, nn.ModuleDict) and not hasattr(metrics, "compute"):  # a MetricCollection is one too
        metrics = dict(metrics.items())
    if isinstance(metrics, dict):
        from lockstep._compat.torchmetrics import MetricCollection

        # Compute groups would join metrics whose states are equal after the first rows, such as top-1 and top-2
        # accuracy of a single sample.
        try:
            return MetricCollection(metrics, compute_groups=False)
        except ValueError as error:
            raise TaskError(
                "the task's metrics() returned a dict of something else than metrics of torchmetrics",
                why=str(error),
                fix="make the metric, as in MulticlassAccuracy(10), or return an object with update() and compute()",
            ) from None
    if isinstance(metrics, type) or not (hasattr(metrics, "update") and hasattr(metrics, "compute")):
        returned = f"the class {metrics.__name__}" if isinstance(metrics, type) else f"a {type(metrics).__name__}"
        raise TaskError(
            f"the task's metrics() returned {returned}",
            why="rows go to its update(), and values come from its compute()",
            fix='return a dict of torchmetrics, such as {"accuracy": MulticlassAccuracy(10)}, or leave metrics() out',
        )
    return metrics


def directions_of(metrics: Any) -> dict[str, bool]:
    """Return whether higher is better, by name: of those among ``metrics`` whose torchmetrics class states it."""
    if "torchmetrics" not in sys.modules:
        return {}
    from lockstep._compat.torchmetrics import metrics_by_name

    stated = {name: getattr(metric, "higher_is_better", None) for name, metric in metrics_by_name(metrics).items()}
    return {name: higher for name, higher in stated.items() if isinstance(higher, bool)}


def groups_remark(metrics: Any) -> str | None:
    """Describe the metrics of a user's ``MetricCollection`` that torchmetrics may take for one another, if any."""
    if "torchmetrics" not in sys.modules:
        return None
    from lockstep._compat.torchmetrics import grouped_by_chance

    pairs = grouped_by_chance(metrics)
    if not pairs:
        return None
    return (
        f"The MetricCollection of Task.metrics() has compute_groups=True: if the states of {' and '.join(pairs[0])} "
        "are equal after the first batch, torchmetrics updates only one of them from then on, and both get its value. "
        "Pass compute_groups=False, or return a dict."
    )


def values_of(metrics: Any, class_names: Sequence[str] = ()) -> dict[str, Any]:
    """Compute ``metrics``: a number, or a table as nested lists, by name.

    A single metric is named after its class, as in a ``MetricCollection``. The numbers of a pair, such as a recall and
    its threshold, are named by their places; those of a mapping by its keys; a list of one number for each class, by
    its ``class_names``: ``recall/cat``.

    Raises:
        TaskError: a value of the name ``loss``, which is that of the task's loss; one that JSON cannot hold; a name
            that two have.
    """
    values = metrics.compute()
    named = values if isinstance(values, Mapping) else {type(metrics).__name__: values}
    _check_names(named)
    result: dict[str, Any] = {}
    for key, computed in named.items():
        for name, value in _flat(str(key), computed):
            if name in result:
                raise TaskError(f"two values of the task's metrics are called {name}", fix="rename one of the metrics")
            _check_value(name, value)
            result[name] = value
    for name, value in [*result.items()] if class_names else ():
        is_by_class = isinstance(value, list) and len(value) == len(class_names)
        if is_by_class and all(isinstance(number, float | int) for number in value):
            result |= {f"{name}/{label}": float(number) for label, number in zip(class_names, value, strict=True)}
            del result[name]
    return result


def _check_value(name: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise TaskError(
            f"the metric {name} has a value of type {type(value).__name__}",
            why="a run keeps numbers, texts, and tensors or nested lists of them",
            fix="return one of these from its compute()",
        ) from None


def _check_names(names: Iterable[str]) -> None:
    if "loss" in set(names):
        raise TaskError(
            "a metric of the task is called 'loss'",
            why="it would replace the mean of Task.loss() in rows, val_loss, by which the best checkpoint is chosen",
            fix="give it another name in metrics()",
        )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(f"{name}_{key}", part)
    elif isinstance(value, tuple) and value and all(map(_is_single, value)):
        for number, part in enumerate(value):
            yield f"{name}_{number}", _plain(part)
    else:
        yield name, _plain(value)


def _is_single(value: Any) -> bool:
    return isinstance(value, float | int) or (isinstance(value, Tensor | np.generic | np.ndarray) and _size(value) == 1)


def _size(value: Any) -> int:
    return int(value.numel() if isinstance(value, Tensor) else value.size)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.item() if _size(value) == 1 else value.tolist()
    return float(value) if isinstance(value, bool) else value


def update_metrics(metrics: Any, rows: Iterable[Any]) -> None:
    """Update ``metrics`` with ``rows``; an error of theirs gets a note with the types of the rows."""
    columns = tuple(rows)
    try:
        metrics.update(*columns)
    except Exception as error:
        kinds = ", ".join(
            f"{list(column.shape)} {column.dtype}" if isinstance(column, Tensor) else type(column).__name__
            for column in columns
        )
        error.add_note(f"raised by the metrics of Task.metrics(), which were given {kinds or 'nothing'}")
        raise


def without_sync() -> contextlib.AbstractContextManager[None]:
    """Keep metrics of torchmetrics from synchronising, since rank 0 alone has seen rows, and all of them."""
    if "torchmetrics" not in sys.modules:  # to import it takes longer than many first steps
        return contextlib.nullcontext()
    from lockstep._compat.torchmetrics import without_sync as unsynchronized

    return unsynchronized()
