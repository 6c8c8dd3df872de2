"""A loader that begins in the training thread, and starts worker processes when that makes a step faster."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.data.nested import mapped
from lockstep.data.workers import WorkerLoader
from lockstep.plan import LoaderPlan
from lockstep.plan.workers import worth_trying

if TYPE_CHECKING:
    from lockstep.data.loader import Request, Source

#: Each way of loading is timed for at least so long, and for so many batches.
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
    """Times its first batches, and goes over to up to ``plan.most_workers`` processes if they shorten a step.

    The batches are the same either way: each follows from its request alone. Once per loader, a number of processes
    that :func:`lockstep.plan.workers.worth_trying` expects to help is started and timed; if a step is not shorter with
    them, they are ended.
    """

    def __init__(
        self,
        source: Source,
        requests: Iterable[Request],
        plan: LoaderPlan,
        rank: int,
        *,
        finish: Callable[[Any], Any],
        report: Callable[[str], None],
    ) -> None:
        self._source, self._plan, self._rank, self._finish = source, plan, rank, finish
        self._report = report
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
        """Batches by ``workers`` processes; returns the requests that are left when they do not help."""
        plan = self._plan.model_copy(update={"num_workers": workers})
        asked: deque[Request] = deque()
        pace = _Pace(workers * plan.prefetch_factor + WARM_UP)
        loading = f"a step takes {_ms(alone.step_s)} ms with {_ms(alone.load_s)} ms of loading in the training process"
        with contextlib.closing(WorkerLoader(self._source, _noted(requests, asked), plan, self._rank)) as loader:
            before, enough = time.perf_counter(), False
            for batch in loader:
                request = asked.popleft()
                yield batch
                if enough:
                    continue
                now = time.perf_counter()
                enough, before = pace.add(request, 0.0, now - before), now
                if enough:
                    found = f"{_ms(pace.step_s)} ms with {workers} worker process{'es' * (workers > 1)}"
                    if pace.step_s > (1 - GAIN) * alone.step_s:
                        self._report(f"Data are loaded in the training process: {loading}, {found}.")
                        break
                    self._report(f"Data are loaded by {workers} process{'es' * (workers > 1)}: {loading}, {found}.")
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
    return f"{seconds * 1000:.2g}" if seconds < 0.1 else f"{seconds * 1000:.0f}"
