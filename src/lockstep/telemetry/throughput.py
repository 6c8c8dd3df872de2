"""How fast a run is: samples per second, and the share of time spent waiting for input."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Mark(NamedTuple):
    """A reading of the counters; a window begins at one."""

    seconds: float
    samples: int
    waited_s: float


class Speed(NamedTuple):
    """What happened since a mark."""

    samples_per_s: float
    data_wait_share: float
    seconds: float


class Throughput:
    """Counts samples and waiting; any number of windows may be open at once.

    ::

        speed = Throughput()
        interval = speed.mark()
        ...                                     # every step
        speed.add(samples, waited_s)
        ...                                     # every log interval
        samples_per_s, data_wait_share, seconds = speed.since(interval)
        interval = speed.mark()

    Args:
        clock: seconds from any fixed point; monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._samples = 0
        self._waited_s = 0.0
        self._paused_s = 0.0

    def add(self, samples: int, waited_s: float = 0.0) -> None:
        """A step is done: ``samples`` over all ranks, ``waited_s`` seconds of it spent waiting for input."""
        self._samples += samples
        self._waited_s += waited_s

    def mark(self) -> Mark:
        return Mark(self._clock() - self._paused_s, self._samples, self._waited_s)

    def since(self, mark: Mark) -> Speed:
        """Speed from ``mark`` until now; zeros when no time has passed."""
        now = self.mark()
        seconds = now.seconds - mark.seconds
        if seconds <= 0:
            return Speed(0.0, 0.0, 0.0)
        share = (now.waited_s - mark.waited_s) / seconds
        return Speed((now.samples - mark.samples) / seconds, min(1.0, max(0.0, share)), seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of this block out of every open window: evaluation is not training."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - start
