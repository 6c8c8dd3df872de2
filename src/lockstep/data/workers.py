"""Loader workers: processes that fetch batches, through torch's ``DataLoader``.

They are forks of a rank, which has threads. A lock that one of those holds at the moment of the fork is held in the
worker for ever: a registration with glibc's ``atexit`` is enough (https://github.com/pytorch/pytorch/issues/130610).
So a worker signals that it has started, and one that does not is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, tee
from multiprocessing.connection import wait
from typing import Any

import torch

from lockstep._compat.torch import child_handler_set, worker_processes
from lockstep.data.order import WorkerInit
from lockstep.data.requests import Request, Source
from lockstep.errors import LockstepError
from lockstep.hardware import parent_death
from lockstep.planning import LoaderPlan

#: How long workers may take to start, which takes milliseconds, before they are replaced, in seconds. After the last
#: try their batches are waited for without a limit.
START_S = (10.0, 20.0)


class _ByRequest:
    """What worker processes hold: a data set whose keys are requests."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, request: Request) -> Any:
        try:
            return self._source.batch(request)
        except LockstepError as error:  # torch would keep its text alone
            return _Failed(error, traceback.format_exc())


@dataclass(frozen=True)
class _Failed:
    """In the place of a batch: what a worker raised, and its traceback."""

    error: LockstepError
    traceback: str

    def raised(self) -> LockstepError:
        self.error.add_note(f"In a loader worker:\n{self.traceback}")
        return self.error


@dataclass(frozen=True)
class _Told:
    """A ``worker_init_fn`` that writes a byte to the pipe ``fd`` when it is through."""

    init: WorkerInit
    fd: int

    def __call__(self, worker_id: int) -> None:
        try:
            self.init(worker_id)
            torch.zeros(1).share_memory_()  # as the first batch will be: what torch registers then, it registers now
        finally:
            os.write(self.fd, b".")
            os.close(self.fd)


def worker_batches(
    source: Source, requests: Iterable[Request], plan: LoaderPlan, rank: int
) -> Generator[Any, None, None]:
    """Batches by worker processes; those that persist stay for all epochs."""
    if plan.persistent_workers:
        yield from _by_workers(source, requests, plan, WorkerInit(source.seed, rank, 0))
        return
    for epoch, of_epoch in groupby(requests, key=lambda request: request.epoch):
        yield from _by_workers(source, of_epoch, plan, WorkerInit(source.seed, rank, epoch))


def _by_workers(source: Source, requests: Iterable[Request], plan: LoaderPlan, init: WorkerInit) -> Iterator[Any]:
    with child_signal_kept():
        iterator = _begun(source, requests, plan, init)
        try:
            for batch in iterator:
                if isinstance(batch, _Failed):
                    raise batch.raised()
                yield batch
        finally:
            del iterator  # DataLoader's own way of ending its workers


def _begun(source: Source, requests: Iterable[Request], plan: LoaderPlan, init: WorkerInit) -> Any:
    """DataLoader's iterator, its workers up and fetching."""
    if multiprocessing.get_start_method() != "fork":
        return _forked(source, requests, plan, init)
    for patience_s in START_S:
        reading, writing = os.pipe()
        requests, asked = tee(requests)
        with open(reading, "rb", buffering=0) as told:
            try:
                iterator = _forked(source, asked, plan, _Told(init, writing))
            finally:
                os.close(writing)
            up = _are_up(told.fileno(), plan.num_workers, patience_s)
        if up:
            return iterator
        warnings.warn(
            f"a loader worker did not start within {patience_s:g} s, so all are started again; "
            "it may have been forked while another thread held a lock",
            RuntimeWarning,
            stacklevel=2,
        )
        workers = worker_processes(iterator)
        del iterator
        for worker in workers:
            worker.kill()
            worker.join()
    return _forked(source, requests, plan, init)


def _forked(source: Source, requests: Iterable[Request], plan: LoaderPlan, init: WorkerInit | _Told) -> Any:
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


def as_is(batch: Any) -> Any:
    return batch


def _are_up(reading: int, workers: int, patience_s: float) -> bool:
    """Whether a byte of each worker, or the pipe's end, is read in time: a worker that died is reported elsewhere."""
    until = time.monotonic() + patience_s
    while workers > 0:
        if not wait([reading], max(0.0, until - time.monotonic())):
            return False
        told = os.read(reading, workers)
        if not told:
            return True
        workers -= len(told)
    return True


@contextmanager
def child_signal_kept() -> Iterator[None]:
    """DataLoader installs a SIGCHLD handler for good; the process that training was called from gets its own back."""
    before, was_set = signal.getsignal(signal.SIGCHLD), child_handler_set()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and not was_set:
            signal.signal(signal.SIGCHLD, before)
            child_handler_set(False)
