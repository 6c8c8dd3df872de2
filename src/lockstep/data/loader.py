"""Loaders: batches of requests, in the training thread, from a thread that gathers ahead, or from worker processes.

Without worker processes, batches are made in the training thread, since a user's data set may not be thread-safe. Rows
of Lockstep's own arrays are gathered ahead of the step in a thread where batches are large.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from lockstep.data.adaptive import AdaptiveLoader
from lockstep.data.nested import mapped
from lockstep.data.requests import Request, Source
from lockstep.data.workers import WorkerLoader
from lockstep.planning import LoaderPlan


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
#: Batches of at most this many bytes are gathered in the training thread: about 15 µs, less than a thread costs.
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
