"""Private names of torchmetrics; imported where a task's metrics are torchmetrics'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
