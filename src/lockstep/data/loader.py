"""Loaders: batches of requests, in the training thread, from a thread that gathers ahead, or from worker processes.

A user's data set may not be thread-safe, so only rows of arrays are gathered in a thread. Worker processes are those
of torch's ``DataLoader``.

A data set may change between epochs (a callback, a curriculum, ``set_epoch``). So nothing of an epoch is read before
its first batch is asked for, and worker processes, which have a copy of the data set, are started again in each epoch.
Whether a data set has changed cannot be known for less than that costs: its code may read any global variable.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby, islice, tee
from multiprocessing.synchronize import Semaphore
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lockstep._compat.torch import child_handler_set, worker_processes
from lockstep.data.handing import HandOverError, handed_over, received, short_socket_paths
from lockstep.data.order import WorkerInit
from lockstep.data.requests import BatchRequest, Source, mapped
from lockstep.errors import LockstepError
from lockstep.hardware import parent_death
from lockstep.planning import LoaderPlan
from lockstep.planning.loader import worth_trying

#: Called with the number of processes that was measured to be best, and a sentence.
Settled = Callable[[int, str], None]


def make_loader(
    source: Source,
    requests: Iterable[BatchRequest],
    plan: LoaderPlan,
    rank: int,
    *,
    largest: int,
    settled: Settled = lambda workers, text: None,
) -> Generator[Any, None, None]:
    """Yield the batch of every request, in order, loaded as the plan asks; it may be closed at any time.

    Args:
        largest: samples of the largest request that is to be expected.
        settled: called once a number of processes has been measured to be best.
    """
    if source.gathers and source.dataset.is_on_gpu:  # which a process that is forked from this one cannot use
        return _in_place(source, requests, as_is)
    if plan.num_workers > 0:
        return _by_workers(source, requests, plan, rank)
    # A plan may be of a machine with a GPU.
    pin = plan.pin_memory and torch.cuda.is_available()
    finish = _pinned if pin else as_is
    small = source.is_at_hand and largest * source.row_bytes <= IN_PLACE_BYTES
    # For a GPU, which computes meanwhile, a thread gathers other tensors ahead, too. On a CPU it would take its cores.
    if (source.gathers and not small) or (pin and source.reader.gathers_tensors):
        return _ahead(source, requests, plan.prefetch_factor, finish)
    if plan.most_workers and not source.gathers and not source.reader.gathers:
        return _adaptive(source, iter(requests), plan, rank, finish, settled)
    return _in_place(source, requests, finish)


def as_is(batch: Any) -> Any:
    return batch


def _pinned(batch: Any) -> Any:
    return mapped(batch, lambda leaf: leaf.pin_memory(), "pin_memory")


# In this process.

#: Batches gathered at once, if they do not have more bytes than fit into a cache together.
GATHER_BATCHES = 16
GATHER_BYTES = 2**22
#: Batches of at most this many bytes are gathered in the training thread: about 15 µs, less than a thread costs.
IN_PLACE_BYTES = 2**17


def _groups(source: Source, requests: Iterable[BatchRequest]) -> Iterator[list[BatchRequest]]:
    """Group ``requests`` by gather: one at first, so that the first step need not wait, then more, of one epoch.

    So the next epoch has changes that are made to the tensors between two epochs.
    """
    batches = 1
    for _, of_epoch in groupby(requests, key=attrgetter("epoch")):
        while group := list(islice(of_epoch, batches)):
            yield group
            size = max(1, max(request.size for request in group) * source.row_bytes)
            batches = min(2 * batches, GATHER_BATCHES, max(1, GATHER_BYTES // size)) if source.row_bytes else 1


def _in_place(
    source: Source, requests: Iterable[BatchRequest], finish: Callable[[Any], Any]
) -> Generator[Any, None, None]:
    """Yield batches made in the training thread, each when it is asked for; small ones of arrays several at a time."""
    for group in _groups(source, requests):
        yield from source.batches(group, finish)


def _ahead(
    source: Source, requests: Iterable[BatchRequest], depth: int, finish: Callable[[Any], Any]
) -> Generator[Any, None, None]:
    """Gather rows of arrays in one thread, ``depth`` gathers of an epoch ahead: a gather releases the GIL."""
    pending = deque[Future[list[Any]]]()
    thread = ThreadPoolExecutor(1, "lockstep-loader")
    try:
        for _, of_epoch in groupby(requests, key=attrgetter("epoch")):
            groups = _groups(source, of_epoch)
            while True:
                for group in islice(groups, max(1, depth) - len(pending)):
                    pending.append(thread.submit(source.batches, group, finish))
                if not pending:
                    break
                yield from pending.popleft().result()
    finally:
        thread.shutdown(cancel_futures=True)


# As many processes as shorten a step.

#: Each way of loading is timed for at least this many seconds and batches.
TRIAL_S = 0.1
TRIAL_BATCHES = 8
#: First batches that are not timed: they allocate and compile.
WARM_UP = 2
#: Worker processes must save this part of a step, or they are ended.
GAIN = 0.05


class _Pace:
    """Mean seconds to load a batch, and from one batch to the next, without the pauses between epochs."""

    def __init__(self, warm_up: int) -> None:
        self._left = warm_up
        self._epoch = -1
        self._before = time.perf_counter()
        self._loading = 0.0
        self._whole = 0.0
        self._batches = 0

    def add(self, request: BatchRequest, loading: float = 0.0) -> bool:
        """Count a batch; whether enough of them have been counted."""
        now = time.perf_counter()
        whole = now - self._before
        self._before = now
        is_first = request.epoch != self._epoch
        self._epoch = request.epoch
        if self._left or is_first:
            self._left = max(0, self._left - 1)
            return False
        self._loading = self._loading + loading
        self._whole = self._whole + whole
        self._batches = self._batches + 1
        return self._batches >= TRIAL_BATCHES and self._whole >= TRIAL_S

    @property
    def step_s(self) -> float:
        return self._whole / self._batches

    @property
    def load_s(self) -> float:
        return self._loading / self._batches


def _adaptive(
    source: Source,
    requests: Iterator[BatchRequest],
    plan: LoaderPlan,
    rank: int,
    finish: Callable[[Any], Any],
    settled: Settled,
) -> Generator[Any, None, None]:
    """Yield batches, the first ones timed; up to ``plan.most_workers`` processes load them if this shortens a step.

    The batches are the same either way. Once per loader, the number of processes that :func:`.worth_trying` expects to
    help is started and timed, then twice as many while that shortens a step. The best number is kept; if a step is not
    shorter with any, or if they fail, they are ended.
    """
    alone = _Pace(WARM_UP)
    size = 0
    for request in requests:
        started = time.perf_counter()
        batch = finish(source.batch(request))
        loading = time.perf_counter() - started
        size = size or _bytes(batch)
        yield batch
        del batch
        if alone.add(request, loading):
            break
    else:
        return
    times = {0: alone.step_s}
    best = 0
    is_settled = False
    workers = worth_trying(alone.load_s, alone.step_s, size, plan.most_workers)
    while workers:
        worker_requests, requests = tee(requests)
        pace = _Pace(workers * plan.prefetch_factor + WARM_UP)
        trial_plan = plan.model_copy(update={"num_workers": workers})
        with contextlib.closing(_by_workers(source, worker_requests, trial_plan, rank)) as batches:
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                except Exception as error:  # the user did not request workers: without them, the run is only slower
                    if isinstance(error, LockstepError) and not isinstance(error, HandOverError):
                        raise
                    reason = (str(error) or type(error).__name__).splitlines()[0]
                    settled(0, f"Data are loaded in the training process: {_several(workers)} failed ({reason}).")
                    best = 0
                    is_settled = True
                    break
                request = next(requests)
                yield batch
                if is_settled or not pace.add(request):
                    continue
                times[workers] = step_s = pace.step_s
                helps = step_s <= (1 - GAIN) * times[best]
                best = workers if helps else best
                keeps_up = (1 - GAIN) * step_s < alone.step_s - alone.load_s
                is_settled = not helps or keeps_up or workers == plan.most_workers
                if is_settled:
                    settled(best, _settlement(best, times, alone))
                if best != workers or not is_settled:
                    break
        workers = best if is_settled else min(2 * workers, plan.most_workers)
    for request in requests:
        yield finish(source.batch(request))


def _settlement(best: int, times: dict[int, float], alone: _Pace) -> str:
    loaders = f"by {_several(best)}" if best else "in the training process"
    measured = ", ".join(f"{_ms(step_s)} with {_several(workers)}" for workers, step_s in times.items() if workers)
    loading = f"{_ms(alone.step_s)} with {_ms(alone.load_s)} of loading in the training process"
    return f"Data are loaded {loaders}: a step takes {loading}, {measured}."


def _several(workers: int) -> str:
    return f"{workers} worker process{'es' * (workers > 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _bytes(batch: Any) -> int:
    sizes: list[int] = []

    def note(leaf: Tensor) -> Tensor:
        sizes.append(getattr(leaf, "nbytes", 0))
        return leaf

    mapped(batch, note, "pin_memory")
    return sum(sizes)


# Worker processes. They are forks of a rank, which has threads. A lock that one of those holds at the moment of the
# fork is held in the worker for ever: a registration with glibc's ``atexit`` is enough
# (https://github.com/pytorch/pytorch/issues/130610). So a worker signals that it has started; if not, it is replaced.

#: How long workers may take to start, which takes milliseconds, before they are replaced, in seconds. After the last
#: try their batches are waited for without a limit.
START_S = (10.0, 20.0)


class _ByRequest:
    """The data set of worker processes; its keys are requests."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, request: BatchRequest) -> Any:
        try:
            return handed_over(self._source.batch(request))
        except LockstepError as error:  # torch would keep its text alone
            error.add_note(f"In a loader worker:\n{traceback.format_exc()}")
            return error


def _start(init: WorkerInit, started: Semaphore, worker_id: int) -> None:
    """Initialise a worker (``worker_init_fn``) and report that it has started."""
    try:
        init(worker_id)
        torch.zeros(1).share_memory_()  # as the first batch will be: what torch registers then, it registers now
    finally:
        started.release()


def _by_workers(
    source: Source, requests: Iterable[BatchRequest], plan: LoaderPlan, rank: int
) -> Generator[Any, None, None]:
    """Yield batches of worker processes, which are forks of this one at the start of each epoch."""
    for epoch, of_epoch in groupby(requests, key=attrgetter("epoch")):
        with loader_processes():
            iterator = _started(source, of_epoch, plan, WorkerInit(source.seed, rank, epoch))
            try:
                for batch in iterator:
                    yield received(batch)
            finally:
                del iterator  # ends DataLoader's workers


def _started(source: Source, requests: Iterable[BatchRequest], plan: LoaderPlan, init: WorkerInit) -> Any:
    """Start DataLoader's workers and return its iterator."""
    if multiprocessing.get_start_method() != "fork":
        return _forked(source, requests, plan, init)
    for patience_s in START_S:
        started = multiprocessing.Semaphore(0)
        requests, worker_requests = tee(requests)
        iterator = _forked(source, worker_requests, plan, partial(_start, init, started))
        workers = worker_processes(iterator)
        if _are_up(started, workers, patience_s):
            return iterator
        warnings.warn(
            f"a loader worker did not start within {patience_s:g} s, so all are started again; "
            "it may have been forked while another thread held a lock",
            RuntimeWarning,
            stacklevel=2,
        )
        del iterator
        for worker in workers:
            worker.kill()
            worker.join()
    return _forked(source, requests, plan, init)


def _forked(source: Source, requests: Iterable[BatchRequest], plan: LoaderPlan, init: Callable[[int], None]) -> Any:
    from torch.utils.data import DataLoader

    loader: DataLoader[Any] = DataLoader(
        _ByRequest(source),  # type: ignore[arg-type]
        sampler=requests,
        batch_size=None,  # a key is a whole batch already
        collate_fn=as_is,  # the default would look through each batch for arrays
        num_workers=plan.num_workers,
        prefetch_factor=plan.prefetch_factor,
        pin_memory=plan.pin_memory and torch.cuda.is_available(),
        worker_init_fn=init,
    )
    with parent_death.sigterm_held_back():
        return iter(loader)


def _are_up(started: Semaphore, workers: list[Any], patience_s: float) -> bool:
    """Wait for the start of all ``workers``; ``False`` after ``patience_s``. A dead worker is reported elsewhere."""
    until = time.monotonic() + patience_s
    for _ in workers:
        while not started.acquire(timeout=0.05):
            if not all(worker.is_alive() for worker in workers):
                return True
            if time.monotonic() > until:
                return False
    return True


@contextlib.contextmanager
def loader_processes() -> Iterator[None]:
    """Enclose the use of ``DataLoader``'s workers, so that they can hand over batches with a long ``TMPDIR``.

    DataLoader never removes its SIGCHLD handler, so the caller's handler is restored here.
    """
    before = signal.getsignal(signal.SIGCHLD)
    was_set = child_handler_set()
    try:
        with short_socket_paths():
            yield
    finally:
        if threading.current_thread() is threading.main_thread() and not was_set:
            signal.signal(signal.SIGCHLD, before)
            child_handler_set(False)
