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


class WorkerLoader:
    """Fetches in processes; one iterator spans all epochs when workers persist."""

    def __init__(self, source: Source, requests: Iterable[Request], plan: LoaderPlan, rank: int) -> None:
        self._source, self._requests, self._plan, self._rank = source, requests, plan, rank
        self._iterator: Any = None
        self._batches = self._walk()

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def _walk(self) -> Generator[Any, None, None]:
        if self._plan.persistent_workers:
            yield from self._run(self._requests)
            return
        for epoch, requests in groupby(self._requests, key=lambda request: request.epoch):
            yield from self._run(requests, epoch)

    def _run(self, requests: Iterable[Request], epoch: int = 0) -> Iterator[Any]:
        with child_signal_kept():
            self._iterator = self._begun(requests, WorkerInit(self._source.seed, self._rank, epoch))
            try:
                for batch in self._iterator:
                    if isinstance(batch, _Failed):
                        raise batch.raised()
                    yield batch
            finally:
                # Dropping the iterator is DataLoader's own way of ending its workers.
                self._iterator = None

    def _begun(self, requests: Iterable[Request], init: WorkerInit) -> Any:
        """DataLoader's iterator, its workers up and fetching."""
        if multiprocessing.get_start_method() != "fork":
            return self._forked(requests, init)
        for patience_s in START_S:
            reading, writing = os.pipe()
            requests, asked = tee(requests)
            with open(reading, "rb", buffering=0) as told:
                try:
                    iterator = self._forked(asked, _Told(init, writing))
                finally:
                    os.close(writing)
                up = _are_up(told.fileno(), self._plan.num_workers, patience_s)
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
        return self._forked(requests, init)

    def _forked(self, requests: Iterable[Request], init: WorkerInit | _Told) -> Any:
        from torch.utils.data import DataLoader

        loader: DataLoader[Any] = DataLoader(
            _ByRequest(self._source),  # type: ignore[arg-type]
            sampler=requests,
            batch_size=None,  # a key is a whole batch already
            collate_fn=_as_is,  # the default would look through each batch for arrays
            num_workers=self._plan.num_workers,
            prefetch_factor=self._plan.prefetch_factor,
            pin_memory=self._plan.pin_memory and torch.cuda.is_available(),
            worker_init_fn=init,
        )
        with parent_death.sigterm_held_back():
            return iter(loader)

    def close(self) -> None:
        self._batches.close()


def _as_is(batch: Any) -> Any:
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
