"""Private names of torchmetrics; imported where a task's metrics are torchmetrics'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from torch import Tensor, distributed
from torchmetrics import Metric, MetricCollection

__all__ = ["Metric", "MetricCollection"]


@contextlib.contextmanager
def without_sync() -> Iterator[None]:
    """Make every metric compute from its local states in the body, without a collective."""
    sync = Metric.sync
    Metric.sync = lambda *arguments, **named: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Metric.sync = sync  # type: ignore[method-assign]


@contextlib.contextmanager
def unequal_lists() -> Iterator[None]:
    """Allow list states without a reduction other lengths on each rank; torchmetrics fails or waits."""
    from torchmetrics.detection.mean_ap import MeanAveragePrecision

    sync = Metric._sync_dist
    gather = MeanAveragePrecision._gather_tuple_list

    def sync_dist(metric: Metric, dist_sync_fn: Any, process_group: Any = None) -> None:
        group = process_group or metric.process_group
        all_states = metric._reductions
        states = {name: getattr(metric, name) for name, reduction in all_states.items() if reduction is None}
        lists = {name: values for name, values in states.items() if isinstance(values, list)}
        try:
            metric._reductions = {name: value for name, value in all_states.items() if name not in lists}
            sync(metric, dist_sync_fn, process_group)
        finally:
            metric._reductions = all_states
        for name, values in lists.items():
            if all(isinstance(value, Tensor) for value in values):
                values = [value.cpu() for value in values]
                setattr(metric, name, [value.to(metric.device) for value in _joined(values, group)])
            else:  # of another kind: gathered by the metric's class
                _joined([], group)

    Metric._sync_dist = sync_dist  # type: ignore[assignment, method-assign]
    MeanAveragePrecision._gather_tuple_list = staticmethod(_joined)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Metric._sync_dist = sync  # type: ignore[method-assign]
        MeanAveragePrecision._gather_tuple_list = staticmethod(gather)  # type: ignore[method-assign]


def _joined(values: list[Any], group: Any = None) -> list[Any]:
    """Return the lists of all ranks, one after the other. Collective."""
    ranks: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(ranks, values, group)
    return [value for rank in ranks for value in rank]


def mark_updated(metric: Metric) -> None:
    """Keep ``compute()`` from warning that ``metric`` was never updated."""
    metric._update_count = max(1, metric._update_count)


def metrics_by_name(metrics: Any) -> dict[str, Metric]:
    """Return the metrics of torchmetrics in ``metrics`` by the names of their values; none of another object."""
    if isinstance(metrics, MetricCollection):
        return dict(metrics.items(copy_state=False))
    return {type(metrics).__name__: metrics} if isinstance(metrics, Metric) else {}


def grouped_by_chance(metrics: Any) -> list[tuple[str, str]]:
    """Return pairs of a ``MetricCollection(compute_groups=True)`` whose states may be equal at first, and differ later.

    Metrics that share the code of ``update`` and the settings that both have always have equal states.
    """
    if not isinstance(metrics, MetricCollection) or metrics._enable_compute_groups is not True:
        return []
    return [
        (first, second)
        for (first, metric), (second, other) in combinations(metrics_by_name(metrics).items(), 2)
        if metric._defaults and metric._defaults.keys() == other._defaults.keys() and not _updates_alike(metric, other)
    ]


def _updates_alike(metric: Metric, other: Metric) -> bool:
    """Return whether both have the same ``update``, and the settings that both have are equal."""
    settings = {name: value for name, value in vars(metric).items() if not name.startswith("_") and not callable(value)}
    shared = settings.keys() & vars(other).keys() - metric._defaults.keys()
    return type(metric).update is type(other).update and all(
        repr(settings[name]) == repr(vars(other)[name]) for name in shared
    )
