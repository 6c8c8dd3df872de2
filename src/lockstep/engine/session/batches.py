"""The batches of a session: one loader per data set, which reads ahead over the ends of epochs; parts of given rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from lockstep._compat.torch import tree_leaves, tree_map
from lockstep.arithmetic import ceil_div
from lockstep.data.arrays import as_tensor, by_row, is_stream
from lockstep.data.loader import make_loader
from lockstep.data.order import Order, derive_key
from lockstep.data.reader import Indices
from lockstep.data.requests import ALIGNMENT, BatchRequest, InOrder, Source, Window, windows
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.fingerprint import examined, feed, same_data
from lockstep.engine.fit import TimedBatches
from lockstep.engine.run_log import record_samples
from lockstep.engine.session.training import SessionTraining
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import check_dataset, collate_of, data_settings, training_source
from lockstep.errors import TaskError, UnsupportedError


def length(dataset: Any) -> int | None:
    """Return the number of rows; ``None`` for a stream."""
    return None if is_stream(dataset) else len(dataset)


class ByRow:
    """Data sets, frames by row; of a frame always the same rows, since a loop gives it in every epoch."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[Any, Any]] = {}

    def __call__(self, dataset: Any) -> Any:
        if id(dataset) in self._frames:
            return self._frames[id(dataset)][1]
        rows = by_row(dataset)
        if rows is not dataset:
            self._frames[id(dataset)] = dataset, rows
        return rows


def check_data(dataset: Any, *, streams: bool | None) -> None:
    """Raise :class:`LockstepError` where a loop cannot read ``dataset``.

    ``streams``: whether it may be iterable; ``None``: it is for evaluation.
    """
    if streams is None or not is_stream(dataset):
        check_dataset(dataset, "val" if streams is None else "train")
    elif not streams:
        raise UnsupportedError(
            "the data of this loop over batches are iterable, and not those of the first loop",
            why="one stream is read in a run, and every epoch continues it",
            fix="give the loop the same object in every epoch, or data with __len__ and __getitem__",
        )


def check_alike(fingerprint: str, collectives: Collectives, call: str = "batches") -> None:
    """Raise :class:`TaskError` on all ranks if they gave ``call`` different data. Collective."""
    first, *rest = collectives.all_gather(fingerprint)
    rank = next((rank for rank, local in enumerate(rest, 1) if not same_data(first, local)), None)
    if rank is not None:
        raise TaskError(
            f"rank {rank} gave {call}() other data than rank 0",
            why="each rank takes its part of the same data, so samples of every rank would be left out (length and "
            f"hash {rest[rank - 1]}, on rank 0 {first})",
            fix="make the same data on every rank: draw random numbers after lockstep.Session(...) and outside the "
            "loop over batches, or put the parts together with session.gather()",
        )


class DataFeed:
    """Batches of ``datasets.train`` in the order of the run, for one rank; ``accumulate``: as the plan, or otherwise.

    Each loop of an epoch, by its ``number``, has another order. ``planned``: the plan was made with these data.
    Collective: others are compared.
    """

    def __init__(
        self,
        training: SessionTraining,
        task: Task,
        datasets: Datasets,
        accumulate: int | None,
        number: int,
        *,
        planned: bool,
    ) -> None:
        rank = training.rank
        train = datasets.train
        plan = rank.plan
        batch = rank.plan.batch
        task._lockstep_data = data_settings(rank.config)
        if number and training.reshuffles:
            plan = plan.model_copy(update={"seed": derive_key("loop", plan.seed, number)})
        skipped = rank.run_dir.path / f"skipped-rank{rank.world.rank}.jsonl"
        if planned:
            source = training_source(task, datasets, plan, skipped)
        else:
            if rank.world.size > 1:
                check_alike(examined(train, skips=training.skips)[0], rank.collectives)
            batch = batch.model_copy(update={"samples": len(train)})
            order = Order(len(train), plan.seed)
            left_out = skipped if training.skips else None
            source = Source(train, collate_of(task), plan.seed, order, plan.order.lanes, left_out)
        if batch.lanes is None and accumulate not in (None, batch.accumulate):
            share = ceil_div(batch.global_batch, batch.ranks)
            batch = batch.model_copy(update={"accumulate": accumulate, "batch_size": ceil_div(share, accumulate)})
        arrangement = rank.config.debug.trace
        self.source = source if arrangement == "off" else replace(source, arrangement=arrangement)
        self._training = training
        self._batch = batch
        self.steps_per_epoch = batch.steps_per_epoch
        self._loader: Any = None
        self._batches = TimedBatches(iter(()))
        self._next = (-1, -1)
        records = rank.config.telemetry.record_samples
        self._record = record_samples(rank, training.state, self.source.indices) if records else None

    def _windows(self, epoch: int, position: int, epochs: int) -> Iterator[Window]:
        rank = self._training.rank
        ghosts = rank.collectives.size > 1 or self._batch.lanes is not None
        return windows(self._batch, rank=rank.world.rank, epoch=epoch, position=position, epochs=epochs, ghosts=ghosts)

    def walk(self, epoch: int, position: int) -> Iterator[Any]:
        """Yield this rank's micro-batches from ``position`` to the end of ``epoch``, on its device.

        The window is counted when the loop asks for the batch after it: then its body is done.
        """
        training = self._training
        batches = self._at(epoch, position)
        for window in self._windows(epoch, position, epoch + 1):
            training.begin_window(window, self._batch.split)
            if self._record is not None:
                self._record(window, stage=training.position.loops)
            is_done = False
            try:
                yield from training.micro_batches(window.requests, batches)
                is_done = True
            finally:
                if is_done or training.has_stepped:  # the loop may be left after a step
                    over = self._batch.window(window.stop) is None
                    self._next = (epoch + 1, 0) if over else (epoch, window.stop)
                    waited_s = batches.waited_s()
                    training.end_window(waited_s, position=window.stop, epoch_over=over, is_done=is_done)
            if training.log.ended_by is not None:
                training.is_cut = not over
                return

    def again(self) -> Iterator[Any]:
        """Yield the micro-batches of the current window once more. Raises :class:`LockstepError`."""
        if is_stream(self.source.dataset):
            raise UnsupportedError("again() has no batches of iterable data", why="they are read once")
        return self._training.again(self.source.batch)

    def _at(self, epoch: int, position: int) -> TimedBatches:
        """Return the batches from this position on, of a new loader unless the present one stands there."""
        if self._next != (epoch, position):
            self.close()
            plan = self._training.rank.plan
            me = self._training.rank.world.rank
            requests = chain.from_iterable(window.requests for window in self._windows(epoch, position, plan.epochs))
            self._loader = make_loader(self.source, requests, plan.loader, me, largest=self._batch.batch_size)
            self._batches = TimedBatches(self._loader)
        self._next = (-1, -1)
        return self._batches

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        self._loader = None


class UpdateRows:
    """The data set of a plan that is made for a loop over updates: ``size`` rows in each of ``updates``."""

    def __init__(self, updates: int, size: int) -> None:
        self._samples = updates * size

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return index

    def fingerprint(self) -> str:
        """Return one fingerprint for any rows: the loop makes new ones in every update."""
        return "updates"


def count_rows(rows: Any) -> int:
    """Count the rows of a batch. Raises :class:`TaskError`: its parts have different numbers, or one has none."""
    sizes = {_length(leaf) for leaf in tree_leaves(rows)}
    if len(sizes) != 1 or 0 in sizes:
        raise TaskError(
            "session.part() needs the same number of rows in all parts of a batch",
            why=f"the parts have {', '.join(map(str, sorted(sizes))) or 'no'} rows",
            fix="give it tensors or arrays with a row for each sample, in tuples, lists or dicts",
        )
    return sizes.pop()


def _length(leaf: Any) -> int:
    """Return the number of rows; 0 for objects without rows."""
    has_rows = hasattr(leaf, "__len__") and not isinstance(leaf, str) and getattr(leaf, "ndim", 1) > 0
    return len(leaf) if has_rows else 0


def _taken(rows: Any, start: int, stop: int, indices: Indices | None) -> Any:
    """Rows ``start`` to ``stop``, or those of ``indices``."""

    def part_of(leaf: Any) -> Any:
        values = as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
        part = values[start:stop] if indices is None else values[indices]
        # Matrix products round by the alignment of their operands.
        is_aligned = not isinstance(part, Tensor) or part.data_ptr() % ALIGNMENT == 0
        return part if is_aligned else part.clone()

    return tree_map(part_of, rows)


class RowFeed:
    """Steps over rows that the loop has: each rank's micro-batches of them."""

    def __init__(self, training: SessionTraining) -> None:
        plan = training.rank.plan
        trace = training.rank.config.debug.trace
        self._training = training
        self._batch = plan.batch
        self._source = Source(None, list, plan.seed, InOrder(), arrangement=None if trace == "off" else trace)
        #: By number of rows: the window, and the spans of each rank's micro-batches.
        self._windows: dict[int, tuple[Window, Any]] = {}
        self._rows: Any = None
        if training.rank.config.telemetry.record_samples:
            training.rank.note(
                "unused",
                "telemetry.record_samples has no effect on session.part(): rows that the loop draws have no indices of "
                "a data set. Log what identifies them, or take them from session.batches()",
                "warning",
            )

    def walk(self, rows: Any, size: int) -> Iterator[Any]:
        """Yield this rank's micro-batches of ``rows``, on its device. The window stays open."""
        training = self._training
        rank = training.rank
        if rank.world.size > 1 and training.compares_rows:
            digest = hashlib.sha256()
            feed(digest, rows)
            check_alike(f"{size}:{digest.hexdigest()[:16]}", rank.collectives, "part")
        if size not in self._windows:
            batch = self._batch.model_copy(update={"samples": size, "global_batch": size})
            ghosts = rank.collectives.size > 1 or batch.lanes is not None
            every = windows(batch, rank=rank.world.rank, epoch=0, position=0, epochs=1, ghosts=ghosts)
            self._windows[size] = next(every), batch.split
        window, split = self._windows[size]
        self._rows = rows
        training.begin_window(window, split)
        yield from training.micro_batches(window.requests, map(self._read, window.requests))

    def again(self) -> Iterator[Any]:
        """Yield the micro-batches of the current window once more. Raises :class:`TaskError`."""
        return self._training.again(self._read)

    def _read(self, request: BatchRequest) -> Any:
        is_arranged = self._source.arrangement is not None
        indices = self._source.indices(request) if is_arranged and request.size else None
        return _taken(self._rows, request.start, request.stop, indices)
