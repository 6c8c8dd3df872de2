"""Where a run's training batches come from: the task's data, in the order of the plan."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from lockstep.data.bucketed import BucketedOrder, check_lengths, hash_lengths
from lockstep.data.loader import Indices, SampleOrder, Source
from lockstep.data.order import Order
from lockstep.engine.task import Task
from lockstep.errors import DataError
from lockstep.plan import Plan


def training_source(task: Task, dataset: Any, plan: Plan) -> Source:
    """Batches of ``dataset`` in the order of the run.

    Raises:
        DataError: the lengths of the samples are not those that the plan was made with.
    """
    return Source(dataset, task.collate, plan.seed, _order(task, plan), plan.order.lanes)


class _Subset:
    """A fixed part of the data, in an order of its own (``debug.overfit_batches``)."""

    def __init__(self, indices: Indices, order: SampleOrder) -> None:
        self._indices, self._order = indices, order

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        return self._indices[self._order.slice(epoch, start, stop)]


def _order(task: Task, plan: Plan) -> SampleOrder:
    whole = Order(plan.task.train_samples, plan.seed)
    if plan.overfit_samples is None:
        return _bucketed(whole, _lengths(task, plan), plan) if plan.order.bucketed else whole
    subset, order = whole.slice(0, 0, plan.overfit_samples), Order(plan.overfit_samples, plan.seed)
    if plan.order.bucketed:
        return _Subset(subset, _bucketed(order, _lengths(task, plan)[subset], plan))
    return _Subset(subset, order)


def _bucketed(order: Order, lengths: NDArray[Any], plan: Plan) -> BucketedOrder:
    window, block = plan.order.window, plan.order.block
    assert window is not None
    assert block is not None
    return BucketedOrder(order, lengths, window, block)


def _lengths(task: Task, plan: Plan) -> NDArray[Any]:
    """The task's lengths, which must be those of the plan: other lengths on one rank would be another order there."""
    given = task.lengths()
    lengths = None if given is None else check_lengths(given, plan.task.train_samples)
    found = None if lengths is None else hash_lengths(lengths)
    if lengths is None or found != plan.task.lengths:
        raise DataError(
            "the task gives other lengths than before this run's ranks were started",
            why=f"their hash was {plan.task.lengths}, here it is {found}",
            fix="let Task.lengths() depend on the data alone",
        )
    return lengths
