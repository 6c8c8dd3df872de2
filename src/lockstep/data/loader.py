"""Input of one rank: from the plan's windows to batches.

There is no sampler. :func:`windows` walks the plan; each window names the samples of this rank as a
slice of the order; a :class:`lockstep.data.reader.Reader` turns indices into a batch. Without worker processes it does
so in the training thread: a user's data set need not bear another one. Rows of our own arrays, which do, are gathered
ahead of the step in a thread where batches are large.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from lockstep.data.adaptive import AdaptiveLoader
from lockstep.data.arrays import ArrayDataset
from lockstep.data.bucketed import deal
from lockstep.data.nested import mapped
from lockstep.data.reader import Collate, Indices, Reader
from lockstep.data.workers import WorkerLoader
from lockstep.plan import BatchPlan, LoaderPlan


class SampleOrder(Protocol):
    """A pure function from positions of an epoch to sample indices."""

    def slice(self, epoch: int, start: int, stop: int) -> Indices: ...


class Request(NamedTuple):
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
    requests: tuple[Request, ...]
    irregular: bool

    @property
    def size(self) -> int:
        """Samples of the whole step, over all ranks."""
        return self.stop - self.start


def windows(batch: BatchPlan, *, rank: int, epoch: int, position: int, epochs: int, ghosts: bool) -> Iterator[Window]:
    """Every window from (epoch, position) to the end of the last epoch, as rank ``rank`` sees it.

    Args:
        epoch: counted from 0.
        position: samples of that epoch already used.
        ghosts: give a rank without samples one to replay (for models whose forward is collective).
    """
    while epoch < epochs:
        span = batch.window(position)
        if span is None:
            epoch, position = epoch + 1, 0
            continue
        yield _window(batch, rank, epoch, span, ghosts)
        position = span[1]


def _window(batch: BatchPlan, rank: int, epoch: int, span: tuple[int, int], ghosts: bool) -> Window:
    start, stop = span
    spans, irregular = _layout(batch, rank, stop - start, ghosts)
    requests = tuple([Request(epoch, part, start + a, start + b, ghost, span) for part, a, b, ghost in spans])
    return Window(epoch, start, stop, requests, irregular)


@lru_cache(maxsize=64)
def _layout(
    batch: BatchPlan, rank: int, size: int, ghosts: bool
) -> tuple[tuple[tuple[int, int, int, bool], ...], bool]:
    """``(part, start, stop, ghost)`` of a rank's micro-batches in a window of ``size``, and whether it is irregular."""
    shares = batch.split(size)
    mine = shares[rank]
    most = max(map(len, shares))
    if batch.lanes is not None:
        return tuple([(rank * len(mine) + place, a, b, False) for place, (a, b) in enumerate(mine)]), False
    irregular = any(len(share) != most or any(a == b for a, b in share) for share in shares)
    empty = (0, 0)
    spans = [(place, *span, False) for place, span in enumerate((*mine, *[empty] * (most - len(mine))))]
    spans = [span if span[1] < span[2] else (span[0], 0, batch.least_part, True) for span in spans]
    spans = [span for span in spans if ghosts or not span[3]]
    return tuple(spans), irregular


@dataclass(frozen=True)
class Source:
    """Where batches come from: a data set, how its samples become a batch, and in which order they are taken.

    ``lanes``: the items of a step are dealt to so many parts in turn (:func:`lockstep.data.bucketed.deal`), for an
    order whose neighbours are alike; ``None`` leaves them in order.
    """

    dataset: Any
    collate: Collate
    seed: int
    order: SampleOrder
    lanes: int | None = None

    def batch(self, request: Request) -> Any:
        """The batch of ``request``; () for one without samples (an empty lane)."""
        if request.start == request.stop:
            return ()
        return self.reader.batch(request.epoch, self.indices(request), request.start)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.dataset, self.collate, self.seed)

    def indices(self, request: Request) -> Indices:
        """The samples of ``request``: shape [size]."""
        if self.lanes is None:
            return self.order.slice(request.epoch, request.start, request.stop)
        assert request.window is not None, "the items of a step can be dealt, and only they"
        first, stop = request.window
        dealt = deal(stop - first, self.lanes)[request.start - first : request.stop - first]
        return self.order.slice(request.epoch, first, stop)[dealt]

    @property
    def gathers(self) -> bool:
        """Whether batches are rows of arrays, so that several can be gathered at once and cut apart."""
        return type(self.dataset) is ArrayDataset

    @property
    def is_at_hand(self) -> bool:
        """Whether batches are rows of arrays in memory."""
        return self.gathers and self.dataset.is_in_memory

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample, where batches are rows of arrays; else 0."""
        return self.dataset.row_bytes if self.gathers else 0

    def batches(self, requests: Sequence[Request], finish: Callable[[Any], Any]) -> list[Any]:
        """The batches of ``requests``, made by one gather; ``finish`` sees that gather as a whole."""
        if len(requests) == 1 or not self.gathers:
            return [finish(self.batch(request)) for request in requests]
        slices = [self.indices(request) for request in requests]
        columns = finish(self.dataset.__getitems__(np.concatenate(slices)))
        sizes = [len(indices) for indices in slices]
        rows = zip(*(column.split(sizes) for column in columns), strict=True)
        return [row if size else () for row, size in zip(rows, sizes, strict=True)]


class InOrder:
    """The order of evaluation: index order."""

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        return np.arange(start, stop, dtype=np.int64)


def fetch(dataset: Any, collate: Collate, seed: int, epoch: int, indices: Indices) -> Any:
    """One batch, as :class:`~lockstep.data.reader.Reader` reads it."""
    return Reader(dataset, collate, seed).batch(epoch, indices, 0)


class Batches(Protocol):
    """Yields the batch of every request, in order; :meth:`close` may be called at any time."""

    def __iter__(self) -> Iterator[Any]: ...

    def close(self) -> None: ...


def make_loader(
    source: Source,
    requests: Iterable[Request],
    plan: LoaderPlan,
    rank: int,
    *,
    largest: int,
    settled: Callable[[int, str], None] = lambda workers, text: None,
) -> Batches:
    """The loader that the plan asks for.

    Args:
        largest: samples of the largest request that is to be expected.
        settled: called with the number of processes that the loader has measured to be best, and a sentence.
    """
    if plan.num_workers > 0:
        return WorkerLoader(source, requests, plan, rank)
    # A plan may have been made where there was a GPU.
    pin = plan.pin_memory and torch.cuda.is_available()
    small = source.is_at_hand and largest * source.row_bytes <= IN_PLACE_BYTES
    # For a GPU, which computes meanwhile, a thread gathers other tensors ahead, too. On a CPU it would take its cores.
    if (source.gathers and not small) or (pin and source.reader.gathers_tensors):
        return ThreadLoader(source, requests, depth=plan.prefetch_factor, pin=pin)
    if plan.most_workers and not source.gathers and not source.reader.gathers:
        return AdaptiveLoader(source, requests, plan, rank, finish=_pinned if pin else _as_is, settled=settled)
    return InPlaceLoader(source, requests, pin=pin)


#: Batches gathered at once, if they do not have more bytes than fit into a cache together.
GATHER_BATCHES, GATHER_BYTES = 16, 2**22
#: Batches of up to so many bytes are gathered where they are used: about 15 µs, less than two threads cost each other.
IN_PLACE_BYTES = 2**17


def _groups(source: Source, requests: Iterable[Request]) -> Iterator[list[Request]]:
    """``requests`` by gather: one at first, so that the first step need not wait, then more."""
    requests, most = iter(requests), 1
    while group := list(islice(requests, most)):
        yield group
        size = max(1, max(request.size for request in group) * source.row_bytes)
        most = min(2 * most, GATHER_BATCHES, max(1, GATHER_BYTES // size)) if source.gathers else 1


class InPlaceLoader:
    """Fetches in the training thread, each batch when it is asked for; small batches of arrays several at a time.

    A thread beside it would read a data set that validation reads at the same time, through the same file perhaps. For
    small arrays it would wait for the interpreter's lock, and make the step wait for it, longer than a gather takes.
    """

    def __init__(self, source: Source, requests: Iterable[Request], *, pin: bool = False) -> None:
        self._source, self._requests, self._finish = source, requests, _pinned if pin else _as_is

    def __iter__(self) -> Iterator[Any]:
        for group in _groups(self._source, self._requests):
            yield from self._source.batches(group, self._finish)

    def close(self) -> None:
        pass


class ThreadLoader:
    """Gathers rows of arrays in one thread, ``depth`` gathers ahead: a gather releases the GIL.

    Waking another thread costs more than gathering a small batch, so arrays are gathered several at a time.
    """

    def __init__(self, source: Source, requests: Iterable[Request], *, depth: int = 2, pin: bool = False) -> None:
        self._source, self._requests, self._pin = source, requests, pin
        self._ready: SimpleQueue[list[Any] | BaseException] = SimpleQueue()
        # SimpleQueue is implemented in C: a semaphore of tokens costs a fifth of threading.Semaphore.
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        for _ in range(max(1, depth)):
            self._tokens.put(True)
        self._thread = threading.Thread(target=self._work, name="lockstep-loader", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for group in _groups(self._source, self._requests):
                if not self._tokens.get():
                    return
                self._ready.put(self._source.batches(group, _pinned if self._pin else _as_is))
            self._ready.put(StopIteration())
        except BaseException as error:  # handed to the training thread, which raises it
            self._ready.put(error)

    def __iter__(self) -> Iterator[Any]:
        while True:
            batches = self._ready.get()
            if isinstance(batches, StopIteration):
                return
            if isinstance(batches, BaseException):
                raise batches
            yield from batches
            self._tokens.put(True)

    def close(self) -> None:
        self._tokens.put(False)
        while self._thread.is_alive():
            # The thread may hold real tokens before it meets the closing one.
            self._tokens.put(False)
            self._thread.join(timeout=0.05)


def _as_is(batch: Any) -> Any:
    return batch


def _pinned(batch: Any) -> Any:
    return mapped(batch, lambda leaf: leaf.pin_memory(), "pin_memory")
