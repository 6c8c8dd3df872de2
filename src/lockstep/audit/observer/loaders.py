"""Observe data loaders: passes over a data set, indices of their batches, random numbers that samples draw."""

from __future__ import annotations

import hashlib
import random
import re
from contextlib import suppress
from reprlib import Repr
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from lockstep._compat.observation import NEXT_INDEX, RESET, LoaderIterator, MapFetcher
from lockstep.audit.observer.record import Observation, OpenPass, Recorder, script_line

#: Indices recorded by one process; later batches have none.
MAX_INDICES = 500_000
#: Batches of a pass and worker whose random state is compared.
MAX_DRAWS = 3


class LoaderObserver:
    """Writes a record for each pass and batch, and ends a pass after the recorder's number of optimizer steps."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._passes = 0
        self._indices = 0
        self._fetches = 0
        recorder.watch(DataLoader, "__init__", self._note_loader)
        recorder.watch(LoaderIterator, "__init__", self._begin)
        recorder.watch(LoaderIterator, RESET, self._begin)
        recorder.watch(LoaderIterator, NEXT_INDEX, self._note_index)
        recorder.watch(LoaderIterator, "__next__", self._read)
        recorder.watch(MapFetcher, "fetch", self._note_draws)

    def _note_loader(self, loader: Any, *args: Any, **kwargs: Any) -> Observation:
        yield
        loader.lockstep_line = script_line()

    def _begin(self, iterator: Any, loader: Any, first_iter: bool = False) -> Observation:
        if first_iter:  # a reset within the creation of the iterator
            return
        self._passes += 1
        self._fetches = 0
        data_pass = iterator.lockstep_pass = OpenPass(self._passes)
        dataset = loader.dataset
        outer_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        sampler = _innermost(outer_sampler)
        is_map = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__")
        if is_map:
            data_pass.left = len(outer_sampler)
        self.recorder.write(
            "pass",
            loader_pass=data_pass.number,
            batches=data_pass.left,
            size=len(dataset) if is_map else None,
            dataset=_digest(_CONTENT.repr(dataset)),
            subset=_digest(sorted(map(int, dataset.indices))) if isinstance(dataset, Subset) else None,
            samplers=[type(loader.batch_sampler).__name__, type(sampler).__name__],
            drops=bool(loader.drop_last or getattr(sampler, "drop_last", False)),
            replaces=bool(getattr(sampler, "replacement", False)),
            made=getattr(loader, "lockstep_line", None),
        )
        yield

    def _note_index(self, iterator: Any) -> Observation:
        indices = yield
        iterator.lockstep_pass.prefetched.append(indices)

    def _read(self, iterator: Any) -> Observation:
        data_pass: OpenPass | None = getattr(iterator, "lockstep_pass", None)
        if data_pass is not None and data_pass.left != 0 and data_pass.steps >= self.recorder.max_steps:
            self.recorder.write("cut", loader_pass=data_pass.number, is_script=False)
            raise StopIteration
        return self._note_batch(data_pass)

    def _note_batch(self, data_pass: OpenPass | None) -> Observation:
        yield
        if data_pass is None:  # an iterator that was made without the constructor of torch's
            return
        self.recorder.current_pass = data_pass
        data_pass.left = data_pass.left and data_pass.left - 1
        indices = _plain(data_pass.prefetched.pop(0)) if data_pass.prefetched else None
        self._indices += len(indices or ())
        indices = indices if self._indices <= MAX_INDICES else None
        data_pass.unused.append(indices)
        self.recorder.write("batch", indices=indices)

    def _note_draws(self, *_: Any) -> Observation:
        self._fetches += 1
        if self._fetches <= MAX_DRAWS:
            before = _generator_states()
            yield
            after = _generator_states()
            drawn = {name: state for name, state in before.items() if after.get(name) != state}
            worker = getattr(get_worker_info(), "id", None)
            self.recorder.write("draw", loader_pass=self._passes, worker=worker, fetch=self._fetches, states=drawn)


def _plain(index: Any) -> list[int] | None:
    with suppress(TypeError, ValueError):
        return [int(value) for value in np.atleast_1d(index)]
    return None


def _digest(content: Any) -> str:
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()


def _generator_states() -> dict[str, str]:
    """Return the hash of the state of each global generator, by name."""
    return {
        "random": _digest(random.getstate()),
        "torch": _digest(torch.get_rng_state().tolist()),
        "numpy": _digest(np.random.get_state(legacy=False)),
    }


class _ContentRepr(Repr):
    """Shows some of the tensors, arrays, lists and numbers that a data set and objects in it hold."""

    def repr_instance(self, value: Any, level: int) -> str:
        """Show the attributes of an object; of large tensors and arrays the corners."""
        if callable(value) or isinstance(value, ModuleType):
            return type(value).__name__
        if hasattr(value, "__dict__") and not hasattr(value, "__array__"):
            return type(value).__name__ + self.repr_dict(vars(value), level)
        return re.sub("0x[0-9a-f]+", "", repr(value))


_CONTENT = _ContentRepr()
_CONTENT.maxlist = _CONTENT.maxtuple = _CONTENT.maxdict = 16
_CONTENT.maxstring = 256


def _innermost(sampler: Any) -> Any:
    """Return the sampler of samples, below samplers of batches and shards of these."""
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", sampler)
