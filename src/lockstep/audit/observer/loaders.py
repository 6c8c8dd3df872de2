"""Observe data loaders: passes over a data set, indices of their batches, random numbers that samples draw."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from lockstep._compat.observation import NEXT_INDEX, RESET, LoaderIterator, MapFetcher
from lockstep.audit.observer.record import Patches, Recorder, guarded, libraries_above, script_line

#: Indices recorded by one process; a pass that has more is judged by those.
MOST_INDICES = 500_000
#: Batches of a pass and worker whose random state is compared.
MOST_DRAWS = 3
#: Largest subset whose indices are recorded.
MOST_SUBSET = 20_000


class LoaderObserver:
    """Writes a record for each loader, pass and batch.

    ``should_stop(steps of the pass)`` ends a training pass early.
    """

    def __init__(self, recorder: Recorder, patches: Patches, should_stop: Callable[[int], bool]) -> None:
        self.recorder = recorder
        self.should_stop = should_stop
        self.passes = 0
        self.current: Any = None
        self._indices = 0
        self._fetches = 0
        self._lines: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
        patches.after(DataLoader, "__init__", self._note_loader)
        patches.before(LoaderIterator, "__init__", self._begin)
        patches.before(LoaderIterator, RESET, self._begin_again)
        patches.after(LoaderIterator, NEXT_INDEX, self._note_index)
        patches.replace(LoaderIterator, "__next__", self._yielded)
        patches.replace(MapFetcher, "fetch", self._fetched)

    def on_step(self) -> None:
        """Count an optimizer step in the pass whose batch was read last."""
        if self.current is not None:
            self.current.lockstep_steps += 1

    def on_inference(self) -> None:
        """Note that a model reads the current pass without gradients."""
        current = self.current
        if current is not None and not current.lockstep_infers:
            current.lockstep_infers = True
            self.recorder.write({"t": "inference", "pass": current.lockstep_pass})

    def batches_left(self) -> int | None:
        """Return how many batches the current pass has left; ``None``: unknown."""
        return None if self.current is None else self.current.lockstep_left

    def _note_loader(self, _: None, loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        self._lines[loader] = script_line()

    def _begin_again(self, iterator: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._begin(iterator, loader)

    def _begin(self, iterator: Any, loader: Any, *args: Any) -> None:
        self.passes += 1
        self._fetches = 0
        iterator.lockstep_pass = self.passes
        iterator.lockstep_steps = 0
        iterator.lockstep_infers = False
        iterator.lockstep_indices = []
        iterator.lockstep_left = None
        iterator.lockstep_batches = 0
        dataset = loader.dataset
        is_map = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__")
        batches = len(loader.batch_sampler or loader.sampler) if is_map else None
        iterator.lockstep_left = batches
        sampler = _innermost_sampler(loader)
        self.recorder.write(
            {
                "t": "pass",
                "pass": self.passes,
                "batch_sampler": type(loader.batch_sampler).__name__,
                "batches": batches,
                "size": len(dataset) if is_map else None,
                "dataset": type(dataset).__name__,
                "content": content_hash(dataset),
                "subset": subset_indices(dataset),
                "sampler": type(sampler).__name__,
                "drops": bool(loader.drop_last or getattr(sampler, "drop_last", False)),
                "replaces": bool(getattr(sampler, "replacement", False)),
                "made": self._lines.get(loader),
                "site": script_line(),
                "through": libraries_above(),
            }
        )

    def _note_index(self, index: Any, iterator: Any) -> None:
        iterator.lockstep_indices.append(index)

    def _yielded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(iterator: Any) -> Any:
            if self.should_stop(iterator.lockstep_steps):
                self.recorder.write({"t": "cut", "pass": iterator.lockstep_pass})
                raise StopIteration
            try:
                batch = original(iterator)
            except StopIteration:
                self.recorder.write({"t": "done", "pass": iterator.lockstep_pass})
                raise
            guarded(self._note_batch, self.recorder)(iterator)
            return batch

        return step

    def _note_batch(self, iterator: Any) -> None:
        self.current = iterator
        iterator.lockstep_batches += 1
        if iterator.lockstep_left is not None:
            iterator.lockstep_left -= 1
        index = iterator.lockstep_indices.pop(0) if iterator.lockstep_indices else None
        indices = _plain(index)
        self._indices += len(indices or ())
        if self._indices > MOST_INDICES:
            indices = None
        record = {"t": "batch", "pass": iterator.lockstep_pass, "i": indices, "grad": torch.is_grad_enabled()}
        self.recorder.write(record)

    def _fetched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(fetcher: Any, index: Any) -> Any:
            self._fetches += 1
            if self._fetches > MOST_DRAWS:
                return original(fetcher, index)
            before = guarded(_states, self.recorder)(fetcher.dataset) or {}
            batch = original(fetcher, index)
            guarded(self._note_draws, self.recorder)(fetcher.dataset, before)
            return batch

        return fetch

    def _note_draws(self, dataset: Any, before: dict[str, str]) -> None:
        after = _states(dataset)
        drawn = {name: state for name, state in before.items() if after.get(name) != state}
        if drawn:
            info = get_worker_info()
            worker = None if info is None else info.id
            self.recorder.write(
                {"t": "draw", "pass": self.passes, "worker": worker, "fetch": self._fetches, "states": drawn}
            )


def _plain(index: Any) -> list[int] | None:
    if isinstance(index, int):
        return [index]
    try:
        values = [int(value) for value in index]
    except (TypeError, ValueError):
        return None
    return None if any(value < 0 for value in values) else values


def _digest(content: Any) -> str:
    return hashlib.blake2b(content if isinstance(content, bytes) else repr(content).encode(), digest_size=8).hexdigest()


def _states(dataset: Any) -> dict[str, str]:
    """Return the hash of the state of each generator that a sample may draw from, by name."""
    states = {"random": _digest(random.getstate()), "torch": _digest(torch.get_rng_state().numpy().tobytes())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        states["numpy"] = _digest(state[1].tobytes() + bytes(str(state[2:]), "ascii"))
    for name, value in vars(dataset).items() if hasattr(dataset, "__dict__") else ():
        if isinstance(value, random.Random):
            states[f"self.{name}"] = _digest(value.getstate())
        elif isinstance(value, torch.Generator):
            states[f"self.{name}"] = _digest(value.get_state().numpy().tobytes())
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            states[f"self.{name}"] = _digest(value.bit_generator.state)
    return states


def content_hash(dataset: Any, depth: int = 3) -> str | None:
    """Hash a part of the tensors, arrays and lists that a data set holds; ``None``: it holds none of them."""
    parts = []
    for name, value in sorted(vars(dataset).items()) if hasattr(dataset, "__dict__") else ():
        for item in value if isinstance(value, tuple) else (value,):
            part = _part_of(item, depth)
            if part is not None:
                parts.append((name, part))
    return _digest(parts) if parts else None


def _part_of(value: Any, depth: int) -> Any:
    if isinstance(value, str | int | float | range):
        return value
    if isinstance(value, list):
        items = value[:: max(1, len(value) // 32)]
        plain = [item for item in items if isinstance(item, str | int | float)]
        return (len(value), plain, [content_hash(item, 0) for item in items[:4] if hasattr(item, "__dict__")])
    if hasattr(value, "shape") and hasattr(value, "reshape"):
        flat = value.reshape(-1)
        return (tuple(value.shape), [float(item) for item in flat[:: max(1, len(flat) // 32)]])
    if depth and hasattr(value, "__getitem__") and hasattr(value, "__dict__"):
        return content_hash(value, depth - 1)
    return None


def subset_indices(dataset: Any) -> list[int] | str | None:
    """Return which samples a :class:`Subset` has, their hash if they are many; ``None``: it is not one."""
    if not isinstance(dataset, Subset):
        return None
    indices = sorted(map(int, dataset.indices))
    return indices if len(indices) <= MOST_SUBSET else _digest(indices)


def _innermost_sampler(loader: Any) -> Any:
    """Return the sampler of samples, below samplers of batches and shards of these."""
    sampler = loader.batch_sampler or loader.sampler
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", sampler)
