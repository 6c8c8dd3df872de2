"""A task's data: opened under the run's seed, checked, and in the plan's order as batches."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate

from lockstep.config import DataConfig, RunConfig
from lockstep.data.arrays import ArrayDataset, by_row, check_list, draws_keyed, is_stream, leaves
from lockstep.data.loader import Settled, make_loader
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
from lockstep.data.stream import Stream, as_stream
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.generators import seeded
from lockstep.engine.task import Datasets, DataSettings, Task
from lockstep.errors import DataError, UnsupportedError
from lockstep.hardware.world import World
from lockstep.planning import Plan

#: Share of a GPU's free memory that training data may take with data.device: auto.
RESIDENT_SHARE = 0.2
#: Who calls ``set_epoch()`` of training data.
EPOCH_CALLER = "Lockstep calls it with the epoch, from 0, before on_epoch_start and the epoch's first batch"


def open_data(task: Task, config: RunConfig, collectives: Collectives | None = None) -> Datasets:
    """Call ``prepare()`` once per node, then open the data sets of a task. Collective, if with ranks.

    The draws of a task there from ``random``, NumPy or torch start from the run's seed, and the caller's generators are
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
    task._lockstep_data = data_settings(config)
    with seeded(config.training.seed):
        task.prepare()


def open_datasets(task: Task, config: RunConfig) -> Datasets:
    """Call ``task.datasets()`` under the run's seed; its data are prepared on this node."""
    task._lockstep_data = data_settings(config)
    with seeded(config.training.seed):
        datasets = task.datasets()
    if not hasattr(datasets, "train"):
        return datasets
    train, val, test = map(by_row, (datasets.train, datasets.val, datasets.test))
    weights = getattr(datasets, "weights", None)
    named = dict[str, Any]()
    if isinstance(val, Mapping) and not hasattr(val, "__getitems__"):  # which a TensorDict has: it is one data set
        named = _checked_names({name: by_row(part) for name, part in val.items()})
        val = next(iter(named.values()))
    if is_stream(train):
        train = as_stream(train, epoch_samples=config.data.epoch_samples, max_steps=config.training.max_steps)
    if not hasattr(train, "__len__"):
        return datasets
    try:
        len(train)
    except Exception as error:  # whatever a data set of the user's raises
        raise DataError(
            f"the length of {type(train).__name__} is not known",
            why=f"{type(error).__name__}: {error}",
            fix="let its __len__() return the number of its samples",
        ) from error
    data = DataConfig() if task._lockstep_samples_itself else config.data
    sampling = resolve_sampling(train, weights, data)
    return Datasets(getattr(train, "joined", train), val, test, sampling, named)


def _checked_names(named: dict[str, Any]) -> dict[str, Any]:
    wrong = [name for name in named if not isinstance(name, str) or not name.replace("-", "_").isidentifier()]
    if wrong or not named:
        raise DataError(
            f"{wrong[0]!r} is not a name for a validation set" if wrong else "Datasets(val={}) names no validation set",
            why="metrics are called val_<name>_<metric>",
            fix='use letters, digits, _ and -: Datasets(val={"clean": …, "noisy": …})',
        )
    return named


def end_data(datasets: Datasets) -> None:
    """Stop handing out a stream at the end of an attempt."""
    if isinstance(datasets.train, Stream):
        datasets.train.end()


def data_settings(config: RunConfig) -> DataSettings:
    return DataSettings(config.data.data_dir, config.data.download, config.training.seed, config.data.on_bad_row)


def training_source(task: Task, datasets: Datasets, plan: Plan, skipped: Path = Path(os.devnull)) -> Source:
    """Return the source of training batches in the order of the run; ``skipped``: file for samples that are left out.

    Weights and lengths of the samples must be those that the plan was made with: others would be another order.
    """
    order = _order(task, datasets.weights, plan)
    skips = task._lockstep_data.on_bad_row == "skip"
    return Source(
        datasets.train,
        collate_of(task),
        plan.seed,
        order,
        plan.order.lanes,
        skipped=skipped if skips else None,
        min_samples=plan.batch.least_part,
    )


def begin_stream(datasets: Datasets, *arguments: Any) -> Stream | None:
    """Begin an attempt with training data that are a stream, and return it; ``arguments``: of :meth:`.Stream.begin`."""
    if not isinstance(datasets.train, Stream):
        return None
    datasets.train.begin(*arguments)
    return datasets.train


def array_bytes(dataset: Any) -> int:
    """Return bytes of a data set of arrays in memory; 0 for any other."""
    is_at_hand = type(dataset) is ArrayDataset and dataset.is_in_memory
    return dataset.row_bytes * len(dataset) if is_at_hand else 0


def kept_on(source: Source, device: torch.device, plan: Plan) -> tuple[Source, str | None]:
    """Return ``source`` with its arrays on a GPU, and a note; unchanged if they are to stay in host memory."""
    setting = plan.value("data_device", "host")
    if device.type != "cuda" or setting == "host" or not source.is_at_hand:
        return source, None
    size = array_bytes(source.dataset)
    ranks = max(1, plan.placement["devices"].count(f"gpu:{device.index}"))
    if setting == "auto" and size * ranks > RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
        return source, None
    remark = f"Training data ({size / 1e6:.0f} MB) are on the GPU."
    return replace(source, dataset=source.dataset.to(device)), remark


def walk(plan: Plan, world: World, *, epoch: int = 0, position: int = 0) -> Iterator[Window]:
    """Yield the steps of this rank, from ``position`` of ``epoch`` to the end of the run."""
    return windows(
        plan.batch,
        rank=0 if plan.pipelined else world.rank,
        epoch=epoch,
        position=position,
        epochs=plan.epochs,
        ghosts=plan.sync_batchnorm or plan.sharded,
    )


def loaded(
    source: Source,
    plan: Plan,
    world: World,
    *,
    epoch: int = 0,
    position: int = 0,
    settled: Settled = lambda workers, text: None,
) -> Generator[Any, None, None]:
    """Load the batches of :func:`walk` as the plan asks; ``settled``: see :func:`.make_loader`."""
    requests = chain.from_iterable(window.requests for window in walk(plan, world, epoch=epoch, position=position))
    return make_loader(source, requests, plan.loader, world.rank, largest=plan.batch.batch_size, settled=settled)


def collate_of(task: Task) -> Collate:
    """Return the function that makes a batch of ``task``'s samples; torch's ``default_collate`` by default."""
    is_default = getattr(task.collate, "__func__", None) is Task.collate
    return cast(Collate, default_collate) if is_default else task.collate


class _Subset:
    """A fixed part of the data, in a separate order (``debug.overfit_batches``)."""

    def __init__(self, indices: Indices, order: SampleOrder) -> None:
        self._indices = indices
        self._order = order
        self.samples = order.samples
        self.seed = order.seed
        self.repeats = order.repeats

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        return self._indices[self._order.slice(epoch, start, stop)]


def _order(task: Task, sampling: Sampling | None, plan: Plan) -> SampleOrder:
    order = _sampled(sampling, plan)
    subset = None
    if plan.overfit_samples is not None:
        subset = order.slice(0, 0, plan.overfit_samples)
        order = Order(plan.overfit_samples, plan.seed)
    if plan.order.bucketed:
        window = plan.order.window
        block = plan.order.block
        assert window is not None and block is not None, "a bucketed order has both"
        lengths = _lengths(task, plan)
        order = BucketedOrder(order, lengths if subset is None else lengths[subset], window, block)
    return order if subset is None else _Subset(subset, order)


def _sampled(sampling: Sampling | None, plan: Plan) -> SampleOrder:
    """Return the order before it is bucketed."""
    planned = plan.order
    if planned.sampling is None and planned.positions is None:
        return Order(plan.task.train_samples, plan.seed)
    digest = None if sampling is None else sampling.facts.digest
    if sampling is None or digest != (planned.digest or ""):
        raise DataError(
            f"the training set is to be {planned.sampling}; its weights here are not those of the plan",
            why=f"their hash was {planned.digest}, here it is {digest}",
            fix="let the weights of Task.datasets() depend on the data and the epoch alone",
        )
    return sampling.order(planned.positions or sampling.facts.positions, plan.seed)


def _lengths(task: Task, plan: Plan) -> NDArray[Any]:
    task_lengths = task.lengths()
    lengths = None if task_lengths is None else check_lengths(task_lengths, plan.task.train_samples)
    digest = None if lengths is None else hash_lengths(lengths)
    if lengths is None or digest != plan.task.lengths:
        raise DataError(
            f"the task's lengths are not those of the plan: their hash was {plan.task.lengths}, here it is {digest}",
            fix="let Task.lengths() depend on the data alone",
        )
    return lengths


def check_dataset(dataset: Any, split: str) -> None:
    """Raise where ``dataset`` is not map-style or empty; only training data are required."""
    if dataset is None and split != "train":
        return
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")):
        raise UnsupportedError(
            f"the {split} data set is iterable",
            why="its samples have no index, so no rank can know its part; only training data may be a stream",
            fix="give it __len__ and __getitem__ (a map-style data set), for example list(dataset)",
        )
    if not hasattr(dataset, "__len__") or not (hasattr(dataset, "__getitem__") or draws_keyed(dataset)):
        raise DataError(
            f"the {split} data set has no length or no items",
            why=f"{type(dataset).__name__} needs __len__ and __getitem__ (or sample)",
            fix="return map-style data sets from Task.datasets()",
        )
    if len(dataset) == 0:
        raise DataError(
            f"the {split} data set has no samples",
            fix="check its path and its filters" + ("" if split == "train" else f", or return {split}=None"),
        )


def remarks_of(dataset: Any, epoch_caller: str) -> tuple[str, ...]:
    """Return remarks for the plan on the data sets behind ``dataset``: each ``remark``, who calls ``set_epoch()``."""
    remarks = [getattr(leaf, "remark", None) for leaf in leaves(dataset)]
    if any(_follow_epochs(dataset)):
        remarks.append(f"The training data have set_epoch(): {epoch_caller}.")
    return tuple(remark for remark in remarks if isinstance(remark, str))


def _follow_epochs(dataset: Any) -> Iterator[Any]:
    """Yield ``dataset``, or the data sets behind it, if they have ``set_epoch()``."""
    parts = [dataset] if hasattr(dataset, "set_epoch") else leaves(dataset)
    return (part for part in parts if callable(getattr(part, "set_epoch", None)))


def begin_epoch(dataset: Any, epoch: int, samples: int) -> None:
    """Announce ``epoch`` to training data that have ``set_epoch()``; refuse those that no longer have ``samples``."""
    for part in _follow_epochs(dataset):
        part.set_epoch(epoch)
    if len(dataset) != samples:
        raise DataError(
            f"the training set has {len(dataset)} samples in epoch {epoch + 1}, and had {samples} in the plan",
            why="the order, the steps and the schedule of a run follow from the number of its samples",
            fix="keep the number, and change the samples; or give epochs of other data to a lockstep.Session",
        )


def check_frames(dataset: Any) -> None:
    """Raise :class:`DataError` where a list, a frame or files behind ``dataset`` have values that no batch can have."""
    for leaf in leaves(dataset):
        if type(leaf) is list and leaf:
            check_list(leaf)
        if callable(check := getattr(leaf, "check_collatable", None)):
            check()
