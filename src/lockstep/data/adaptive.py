"""A loader that begins in the training thread, and starts worker processes when that makes a step faster."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor

from lockstep.data.nested import mapped
from lockstep.data.requests import Request, Source
from lockstep.data.workers import WorkerLoader
from lockstep.errors import LockstepError
from lockstep.planning import LoaderPlan
from lockstep.planning.loader import worth_trying

#: Each way of loading is timed for at least this many seconds and batches.
TRIAL_S, TRIAL_BATCHES = 0.1, 8
#: Batches at first that are not timed: what is allocated and compiled then happens once.
WARM_UP = 2
#: Worker processes must save this part of a step, or they are ended.
GAIN = 0.05


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


class AdaptiveLoader:
    """Times its first batches, and starts up to ``plan.most_workers`` processes if they shorten a step.

    The batches are the same either way: each follows from its request alone. Once per loader, a number of processes
    that :func:`lockstep.planning.loader.worth_trying` expects to help is started and timed; if a step is not shorter
    with them, or if they fail, they are ended.
    """

    def __init__(
        self,
        source: Source,
        requests: Iterable[Request],
        plan: LoaderPlan,
        rank: int,
        *,
        finish: Callable[[Any], Any],
        settled: Callable[[int, str], None],
    ) -> None:
        self._source, self._plan, self._rank, self._finish = source, plan, rank, finish
        self._settled = settled
        self._batches = self._walk(iter(requests))

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def close(self) -> None:
        self._batches.close()

    def _walk(self, requests: Iterator[Request]) -> Generator[Any, None, None]:
        pace, size = _Pace(WARM_UP), 0
        before = time.perf_counter()
        for request in requests:
            started = time.perf_counter()
            batch = self._finish(self._source.batch(request))
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
        workers = worth_trying(pace.load_s, pace.step_s, size, self._plan.most_workers)
        if workers:
            requests = yield from self._tried(workers, pace, requests)
        for request in requests:
            yield self._finish(self._source.batch(request))

    def _tried(
        self, workers: int, alone: _Pace, requests: Iterator[Request]
    ) -> Generator[Any, None, Iterator[Request]]:
        """Batches by ``workers`` processes; returns the requests that are left when they do not help, or fail."""
        plan = self._plan.model_copy(update={"num_workers": workers})
        asked: deque[Request] = deque()
        pace, enough = _Pace(workers * plan.prefetch_factor + WARM_UP), False
        several = f"{workers} worker process{'es' * (workers > 1)}"
        loading = f"a step takes {_ms(alone.step_s)} with {_ms(alone.load_s)} of loading in the training process"
        with contextlib.closing(WorkerLoader(self._source, _noted(requests, asked), plan, self._rank)) as loader:
            batches, before = iter(loader), time.perf_counter()
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                except LockstepError:
                    raise
                except Exception as error:  # they were not asked for: without them, the run is slower at most
                    why = (str(error) or type(error).__name__).splitlines()[0]
                    self._settled(0, f"Data are loaded in the training process: {several} failed ({why}).")
                    break
                request = asked.popleft()
                yield batch
                if enough:
                    continue
                now = time.perf_counter()
                enough, before = pace.add(request, 0.0, now - before), now
                if enough and pace.step_s > (1 - GAIN) * alone.step_s:
                    found = f"{_ms(pace.step_s)} with {several}"
                    self._settled(0, f"Data are loaded in the training process: {loading}, {found}.")
                    break
                if enough:
                    self._settled(workers, f"Data are loaded by {several}: {loading}, {_ms(pace.step_s)} with them.")
        return chain(asked, requests)


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
