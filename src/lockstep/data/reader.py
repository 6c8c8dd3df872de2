"""From the indices of a batch to the batch: one gather, or samples one by one, with keyed draws.

The global generators of ``random``, NumPy and torch are seeded for each sample that draws from them: 0.7 to 2 µs each.
Draws are seen by seeding with a known key and comparing the next number.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, repeat, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.data.arrays import draws_keyed, gather_of, is_hugging_face, leaf_of, leaves
from lockstep.data.collation import Kind, MixedKindsError, find_misfit, joined_kind, kind_of_batch
from lockstep.data.order import derive_key, mixed, sample_rng, words_of
from lockstep.errors import DataError, LockstepError, SampleError, TaskError

#: Its stubs lack two functions.
_np: Any = np.random


class Generator(NamedTuple):
    """A global generator; ``leave`` restores the state that ``enter`` returned."""

    enter: Callable[[], Any]
    leave: Callable[[Any], Any]
    seed: Callable[[int], Any]
    number: Callable[[], int]

    def first(self, key: int) -> int:
        """Return the first number after seeding with ``key``."""
        self.seed(key)
        return self.number()


#: Stands in for the caller's bit generator of NumPy, whose state takes 33 µs to read.
_BITS = np.random.MT19937(0)


def _enter_numpy() -> Any:
    bits = _np.get_bit_generator()
    _np.set_bit_generator(_BITS)
    return bits


def _seed_numpy(key: int) -> None:
    np.random.seed(key >> 32)  # torch takes the lower bits, for the same kind of generator


def _torch_number() -> int:
    return int(torch.randint(2**31, (), device="cpu"))


#: Seeded with keys in [0, 2**64).
GENERATORS = (
    Generator(random.getstate, random.setstate, random.seed, partial(random.getrandbits, 32)),
    Generator(_enter_numpy, _np.set_bit_generator, _seed_numpy, _BITS.random_raw),
    Generator(
        enter=torch.default_generator.get_state,
        leave=torch.default_generator.set_state,
        seed=torch.default_generator.manual_seed,
        number=_torch_number,
    ),
)


def states_of_generators() -> tuple[Any, ...]:
    """Return states of Python, NumPy and torch on the CPU: equal if nothing was drawn, not even half a normal pair."""
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


@lru_cache(maxsize=len(GENERATORS))
def _number_after_0(generator: Generator) -> int:
    return generator.first(0)


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    states = [generator.enter() for generator in GENERATORS]
    try:
        yield
    finally:
        for generator, state in zip(GENERATORS, states, strict=True):
            generator.leave(state)


def draw_keys(seed: int, epoch: int, indices: NDArray[np.int64]) -> list[int]:
    """Return the key of each sample's draws."""
    keys: list[int] = mixed(words_of(indices.astype(np.uint64), derive_key("draws", seed, epoch))).tolist()
    return keys


Indices = NDArray[np.int64]
Collate = Callable[[Sequence[Any]], Any]

#: Samples that are tried before a data set is taken to have none that can be read.
TRIED = 1000


class StreamEnded(DataError):
    """A stream failed and gives no more items: nothing to leave out and continue after."""


@dataclass(frozen=True)
class Unreadable:
    """Replaces a micro-batch without a readable sample. ``stand_in``: a batch of its size, which counts nothing."""

    stand_in: Any


class _SampleRequest(NamedTuple):
    epoch: int
    indices: Indices
    keys: Indices


class Reader:
    """Reads batches of ``dataset``.

    Draws of a sample are keyed by (seed, epoch, index); those of ``collate``, or of a ``__getitems__`` that returns a
    batch, by (seed, epoch, first position). Afterwards the generators have their previous states, except for the second
    normal number that NumPy's may hold. The first batch shows the generators that samples draw from; only those are
    seeded for each sample. After a draw from another one, that batch is read again, seeded. ``sample(index, rng)`` is
    supported behind ``Subset`` and ``ConcatDataset``, too.

    Args:
        skipped: the file in which samples that cannot be read are recorded, and left out; ``None``: they raise.
        min_samples: a batch with fewer readable samples, on which BatchNorm could not train, is left out.
    """

    def __init__(
        self, dataset: Any, collate: Collate, seed: int, skipped: Path | None = None, min_samples: int = 1
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._skipped = skipped
        self._least = min_samples
        self._collate = collate
        self._gather = gather_of(dataset, collate)
        self._has_sample = any(map(draws_keyed, leaves(dataset)))
        self._has_items = not self._has_sample and callable(getattr(dataset, "__getitems__", None))
        self._readable: list[Any] = []  # the latest sample that was; only where others may be left out
        self._gives_list: bool | None = None  # what __getitems__ returns; not known yet
        self._seeded: frozenset[Generator] | None = None  # seeded for each sample; None: no batch was read yet
        self._kind: Kind = None  # of the samples that were collated; None: none yet

    @property
    def gathers(self) -> bool:
        """Whether batches are rows of tensors."""
        return self._gather is not None

    @property
    def gathers_tensors(self) -> bool:
        """Whether those tensors lie ready: a thread may read them beside the step, and beside validation."""
        return self.gathers and not is_hugging_face(self._dataset) and not hasattr(self._dataset, "is_plain")

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample of tensors in memory; else 0."""
        if not self.gathers_tensors or self._gather is None or not len(self._dataset):
            return 0
        try:
            columns = self._gather(np.zeros(1, dtype=np.int64))
        except Exception:  # as the first batch will show, which is read one by one then
            return 0
        return sum(column.nbytes for column in ([columns] if isinstance(columns, Tensor) else columns))

    @property
    def gives_whole_batches(self) -> bool:
        """Whether a batch is one gather from memory. May read a sample."""
        if not self.gathers and self._has_items and self._gives_list is None:
            self._readable_sample()
        return self.gathers_tensors or self._gives_list is False

    def batch(self, epoch: int, indices: Indices, position: int, keys: Indices | None = None) -> Any:
        """Read the samples ``indices`` as a batch, which begins at ``position`` of ``epoch``.

        ``keys``: keys of the samples' draws, in place of their indices, if a sample may occur twice.

        Raises:
            SampleError: the data set failed, or ``collate``.
        """
        if self._gather is not None:
            try:
                return self._gather(indices)
            except Exception:  # one by one, they show which of them it is
                self._gather = None
        request = _SampleRequest(epoch, indices, indices if keys is None else keys)
        with _generators_kept():
            items, drawn = self._samples(request, self._seeded)
            if drawn and self._seeded is not None:
                items, drawn = self._samples(request, None)
            self._seeded = drawn | (self._seeded or frozenset())
            if items is None or self._collate is not default_collate:  # which draws nothing
                key = derive_key("batch draws", self._seed, epoch, position)
                for generator in GENERATORS:
                    generator.seed(key)
            return self._collated(items, indices)

    def _samples(
        self, request: _SampleRequest, seeded: frozenset[Generator] | None
    ) -> tuple[list[Any] | None, frozenset[Generator]]:
        """Read samples, ``None`` if they are to be read as a whole; return also other generators that they drew from.

        The generators ``seeded`` are seeded for each sample; ``None``: all are, and each sample is checked for draws.
        """
        if seeded is None:
            drawn = set[Generator]()
            return self._read(request, (), drawn), frozenset(drawn)
        also_drawn = [generator for generator in GENERATORS if generator not in seeded]
        numbers = [_number_after_0(generator) for generator in also_drawn]
        for generator in also_drawn:
            generator.seed(0)
        items = self._read(request, seeded)
        pairs = zip(also_drawn, numbers, strict=True)
        return items, frozenset(generator for generator, number in pairs if generator.number() != number)

    def _read(
        self, request: _SampleRequest, seeded: Collection[Generator], drawn: set[Generator] | None = None
    ) -> list[Any] | None:
        """Read samples, ``None`` if they are to be read as a whole; add generators that they drew from to ``drawn``."""
        numbers: list[int] = request.indices.tolist()
        if self._gives_list is False:
            return None
        if self._gives_list and not seeded and drawn is None:
            with contextlib.suppress(Exception):  # one by one, they show which of them it is
                return list(self._dataset.__getitems__(numbers))
        seeding: Iterable[Any] = repeat(None)  # seeds when it is advanced
        draws: Iterable[int] = repeat(0)
        if seeded or drawn is not None:
            draws = draw_keys(self._seed, request.epoch, request.keys)
            seeding = zip(*(map(generator.seed, draws) for generator in seeded), strict=True) if seeded else seeding
        items: list[Any] = []
        readable: list[int] = []
        for index, key, draw_key, _ in zip(numbers, request.keys.tolist(), draws, seeding, strict=False):
            firsts = {} if drawn is None else {generator: generator.first(draw_key) for generator in GENERATORS}
            for generator in firsts:
                generator.seed(draw_key)
            try:
                items.append(self._item(request.epoch, index, key))
            except Exception as error:
                self._leave_out(index, error)
                continue
            readable.append(index)
            if drawn is not None:
                drawn.update(generator for generator, first in firsts.items() if generator.number() != first)
            if self._has_items and not self._gives_list:  # as has just been seen
                return None
        if self._skipped is None:
            return items
        self._readable = items[-1:] or self._readable
        if not 0 < len(items) < min(self._least, len(numbers)):
            return items
        too_few = DataError(f"left out: the model has BatchNorm, which needs {self._least} samples in a micro-batch")
        for index in readable:
            self._leave_out(index, too_few)
        return []

    def _leave_out(self, index: int, error: Exception) -> None:
        """Record that a sample is left out because of ``error``; raise it where none may be."""
        if self._skipped is None or isinstance(error, StreamEnded):
            if isinstance(error, LockstepError):
                raise error
            raise sample_error(self._dataset, index, error) from error
        line = json.dumps({"index": index, "error": f"{type(error).__name__}: {error}"})
        with self._skipped.open("a", encoding="utf-8") as file:  # one write: worker processes append to it, too
            file.write(line + "\n")

    def _readable_sample(self, after: int = -1) -> list[Any]:
        """Return one readable sample; a stream has only those ``after`` the requested ones."""
        first = range(min(TRIED, len(self._dataset)))
        later = range(after + 1, after + 1 + TRIED)
        for index in () if self._readable else chain(first, later):
            with contextlib.suppress(Exception):
                self._readable = [self._item(0, index, index)]
                break
        if not self._readable:
            raise SampleError(
                f"none of {TRIED:,} training samples could be read",
                why=f"some are listed in {self._skipped}",
                fix="check the data and Task.datasets()",
            )
        return self._readable

    def _item(self, epoch: int, index: int, key: int) -> Any:
        if self._has_sample:
            leaf, at = leaf_of(self._dataset, index)
            return leaf.sample(at, sample_rng(self._seed, epoch, key)) if draws_keyed(leaf) else leaf[at]
        if not self._has_items:
            return self._dataset[index]
        items = self._dataset.__getitems__([index])
        if self._gives_list is None:
            self._gives_list = isinstance(items, list)
        return items[0] if self._gives_list else None

    def _collated(self, items: list[Any] | None, indices: Indices) -> Any:
        if items is not None and not items and len(indices):
            return Unreadable(self._collate(self._readable_sample(int(indices[-1])) * len(indices)))
        try:
            batch = self._dataset.__getitems__(indices) if items is None else self._collate(items)
            if batch is None:
                raise TaskError(
                    f"collate made None of {len(indices)} samples" if items is not None else "__getitems__ gave None",
                    why="the loss takes its result as the batch",
                    fix="return the batch at its end",
                )
            if items and self._collate is default_collate:
                self._check_kinds(items, indices)
            return batch
        except LockstepError:
            raise
        except Exception as error:
            name = type(self._dataset).__name__
            numbers = indices.tolist()
            none = [index for index, item in zip(numbers, items or (), strict=False) if item is None]
            listed = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
            problem = f"collating samples {listed} of {name} failed"
            fix = _FIX
            if none:
                problem = f"sample {none[0]} of {name} is None"
                fix = "exclude it with lockstep.data.select()"
            elif items is not None:
                pairs = zip(items, numbers, strict=False) if self._collate is default_collate else ()
                misfit = next(filter(None, starmap(find_misfit, pairs)), None)
                fixes = {TypeError: "return tensors, arrays or numbers", KeyError: "give all samples the same keys"}
                problem, fix = misfit or (problem, fixes.get(type(error), "make their shapes equal"))
                fix += " in the data set, or write Task.collate (or pass collate=)"
            raise SampleError(problem, why=_told(error), fix=fix) from error

    def _check_kinds(self, items: list[Any], indices: Indices) -> None:
        """Raise :class:`SampleError` where the dtype of a batch depends on the samples that are in it."""
        try:
            kind = kind_of_batch(items)
            self._kind = kind if self._kind is None else joined_kind(self._kind, kind, same_keys=False)
        except MixedKindsError as error:
            listed = ", ".join(map(str, indices[:8].tolist())) + (", …" if len(indices) > 8 else "")
            raise SampleError(
                f"{error}, in {type(self._dataset).__name__}",
                why=f"the dtype of a batch would depend on the samples in it (seen at samples {listed})",
                fix="give it one type in all samples, such as float(x), or write Task.collate (or pass collate=)",
            ) from None


def sample_error(dataset: Any, index: int, error: Exception) -> SampleError:
    """Make the error of sample ``index``, for which ``dataset`` raised ``error``."""
    name = type(dataset).__name__
    with contextlib.suppress(Exception):  # the indices of a Subset may be wrong
        leaf, at = leaf_of(dataset, index)
        if leaf is not dataset:
            name += f" (sample {at} of {type(leaf).__name__})"
    return SampleError(f"sample {index} of {name} could not be read", why=_told(error), fix=_FIX)


_FIX = "fix the data set, or exclude the sample with lockstep.data.select()"


def _told(error: Exception) -> str:
    """Describe the error and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    position = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if len(frames) > 1 else ""
    return f"{type(error).__name__}{': ' if str(error) else ''}{error}{position}"
