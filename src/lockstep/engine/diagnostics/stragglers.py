"""How fast a run is: its throughput, every rank's step time, waiting and memory, and the rank that the others wait for.

All ranks of a synchronous step end it together, so their step times do not name the slow one. It shows in how long it
works before it waits: until its last gradient is ready. One step in each log interval is timed so, by hooks on the
parameters that exist in this step alone. The numbers are gathered asynchronously and read an interval later.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.engine.distributed.staging import between, moment
from lockstep.engine.rank_context import RankContext
from lockstep.events import RanksLogged, RankState


class Mark(NamedTuple):
    """A reading of the counters; an interval begins at one."""

    seconds: float
    samples: int
    waited_s: float


class Speed(NamedTuple):
    """What happened since a mark."""

    samples_per_s: float
    data_wait_share: float
    seconds: float


class Throughput:
    """Counts samples and waiting; any number of intervals may be open at once. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._samples = 0
        self._waited_s = 0.0
        self._paused_s = 0.0
        self._pause_began: float | None = None

    def add(self, samples: int, waited_s: float = 0.0) -> None:
        """Add a step: ``samples`` over all ranks, ``waited_s`` seconds of it spent waiting for input."""
        self._samples += samples
        self._waited_s += waited_s

    def mark(self) -> Mark:
        return Mark(self._clock() - self._paused_s, self._samples, self._waited_s)

    def since(self, mark: Mark) -> Speed:
        """Compute the speed from ``mark`` until now; zeros when no time has passed."""
        now = self.mark()
        seconds = now.seconds - mark.seconds
        if seconds <= 0:
            return Speed(0.0, 0.0, 0.0)
        share = (now.waited_s - mark.waited_s) / seconds
        return Speed((now.samples - mark.samples) / seconds, min(1.0, max(0.0, share)), seconds)

    def pause(self) -> None:
        """Leave the time until :meth:`unpause` out of every open interval: evaluation is not training."""
        self.unpause()
        self._pause_began = self._clock()

    def unpause(self) -> None:
        if self._pause_began is not None:
            self._paused_s += self._clock() - self._pause_began
            self._pause_began = None


#: Rows by which a slow rank is determined.
JUDGED_ROWS = 5
#: Least work of a slow rank, as a multiple of the median of the other ranks.
SLOW_RATIO = 1.3
#: Least excess over that median, as a share of the step.
SLOW_SHARE = 0.1
#: Least excess over that median, in seconds.
SLOW_S = 1e-3

#: It reads two files when it is made.
_process = lru_cache(maxsize=1)(psutil.Process)


class OwnTime:
    """Times one step of this rank until its last gradient; on a GPU by events, without waiting for it.

    On a CPU, the time in which other processes had the core is left out: it says how busy a machine is, not which rank
    is slow.
    """

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]], device: torch.device) -> None:
        self._parameters = parameters
        self._device = device
        self._began: Any = None
        self._marked: Any = None
        #: At the start of the step, and at its last gradient so far.
        self._queued_s = (0.0, 0.0)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def start(self) -> None:
        """Begin the step that :meth:`stop` ends."""
        self.stop()
        self._began = moment(self._device)
        self._queued_s = (queued_s(), 0.0)
        trained = [p for p in self._parameters() if p.requires_grad]  # now: it may change between steps
        self._hooks = [p.register_post_accumulate_grad_hook(self._mark) for p in trained]

    def _mark(self, _: Tensor) -> None:
        # Here and not in stop(): after the last gradient this rank waits for the others, and then for a core.
        if self._device.type == "cpu":
            self._queued_s = (self._queued_s[0], queued_s())
        self._marked = moment(self._device)

    def stop(self) -> float:
        """Return seconds, or NaN when no gradient came; waits for the GPU."""
        for hook in self._hooks:
            hook.remove()
        marked = self._marked
        self._hooks = []
        self._marked = None
        if marked is None:
            return math.nan
        if isinstance(marked, float):
            return max(0.0, between(self._began, marked) - (self._queued_s[1] - self._queued_s[0]))
        marked.synchronize()
        return between(self._began, marked)


def queued_s() -> float:
    """Return seconds in which this thread, ready to run, waited for a core; 0 where the kernel does not count."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0


class RankWatch:
    """Gathers every rank's state. All methods are collective; rank 0 emits.

    The work of a rank ends with the gradients of ``parameters()``; without any it is not timed.
    """

    def __init__(
        self, rank: RankContext, parameters: Callable[[], Iterable[nn.Parameter]], speed: Throughput, step: int
    ) -> None:
        self._rank = rank
        self._collectives = rank.collectives
        self._device = rank.device
        self._own = OwnTime(parameters, rank.device) if rank.collectives.size > 1 else None
        self._pending: tuple[int, int, list[Tensor], dist.Work | None] | None = None
        self._history: deque[tuple[RankState, ...]] = deque(maxlen=JUDGED_ROWS)
        self._named: set[int] = set()
        self._speed = speed
        self._mark = speed.mark()
        self._step = step

    def before_logged_step(self) -> None:
        if self._own is not None:
            self._own.start()

    def log(self, step: int, epoch: int) -> None:
        """Send this rank's numbers since the last call, and emit what all ranks sent at that one."""
        speed = self._speed.since(self._mark)
        steps = max(1, step - self._step)
        self._mark = self._speed.mark()
        self._step = step
        step_s = speed.seconds / steps
        own_s = self._own.stop() if self._own is not None else math.nan
        row = torch.tensor([step_s, speed.data_wait_share * step_s, own_s, *memory(self._device)], dtype=torch.float64)
        self.flush()
        if self._collectives.group is None:
            self._pending = step, epoch, [row], None
            self.flush()
            return
        rows = [torch.empty_like(row) for _ in range(self._collectives.size)]
        work = dist.all_gather(rows, row, group=self._collectives.group, async_op=True)
        self._pending = step, epoch, rows, work

    def end_epoch(self, step: int, epoch: int) -> None:
        """Log this step too, if that has not been done; on a GPU, reset the peaks."""
        if step != self._step:
            self.log(step, epoch)
        self.flush()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def flush(self) -> None:
        """Wait for a gather in flight, and emit its row."""
        if self._pending is None:
            return
        step, epoch, rows, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        if not self._collectives.is_main:
            return
        ranks = tuple(_state(rank, row.tolist()) for rank, row in enumerate(rows))
        if all(state.own_s is not None for state in ranks):
            self._history.append(ranks)
        slow, message = slow_rank(self._history) or (None, "")
        self._rank.sink.emit(RanksLogged(self._rank.attempt, step, epoch, ranks, slow))
        if slow is not None and slow not in self._named:
            self._named.add(slow)
            self._rank.note("slow_rank", message, "warning")


def memory(device: torch.device) -> tuple[float, float, float]:
    """Return bytes in use, reserved (NaN on a CPU) and at most, of this process on ``device``."""
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
        return float(allocated), float(reserved), float(torch.cuda.max_memory_allocated(device))
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss (getrusage(2))
    resident = _process(os.getpid()).memory_info().rss
    # The kernel counts the peak in batches, so it may lag a little behind.
    return float(resident), math.nan, float(max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit))


def slow_rank(history: Sequence[Sequence[RankState]]) -> tuple[int, str] | None:
    """Return the rank whose work delays the others, and a message with its speed and whether its input is the cause.

    By medians over the last rows in which every rank's ``own_s`` is known; ``None`` when ranks are even, or there are
    too few rows, or one rank.
    """
    if len(history) < JUDGED_ROWS or len(history[0]) < 2:
        return None
    work_s = [statistics.median(state.own_s or 0.0 for state in per_rank) for per_rank in zip(*history, strict=True)]
    slow = max(range(len(work_s)), key=work_s.__getitem__)
    others_s = statistics.median(seconds for rank, seconds in enumerate(work_s) if rank != slow)
    delay = work_s[slow] - others_s
    step_s = statistics.median(ranks[slow].step_s for ranks in history)
    if work_s[slow] <= SLOW_RATIO * others_s or delay <= max(SLOW_SHARE * step_s, SLOW_S):
        return None
    waits = statistics.median(ranks[slow].wait_s for ranks in history)
    by_input = f" ({waits * 1000:.3g} ms of it waiting for input)" if waits > delay / 2 else ""
    return slow, (
        f"rank {slow} is slow: it works {work_s[slow] * 1000:.3g} ms on a step{by_input}, the others "
        f"{others_s * 1000:.3g} ms, and they wait for it"
    )


def _state(rank: int, values: Sequence[float]) -> RankState:
    step_s, wait_s, own_s, used, reserved, peak = values
    reserved_gb = None if math.isnan(reserved) else round(reserved / 1e9, 3)
    work_s = None if math.isnan(own_s) else own_s
    return RankState(rank, step_s, wait_s, work_s, round(used / 1e9, 3), reserved_gb, round(peak / 1e9, 3))
