"""Private names of torchmetrics; imported where a task's metrics are torchmetrics'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from torchmetrics import Metric, MetricCollection

__all__ = ["Metric", "MetricCollection"]


@contextlib.contextmanager
def without_sync() -> Iterator[None]:
    """Inside, every metric computes from its own states, without a collective."""
    sync = Metric.sync
    Metric.sync = lambda *arguments, **named: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Metric.sync = sync  # type: ignore[method-assign]


def defaults(metric: Metric) -> dict[str, Any]:
    """The initial value of each state of ``metric``, by name."""
    return metric._defaults


def reductions(metric: Metric) -> dict[str, Any]:
    """The function that reduces each state over ranks, by name."""
    return metric._reductions


def compute_groups(metrics: MetricCollection, value: tuple[Any, bool] | None = None) -> tuple[Any, bool]:
    """Which metrics share an update, and whether that is settled; ``value`` sets both."""
    if value is not None:
        metrics._groups, metrics._groups_checked = value
    return metrics._groups, metrics._groups_checked


def mark_updated(metric: Metric) -> None:
    """``compute()`` does not warn that ``metric`` was never updated."""
    metric._update_count = max(1, metric._update_count)


def metrics_by_name(metrics: Any) -> dict[str, Metric]:
    """The metrics of torchmetrics in ``metrics`` by the names of their values; none of another object."""
    if isinstance(metrics, MetricCollection):
        return dict(metrics.items(copy_state=False))
    return {type(metrics).__name__: metrics} if isinstance(metrics, Metric) else {}


def grouped_by_chance(metrics: Any) -> list[tuple[str, str]]:
    """Pairs of a ``MetricCollection(compute_groups=True)`` whose states may be equal at first, and differ later.

    Metrics that share the code of ``update`` and the settings that both have always have equal states.
    """
    if not isinstance(metrics, MetricCollection) or metrics._enable_compute_groups is not True:
        return []
    return [
        (first, second)
        for (first, one), (second, other) in combinations(metrics_by_name(metrics).items(), 2)
        if one._defaults and one._defaults.keys() == other._defaults.keys() and not _updates_alike(one, other)
    ]


def _updates_alike(one: Metric, other: Metric) -> bool:
    """Whether both have the same ``update``, and the settings that both have are equal."""
    settings = {name: value for name, value in vars(one).items() if not name.startswith("_") and not callable(value)}
    shared = settings.keys() & vars(other).keys() - one._defaults.keys()
    return type(one).update is type(other).update and all(
        repr(settings[name]) == repr(vars(other)[name]) for name in shared
    )
