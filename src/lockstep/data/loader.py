"""Loaders: batches of requests, in the training thread, from a thread that gathers ahead, or from worker processes.

Without worker processes, batches are made in the training thread, since a user's data set may not be thread-safe. Rows
of Lockstep's own arrays are gathered ahead of the step in a thread where batches are large.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from lockstep.data.requests import Request, Source, mapped
from lockstep.data.workers import as_is, worker_batches
from lockstep.errors import LockstepError
from lockstep.planning import LoaderPlan
from lockstep.planning.loader import worth_trying

#: Each way of loading is timed for at least this many seconds and batches.
TRIAL_S, TRIAL_BATCHES = 0.1, 8
#: Batches at first that are not timed: what is allocated and compiled then happens once.
WARM_UP = 2
#: Worker processes must save this part of a step, or they are ended.
GAIN = 0.05


#: Called with the number of processes that was measured to be best, and a sentence.
Settled = Callable[[int, str], None]


class _Pace:
    """Mean seconds to load a batch, and from one batch to the next, without the pauses between epochs."""

    def __init__(self, warm_up: int) -> None:
        self._left, self._epoch = warm_up, -1
        self.loading = self.whole = 0.0
        self.batches = 0

    def add(self, request: Request, loading: float, whole: float) -> bool:
        """Count a batch; whether enough of them have been counted."""
        fresh, self._epoch = request.epoch == self._epoch, request.epoch
        if self._left or not fresh:
            self._left = max(0, self._left - 1)
            return False
        self.loading, self.whole, self.batches = self.loading + loading, self.whole + whole, self.batches + 1
        return self.batches >= TRIAL_BATCHES and self.whole >= TRIAL_S

    @property
    def step_s(self) -> float:
        return self.whole / self.batches

    @property
    def load_s(self) -> float:
        return self.loading / self.batches


@dataclass(frozen=True)
class _Adaptive:
    """Batches whose first ones are timed, and by up to ``plan.most_workers`` processes if these shorten a step.

    The batches are the same either way: each follows from its request alone. Once per loader, a number of processes
    that :func:`lockstep.planning.loader.worth_trying` expects to help is started and timed, then twice as many while
    that shortens a step. The best number is kept; if a step is not shorter with any, or if they fail, they are ended.
    """

    source: Source
    plan: LoaderPlan
    rank: int
    finish: Callable[[Any], Any]
    settled: Settled

    def batches(self, requests: Iterator[Request]) -> Generator[Any, None, None]:
        pace, size = _Pace(WARM_UP), 0
        before = time.perf_counter()
        for request in requests:
            started = time.perf_counter()
            batch = self.finish(self.source.batch(request))
            loaded = time.perf_counter()
            size = size or _bytes(batch)
            yield batch
            del batch
            now = time.perf_counter()
            enough, before = pace.add(request, loaded - started, now - before), now
            if enough:
                break
        else:
            return
        workers = worth_trying(pace.load_s, pace.step_s, size, self.plan.most_workers)
        if workers:
            requests = yield from self._tried(workers, pace, requests)
        for request in requests:
            yield self.finish(self.source.batch(request))

    def _tried(
        self, workers: int, alone: _Pace, requests: Iterator[Request]
    ) -> Generator[Any, None, Iterator[Request]]:
        """Batches by ``workers`` processes, or twice as many while that helps; returns what is left when none help."""
        times, best = {0: alone.step_s}, 0
        most, compute_s = self.plan.most_workers, alone.step_s - alone.load_s

        def stays(step_s: float) -> bool:
            """Whether the present number of processes is the best; called once it is timed."""
            nonlocal best
            if workers in times:
                return True
            times[workers] = step_s
            if step_s > (1 - GAIN) * times[best]:
                return False
            best = workers
            stays = workers == most or (1 - GAIN) * step_s < compute_s
            if stays:
                self._settle(best, times, alone)
            return stays

        while workers:
            left, error = yield from self._by(workers, requests, stays)
            if left is None:
                return iter(())
            requests = left
            if error is not None:  # they were not asked for: without them, the run is slower at most
                why = (str(error) or type(error).__name__).splitlines()[0]
                self.settled(0, f"Data are loaded in the training process: {_several(workers)} failed ({why}).")
                return requests
            if best != workers:
                self._settle(best, times, alone)
                workers = best
            else:
                workers = min(2 * workers, most)
        return requests

    def _by(
        self, workers: int, requests: Iterator[Request], stays: Callable[[float], bool]
    ) -> Generator[Any, None, tuple[Iterator[Request] | None, Exception | None]]:
        """Batches by ``workers`` processes until these fail or do not stay; returns the requests left and the error."""
        plan = self.plan.model_copy(update={"num_workers": workers})
        asked: deque[Request] = deque()
        pace, enough = _Pace(workers * plan.prefetch_factor + WARM_UP), False
        with contextlib.closing(worker_batches(self.source, _noted(requests, asked), plan, self.rank)) as batches:
            before = time.perf_counter()
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    return None, None
                except LockstepError:
                    raise
                except Exception as error:
                    return chain(asked, requests), error
                request = asked.popleft()
                yield batch
                if enough:
                    continue
                now = time.perf_counter()
                enough, before = pace.add(request, 0.0, now - before), now
                if enough and not stays(pace.step_s):
                    return chain(asked, requests), None

    def _settle(self, best: int, times: dict[int, float], alone: _Pace) -> None:
        where = f"by {_several(best)}" if best else "in the training process"
        found = ", ".join(f"{_ms(step_s)} with {_several(workers)}" for workers, step_s in times.items() if workers)
        loading = f"{_ms(alone.step_s)} with {_ms(alone.load_s)} of loading in the training process"
        self.settled(best, f"Data are loaded {where}: a step takes {loading}, {found}.")


def _several(workers: int) -> str:
    return f"{workers} worker process{'es' * (workers > 1)}"


def _noted(requests: Iterator[Request], asked: deque[Request]) -> Iterator[Request]:
    for request in requests:
        asked.append(request)
        yield request


def _bytes(batch: Any) -> int:
    sizes: list[int] = []

    def note(leaf: Tensor) -> Tensor:
        sizes.append(getattr(leaf, "nbytes", 0))
        return leaf

    mapped(batch, note, "pin_memory")
    return sum(sizes)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def make_loader(
    source: Source,
    requests: Iterable[Request],
    plan: LoaderPlan,
    rank: int,
    *,
    largest: int,
    settled: Settled = lambda workers, text: None,
) -> Generator[Any, None, None]:
    """The batch of every request, in order, loaded as the plan asks; it may be closed at any time.

    Args:
        largest: samples of the largest request that is to be expected.
        settled: called once a number of processes has been measured to be best.
    """
    if source.gathers and source.dataset.is_on_gpu:  # which a process that is forked from this one cannot use
        return _in_place(source, requests, as_is)
    if plan.num_workers > 0:
        return worker_batches(source, requests, plan, rank)
    # A plan may have been made where there was a GPU.
    pin = plan.pin_memory and torch.cuda.is_available()
    finish = _pinned if pin else as_is
    small = source.is_at_hand and largest * source.row_bytes <= IN_PLACE_BYTES
    # For a GPU, which computes meanwhile, a thread gathers other tensors ahead, too. On a CPU it would take its cores.
    if (source.gathers and not small) or (pin and source.reader.gathers_tensors):
        return _ahead(source, requests, plan.prefetch_factor, finish)
    if plan.most_workers and not source.gathers and not source.reader.gathers:
        return _Adaptive(source, plan, rank, finish, settled).batches(iter(requests))
    return _in_place(source, requests, finish)


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


def _in_place(source: Source, requests: Iterable[Request], finish: Callable[[Any], Any]) -> Generator[Any, None, None]:
    """Batches made in the training thread, each when it is asked for; small ones of arrays several at a time.

    A thread beside it would read a data set that validation reads at the same time, through the same file perhaps. For
    small arrays it would wait for the interpreter's lock, and make the step wait for it, longer than a gather takes.
    """
    for group in _groups(source, requests):
        yield from source.batches(group, finish)


def _ahead(
    source: Source, requests: Iterable[Request], depth: int, finish: Callable[[Any], Any]
) -> Generator[Any, None, None]:
    """Gathers rows of arrays in one thread, ``depth`` gathers ahead: a gather releases the GIL.

    Waking another thread costs more than gathering a small batch, so arrays are gathered several at a time.
    """
    ready: SimpleQueue[list[Any] | BaseException] = SimpleQueue()
    # SimpleQueue is implemented in C: a semaphore of tokens costs a fifth of threading.Semaphore.
    tokens: SimpleQueue[bool] = SimpleQueue()

    def work() -> None:
        try:
            for group in _groups(source, requests):
                if not tokens.get():
                    return
                ready.put(source.batches(group, finish))
            ready.put(StopIteration())
        except BaseException as error:  # handed to the training thread, which raises it
            ready.put(error)

    for _ in range(max(1, depth)):
        tokens.put(True)
    thread = threading.Thread(target=work, name="lockstep-loader", daemon=True)
    thread.start()
    try:
        while not isinstance(batches := ready.get(), BaseException):
            yield from batches
            tokens.put(True)
        if not isinstance(batches, StopIteration):
            raise batches
    finally:
        while thread.is_alive():  # it may hold real tokens before it meets the closing one
            tokens.put(False)
            thread.join(timeout=0.05)


def _pinned(batch: Any) -> Any:
    return mapped(batch, lambda leaf: leaf.pin_memory(), "pin_memory")
