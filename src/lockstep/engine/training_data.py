"""A task's data, opened under the run's seed, and where training batches come from: that data in the plan's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from numpy.typing import NDArray
from torch.utils.data import default_collate

from lockstep.config import RunConfig
from lockstep.data.bucketed import BucketedOrder, check_lengths, hash_lengths
from lockstep.data.order import Order
from lockstep.data.reader import Collate, Indices
from lockstep.data.requests import SampleOrder, Source, Window, windows
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.process.runtime import seeded
from lockstep.engine.task import Datasets, DataSettings, Task
from lockstep.errors import DataError
from lockstep.hardware.world import World
from lockstep.planning import Plan


def open_data(task: Task, config: RunConfig, collectives: Collectives | None = None) -> Datasets:
    """``prepare()`` once per node, then the data sets; the only way to open a task's data. Collective, if with ranks.

    What a task draws there from ``random``, NumPy or torch starts from the run's seed, and the caller's generators are
    restored: so ``random_split`` without a generator gives the same parts on any ranks and in every attempt.
    """
    if collectives is None:
        prepare_data(task, config)
    else:
        with collectives.main_first(per_node=True):
            if collectives.local_rank == 0:
                prepare_data(task, config)
    return open_datasets(task, config)


def prepare_data(task: Task, config: RunConfig) -> None:
    """``task.prepare()`` under the run's seed."""
    task.data = data_settings(config)
    with seeded(config.training.seed):
        task.prepare()


def open_datasets(task: Task, config: RunConfig) -> Datasets:
    """``task.datasets()`` under the run's seed; its data are prepared on this node."""
    task.data = data_settings(config)
    with seeded(config.training.seed):
        return task.datasets()


def data_settings(config: RunConfig) -> DataSettings:
    return DataSettings(config.data.data_dir, config.data.download, config.training.seed)


def training_source(task: Task, dataset: Any, plan: Plan) -> Source:
    """Batches of ``dataset`` in the order of the run.

    Raises:
        DataError: the lengths of the samples are not those that the plan was made with.
    """
    return Source(dataset, collate_of(task), plan.seed, _order(task, plan), plan.order.lanes)


def walk(plan: Plan, world: World, *, epoch: int = 0, position: int = 0) -> Iterator[Window]:
    """The steps of this rank, from ``position`` of ``epoch`` to the end of the run."""
    return windows(
        plan.batch,
        rank=0 if plan.pipelined else world.rank,
        epoch=epoch,
        position=position,
        epochs=plan.epochs,
        ghosts=plan.sync_batchnorm or plan.sharded,
    )


def collate_of(task: Task) -> Collate:
    """How ``task``'s samples become a batch; torch's ``default_collate`` itself, where the task has no other."""
    is_default = getattr(task.collate, "__func__", None) is Task.collate
    return cast(Collate, default_collate) if is_default else task.collate


class _Subset:
    """A fixed part of the data, in a separate order (``debug.overfit_batches``)."""

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
