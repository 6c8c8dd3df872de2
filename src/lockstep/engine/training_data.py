"""A task's data, opened under the run's seed, and where training batches come from: that data in the plan's order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lockstep.config import DataConfig, RunConfig
from lockstep.data.arrays import ArrayDataset, by_row
from lockstep.data.order import Order
from lockstep.data.reader import Collate, Indices
from lockstep.data.requests import Source, Window, windows
from lockstep.data.sampling import (
    BucketedOrder,
    SampleOrder,
    Sampling,
    check_lengths,
    hash_lengths,
    resolve_sampling,
)
from lockstep.data.stream import Stream, as_stream, is_stream
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.process.runtime import seeded
from lockstep.engine.task import Datasets, DataSettings, Task
from lockstep.errors import DataError
from lockstep.hardware.world import World
from lockstep.planning import Plan
from lockstep.planning.plan import DATA_DEVICE


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
        given = task.datasets()
    if not hasattr(given, "train"):
        return given
    train, val, test = map(by_row, (given.train, given.val, given.test))
    weights, named = getattr(given, "weights", None), dict[str, Any]()
    if isinstance(val, Mapping) and not hasattr(val, "__getitems__"):  # which a TensorDict has: it is one data set
        val, named = _named({name: by_row(part) for name, part in val.items()})
    if is_stream(train):
        train = as_stream(train, epoch_samples=config.data.epoch_samples, max_steps=config.training.max_steps)
    if not hasattr(train, "__len__"):
        return given
    try:
        len(train)
    except Exception as error:  # whatever a data set of the user's raises
        what, why = f"the length of {type(train).__name__} is not known", f"{type(error).__name__}: {error}"
        raise DataError(what, why=why, fix="let its __len__() return the number of its samples") from error
    data = DataConfig() if hasattr(task, "loader_facts") else config.data  # a module's loaders decide
    sampling = resolve_sampling(train, weights, data)
    return Datasets(getattr(train, "joined", train), val, test, sampling, named)


def _named(val: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The first of several validation sets, and all of them by name."""
    wrong = [name for name in val if not isinstance(name, str) or not name.replace("-", "_").isidentifier()]
    if wrong or not val:
        raise DataError(
            f"{wrong[0]!r} is not a name for a validation set" if wrong else "Datasets(val={}) names no validation set",
            why="metrics are called val_<name>_<metric>",
            fix='use letters, digits, _ and -: Datasets(val={"clean": …, "noisy": …})',
        )
    return next(iter(val.values())), dict(val)


def end_data(datasets: Datasets) -> None:
    """At the end of an attempt: stop handing out a stream."""
    if isinstance(datasets.train, Stream):
        datasets.train.end()


def data_settings(config: RunConfig) -> DataSettings:
    return DataSettings(config.data.data_dir, config.data.download, config.training.seed, config.data.on_bad_row)


def training_source(task: Task, datasets: Datasets, plan: Plan, skipped: Path = Path(os.devnull)) -> Source:
    """Batches of the training data in the order of the run; what is skipped is recorded where ``skipped`` says.

    Raises:
        DataError: the weights or the lengths of the samples are not those that the plan was made with.
    """
    order, skips = _order(task, datasets.weights, plan), task.data.on_bad_row == "skip"
    given = (datasets.train, collate_of(task), plan.seed, order, plan.order.lanes, skipped if skips else None)
    return Source(*given, least=plan.batch.least_part)


def begin_stream(datasets: Datasets, *where: Any) -> Stream | None:
    """At the start of an attempt: see :meth:`.Stream.begin`. The stream, if the training data are one."""
    if not isinstance(datasets.train, Stream):
        return None
    datasets.train.begin(*where)
    return datasets.train


#: Share of a GPU's free memory that training data may take with data.device: auto.
RESIDENT_SHARE = 0.2


def array_bytes(dataset: Any) -> int:
    """Bytes of a data set of arrays in memory; 0 for any other."""
    is_at_hand = type(dataset) is ArrayDataset and dataset.is_in_memory
    return dataset.row_bytes * len(dataset) if is_at_hand else 0


def fits_device(source: Source, device: torch.device, plan: Plan) -> bool:
    """Whether the arrays of ``source`` take at most a fifth of a GPU's free memory, with those of other ranks there."""
    if device.type != "cuda":
        return True
    ranks = max(1, plan.placement["devices"].count(f"gpu:{device.index}"))
    return bool(array_bytes(source.dataset) * ranks <= RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0])


def kept_on(source: Source, device: torch.device, plan: Plan) -> tuple[Source, str | None]:
    """``source`` with its arrays on a GPU, and a note; as it is where they are to stay in host memory."""
    where = plan.value(DATA_DEVICE, "host")
    if device.type != "cuda" or where == "host" or not source.is_at_hand:
        return source, None
    if where == "auto" and not fits_device(source, device, plan):
        return source, None
    size = f"{array_bytes(source.dataset) / 1e6:.0f} MB"
    return replace(source, dataset=source.dataset.to(device)), f"Training data ({size}) are on the GPU."


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
        self.samples, self.seed, self.repeats = order.samples, order.seed, order.repeats

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        return self._indices[self._order.slice(epoch, start, stop)]


def _order(task: Task, sampling: Sampling | None, plan: Plan) -> SampleOrder:
    order, subset = _sampled(sampling, plan), None
    if plan.overfit_samples is not None:
        subset, order = order.slice(0, 0, plan.overfit_samples), Order(plan.overfit_samples, plan.seed)
    if plan.order.bucketed:
        window, block = plan.order.window, plan.order.block
        assert window is not None and block is not None, "a bucketed order has both"
        lengths = _lengths(task, plan)
        order = BucketedOrder(order, lengths if subset is None else lengths[subset], window, block)
    return order if subset is None else _Subset(subset, order)


def _sampled(sampling: Sampling | None, plan: Plan) -> SampleOrder:
    """The order before it is bucketed; its weights must be those of the plan, as lengths must be."""
    planned = plan.order
    if planned.sampling is None and planned.positions is None:
        return Order(plan.task.train_samples, plan.seed)
    found = None if sampling is None else sampling.facts.digest
    if sampling is None or found != (planned.digest or ""):
        raise DataError(
            f"the training set is to be {planned.sampling}; its weights here are not those of the plan",
            why=f"their hash was {planned.digest}, here it is {found}",
            fix="let the weights of Task.datasets() depend on the data and the epoch alone",
        )
    return sampling.order(planned.positions or sampling.facts.positions, plan.seed)


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
