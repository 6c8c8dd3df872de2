"""Requests for data: which samples each step of a rank takes, and the source that turns a request into a batch.

There is no sampler. :func:`windows` walks the plan; each window names the samples of this rank as a slice of the order.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lockstep.data.arrays import ArrayDataset
from lockstep.data.order import derive_key
from lockstep.data.reader import Collate, Indices, Reader, Unreadable
from lockstep.data.sampling import SampleOrder, deal
from lockstep.planning import BatchPlan


class BatchRequest(NamedTuple):
    """One micro-batch: positions ``start`` to ``stop`` of an epoch.

    ``part`` is the lane (exact) or the micro-batch's place (fast). A ``ghost`` is fetched only so that an
    empty rank can join a collective forward; it counts nothing. ``window`` spans the positions of the whole step.
    """

    epoch: int
    part: int
    start: int
    stop: int
    ghost: bool = False
    window: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start


class Window(NamedTuple):
    """One optimizer step of one rank. ``irregular``: some rank has fewer micro-batches than another."""

    epoch: int
    start: int
    stop: int
    requests: tuple[BatchRequest, ...]
    irregular: bool

    @property
    def size(self) -> int:
        """Samples of the whole step, over all ranks."""
        return self.stop - self.start


def windows(batch: BatchPlan, *, rank: int, epoch: int, position: int, epochs: int, ghosts: bool) -> Iterator[Window]:
    """Yield every window from (epoch, position) to the end of the last epoch, as rank ``rank`` sees it.

    Args:
        epoch: counted from 0.
        position: samples of that epoch already used.
        ghosts: give a rank or a lane without samples one to replay (for models whose forward is collective).
    """
    layouts: dict[int, Any] = {}  # by size: to look for a plan in a cache takes longer
    while epoch < epochs:
        span = batch.window(position)
        if span is None:
            epoch = epoch + 1
            position = 0
            continue
        start, position = span
        size = position - start
        if size not in layouts:
            layouts[size] = _layout(batch, rank, size, ghosts)
        parts, irregular = layouts[size]
        requests = tuple([BatchRequest(epoch, part, start + a, start + b, ghost, span) for part, a, b, ghost in parts])
        yield Window(epoch, start, position, requests, irregular)


@lru_cache(maxsize=64)
def _layout(
    batch: BatchPlan, rank: int, size: int, ghosts: bool
) -> tuple[tuple[tuple[int, int, int, bool], ...], bool]:
    """Return ``(part, start, stop, ghost)`` of the micro-batches in a window of ``size``; whether it is irregular."""
    shares = batch.split(size)
    spans = shares[rank]
    max_parts = max(map(len, shares))
    first = 0 if batch.lanes is None else rank * len(spans)  # lanes are numbered through all ranks
    padded = (*spans, *[(0, 0)] * (max_parts - len(spans)))
    parts = [(first + number, *span, False) for number, span in enumerate(padded)]
    if batch.lanes is None or ghosts:
        parts = [part if part[1] < part[2] else (part[0], 0, batch.least_part, True) for part in parts]
    irregular = any(len(share) != max_parts or any(a == b for a, b in share) for share in shares)
    return tuple(part for part in parts if ghosts or not part[3]), irregular and batch.lanes is None


def readable(request: BatchRequest, batch: Any) -> tuple[BatchRequest, Any]:
    """Replace a batch without a readable sample by its stand-in, which counts nothing."""
    return (request._replace(ghost=True), batch.stand_in) if isinstance(batch, Unreadable) else (request, batch)


#: Bytes at multiples of which torch's CPU allocator begins a tensor.
ALIGNMENT = 64


@dataclass(frozen=True)
class Source:
    """The source of batches: a data set, its collate function and its order.

    ``lanes``: the items of a step are dealt to this number of parts in turn (:func:`.deal`), for an order whose
    neighbours are alike; ``None`` leaves them in order. ``skipped``, ``min_samples``: see :class:`Reader`.
    ``full``: a batch of fewer samples is filled up to this number by ``pad(batch, full)``.
    ``arrangement``: of samples within a batch, for :mod:`lockstep.verification`; ``None`` lets batches be gathered.
    """

    dataset: Any
    collate: Collate
    seed: int
    order: SampleOrder
    lanes: int | None = None
    skipped: Path | None = None
    min_samples: int = 1
    pad: Callable[[Any, int], Any] | None = None
    full: int = 0
    arrangement: str | None = None

    def batch(self, request: BatchRequest) -> Any:
        """Return the batch of ``request``; () for one without samples (an empty lane)."""
        if request.start == request.stop:
            return ()
        keys = self.places(request) if self.order.repeats else None
        return self._filled(self.reader.batch(request.epoch, self.indices(request), request.start, keys), request.size)

    def _filled(self, batch: Any, size: int) -> Any:
        if self.pad is None or size >= self.full or isinstance(batch, Unreadable):
            return batch
        return self.pad(batch, self.full)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.dataset, self.collate, self.seed, self.skipped, self.min_samples)

    def indices(self, request: BatchRequest) -> Indices:
        """Return the samples of ``request``: shape [size]."""
        return self._taken(request, lambda start, stop: self.order.slice(request.epoch, start, stop))

    def places(self, request: BatchRequest) -> Indices:
        """Return the positions of those samples in the epoch: shape [size]."""
        return self._taken(request, np.arange)

    def _taken(self, request: BatchRequest, span: Callable[[int, int], Indices]) -> Indices:
        """Return ``span(start, stop)`` of the request, dealt to lanes and arranged."""
        if self.lanes is None:
            values = span(request.start, request.stop)
        else:
            assert request.window is not None, "the items of a step can be dealt, and only they"
            first, stop = request.window
            values = span(first, stop)[deal(stop - first, self.lanes)[request.start - first : request.stop - first]]
        if self.arrangement == "reversed":
            return values[::-1].copy()
        if self.arrangement == "shuffled":
            key = derive_key("arrangement", self.seed, request.epoch, request.start)
            return np.random.default_rng(key).permutation(values)
        return values

    @property
    def gathers(self) -> bool:
        """Whether batches are rows of arrays, so that several can be gathered at once and cut apart."""
        return self.arrangement is None and type(self.dataset) is ArrayDataset

    @property
    def is_at_hand(self) -> bool:
        """Whether batches are rows of arrays in memory."""
        return self.gathers and self.dataset.is_in_memory

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a sample if batches are rows of tensors that can be cut out of a larger gather; else 0."""
        if self.gathers:
            return int(self.dataset.row_bytes)
        return self.reader.row_bytes if self.arrangement is None and self.skipped is None else 0

    def batches(self, requests: Sequence[BatchRequest], finish: Callable[[Any], Any]) -> list[Any]:
        """Make the batches of ``requests`` by one gather; ``finish`` sees that gather as a whole."""
        if len(requests) == 1 or not self.row_bytes:
            return [finish(self.batch(request)) for request in requests]
        slices = [self.indices(request) for request in requests]
        gathered = finish(self.reader.batch(requests[0].epoch, np.concatenate(slices), requests[0].start))
        sizes = [len(indices) for indices in slices]
        if isinstance(gathered, Tensor):  # a sample is not a tuple
            rows: Iterable[Any] = _cut(gathered, sizes)
        else:
            rows = map(type(gathered), zip(*(_cut(column, sizes) for column in gathered), strict=True))
        return [self._filled(row, size) if size else () for row, size in zip(rows, sizes, strict=True)]


def _cut(rows: Tensor, sizes: list[int]) -> list[Tensor]:
    """Cut ``rows`` at multiples of ``ALIGNMENT``, as other tensors begin: matrix products round by it.

    Those in page-locked memory are copied to a GPU anyway.
    """
    parts = rows.split(sizes)
    if rows.is_pinned():
        return list(parts)
    return [part if part.data_ptr() % ALIGNMENT == 0 else part.clone() for part in parts]


class InOrder:
    """The order of evaluation: index order."""

    samples = 2**62
    seed = 0
    repeats = False

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        return np.arange(start, stop, dtype=np.int64)


def fetch(dataset: Any, collate: Collate, seed: int, epoch: int, indices: Indices) -> Any:
    """Read one batch, as :class:`~lockstep.data.reader.Reader` reads it."""
    return Reader(dataset, collate, seed).batch(epoch, indices, 0)


def mapped(batch: Any, change: Callable[[Any], Any], method: str) -> Any:
    """Apply ``change`` to the tensors of ``batch`` and to objects with ``method``, such as ``PackedSequence``.

    Mappings, lists, tuples and dataclasses are copied and keep their type, so that ``batch`` stays as it is; anything
    else is passed on.
    """
    kind = type(batch)
    if isinstance(batch, Tensor) or (kind not in (list, tuple, dict) and callable(getattr(kind, method, None))):
        return change(batch)
    if kind is list or kind is tuple:
        return kind([mapped(value, change, method) for value in batch])
    if kind is dict:
        return {key: mapped(value, change, method) for key, value in batch.items()}
    if isinstance(batch, Mapping):
        parts = {key: mapped(value, change, method) for key, value in batch.items()}
        try:
            clone: Any = copy.copy(batch)  # with its default factory, say
            for key, value in parts.items():
                clone[key] = value
        except TypeError:  # it cannot be changed, or not copied
            return parts
        return clone
    if isinstance(batch, tuple):
        values = [mapped(value, change, method) for value in batch]
        return kind(*values) if hasattr(batch, "_fields") else kind(values)
    if isinstance(batch, list):
        clone = copy.copy(batch)
        clone[:] = [mapped(value, change, method) for value in batch]
        return clone
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        clone = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(clone, field.name, mapped(getattr(batch, field.name), change, method))
        return clone
    return batch
