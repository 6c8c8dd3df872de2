"""From the indices of a batch to the batch: one gather, or samples one by one, with draws of their own.

The global generators of ``random``, NumPy and torch are seeded for each sample that draws from them, and marked (their
state is read) to see which do: 0.8 to 1.9 µs a seed, 0.2 to 1.8 µs a mark, of ``random.seed``'s 3.8 and
``torch.manual_seed``'s 87.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, repeat, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.data.arrays import draws_keyed, gather_of, is_hugging_face, leaf_of, leaves
from lockstep.data.collation import collated, find_misfit
from lockstep.data.order import derive_key, mixed, sample_rng, words_of
from lockstep.errors import DataError, LockstepError, SampleError, TaskError

#: Its stubs lack two functions.
_np: Any = np.random
#: Words of an MT19937 state, and how many of ``random``'s are made for a sample until one has needed more.
_WORDS, _FEW = 624, 64
#: States made at once: below the size from which glibc asks the kernel for memory.
_TOGETHER = 48
#: Odd, and no multiple of what keys lie apart.
_STEPS = np.arange(_WORDS // 2, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
#: A state whose first word is 0 until new words are made of all.
_EMPTY = (np.arange(1 + _WORDS) != 1).astype(np.uint32).tobytes()

_Keys = NDArray[np.uint64]

#: Some of :func:`generators`, by their place there.
Places = frozenset[int]
_ALL: Places = frozenset({0, 1, 2})


class _Memory:
    """An MT19937 state: 624 words, and the number of the next one, which lies before or after them."""

    def __init__(self, address: int, *, number_first: bool = False) -> None:
        self._all = (ctypes.c_char * (4 * _WORDS + 4)).from_address(address)
        self._bytes = memoryview(self._all).cast("B")
        whole = self._bytes.cast("I")
        self.words, self.number = (whole[1:], whole[:1]) if number_first else (whole[:-1], whole[-1:])

    def read(self) -> bytes:
        return self._all.raw

    def write(self, content: bytes) -> None:
        self._bytes[:] = content

    def values(self) -> tuple[int, ...]:
        return (*self.words, self.number[0])


class _Python:
    """``random``. Its state is read where CPython keeps it; if it does not lie there, through the public functions.

    The words of a state are hashes, given out as they are. Most samples draw a few, so the last
    ``_FEW`` are made; once a sample has :meth:`run_out` of them, all are, which gives the same numbers first.
    """

    def __init__(self) -> None:
        self._generator: Any = random.random.__self__  # type: ignore[attr-defined]
        self._memory: _Memory | None = None
        if random.Random.__basicsize__ >= object.__basicsize__ + 4 * _WORDS:
            memory = _Memory(id(self._generator) + object.__basicsize__, number_first=True)
            self._memory = memory if memory.values() == self._generator.getstate()[1] else None
        self._made = _WORDS if self._memory is None else _FEW

    def mark(self) -> Any:
        if self._memory is None:
            return self._generator.getstate()
        return self._memory.read(), self._generator.gauss_next

    def reset(self, mark: Any) -> None:
        if self._memory is None:
            self._generator.setstate(mark)
        else:
            content, self._generator.gauss_next = mark
            self._memory.write(content)

    leave = reset

    def enter(self) -> Any:
        mark = self.mark()
        if self._memory is not None:
            self._memory.write(_EMPTY)
        return mark

    def starts(self, keys: _Keys) -> list[Any]:
        starts: list[Any] = []
        for first in range(0, len(keys), _TOGETHER):
            states = mixed(keys[first : first + _TOGETHER, None] + _STEPS[: self._made // 2])
            words = states.data.cast("B").cast("I")
            starts += [words[at : at + self._made] for at in range(0, len(words), self._made)]
        return starts

    def seed(self, start: memoryview) -> None:
        number = _WORDS - len(start)
        if self._memory is None:
            self._generator.setstate((3, (*start, 0), None))
        else:
            self._memory.words[number:], self._memory.number[0] = start, number
            self._generator.gauss_next = None

    def run_out(self) -> bool:
        """Whether more words were drawn after a :meth:`seed` since :meth:`enter` than it made; all are from now on."""
        if self._made == _WORDS or self._memory is None or not self._memory.words[0]:
            return False
        self._made = _WORDS
        return True


def _words(keys: _Keys, place: int) -> list[Any]:
    """A number in [0, 2**32) for each of ``keys``, others at each ``place``."""
    words: list[int] = (mixed(keys + np.uint64(place)) >> np.uint64(32)).tolist()
    return words


class _Numpy:
    """``numpy.random``. While it is entered, a bit generator of ours is in the place of the caller's."""

    def __init__(self) -> None:
        self._own = np.random.MT19937(0)
        self._known: tuple[Any, _Memory | None] = (None, None)
        self._left: Any = None

    def _memory(self) -> _Memory | None:
        """Of the bit generator that there is; ``None``: of another kind, which a user has put there."""
        bits = _np.get_bit_generator()
        if bits is not self._known[0]:
            self._known = bits, _Memory(bits.ctypes.state_address) if isinstance(bits, np.random.MT19937) else None
        return self._known[1]

    def mark(self) -> Any:
        memory = self._memory()
        return repr(_np.get_bit_generator().state) if memory is None else memory.read()

    def reset(self, mark: Any) -> None:
        memory = self._memory()
        if memory is not None:
            memory.write(mark)

    def enter(self) -> Any:
        # The state holds a second normal number that a caller may not have drawn yet; reading it takes 33 µs.
        bits, mark = _np.get_bit_generator(), self.mark()
        state = None if self._left == (bits, mark) else np.random.get_state(legacy=False)
        _np.set_bit_generator(self._own)
        return bits, mark, state if state is not None and state["has_gauss"] else None

    def leave(self, state: Any) -> None:
        bits, mark, whole = state
        _np.set_bit_generator(bits)
        if whole is not None:
            np.random.set_state(whole)
        self._left = (bits, mark) if whole is None else None

    def starts(self, keys: _Keys) -> list[Any]:
        return _words(keys, 1)

    def seed(self, start: int) -> None:
        np.random.seed(start)


class _Torch:
    """torch's generator of the CPU."""

    def mark(self) -> bytes:
        return torch.default_generator.get_state().numpy().tobytes()

    def reset(self, mark: bytes) -> None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(mark), dtype=torch.uint8))

    enter, leave = mark, reset

    def starts(self, keys: _Keys) -> list[Any]:
        return _words(keys, 2)

    def seed(self, start: int) -> None:
        torch.default_generator.manual_seed(start)


#: ``starts`` gives for each key what ``seed`` takes: a number or a whole state.
#: A draw changes what ``mark`` returns, and ``reset`` undoes the draws since then.
#: Between ``enter`` and ``leave`` it may be seeded and drawn from without an effect on the caller.
Generator = _Python | _Numpy | _Torch


@lru_cache(maxsize=1)
def generators() -> tuple[_Python, _Numpy, _Torch]:
    return _Python(), _Numpy(), _Torch()


@contextlib.contextmanager
def _entered(places: Places) -> Iterator[None]:
    kept = [(generator, generator.enter()) for generator in map(generators().__getitem__, places)]
    try:
        yield
    finally:
        for generator, state in kept:
            generator.leave(state)


def draw_keys(seed: int, epoch: int, indices: NDArray[np.int64], position: int) -> _Keys:
    """What the draws of each of the samples ``indices`` are keyed by, and those of the batch, from ``position`` on.

    Shape [samples + 1].
    """
    places = np.empty(len(indices) + 1, np.uint64)
    places[:-1], places[-1] = indices, 2**64 - 1 - position
    return words_of(places, derive_key("draws", seed, epoch))


Indices = NDArray[np.int64]
Collate = Callable[[Sequence[Any]], Any]

#: Samples that are tried before a data set is taken to have none that can be read.
TRIED = 1000


class StreamEnded(DataError):
    """A stream failed and gives no more items: nothing to leave out and continue after."""


@dataclass(frozen=True)
class Unreadable:
    """In the place of a micro-batch without a readable sample. ``stand_in``: a batch of its size, to count nothing."""

    stand_in: Any


class _Wanted(NamedTuple):
    epoch: int
    indices: Indices
    position: int
    keys: Indices


class Reader:
    """Reads batches of ``dataset``.

    What a sample draws is keyed by (seed, epoch, index), what ``collate``, or a ``__getitems__`` that returns a batch,
    draws by (seed, epoch, first position); afterwards the generators are as they were. The first batch shows which of
    them are drawn from, and only those are seeded from then on. When another one is drawn from later, that batch is
    read again, seeded. ``sample(index, rng)`` is found behind ``Subset`` and ``ConcatDataset``, too.

    Args:
        skipped: the file in which samples that cannot be read are recorded, and left out; ``None``: they raise.
        least: a batch that they leave with fewer samples, which BatchNorm could not train on, is left out whole.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int, skipped: Path | None = None, least: int = 1) -> None:
        self._dataset, self._seed, self._skipped, self._least = dataset, seed, skipped, least
        self._collate = collated if collate is default_collate else collate
        self._gather = gather_of(dataset, collate)
        self._has_sample = any(map(draws_keyed, leaves(dataset)))
        self._has_items = not self._has_sample and callable(getattr(dataset, "__getitems__", None))
        self._readable: list[Any] = []  # the latest sample that was; only where others may be left out
        self._gives_list: bool | None = None  # what __getitems__ returns; not known yet
        self._drawn: tuple[Places, Places] | None = None  # from which samples draw, and batches
        self._unsown: list[Generator] = []  # the others, which must not be drawn from

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
        """Bytes of a sample, where those tensors lie ready; else 0."""
        if not self.gathers_tensors or self._gather is None or not len(self._dataset):
            return 0
        try:
            found = self._gather(np.zeros(1, dtype=np.int64))
        except Exception:  # as the first batch will show, which is read one by one then
            return 0
        return sum(column.nbytes for column in ([found] if isinstance(found, Tensor) else found))

    @property
    def gives_whole_batches(self) -> bool:
        """Whether a batch is one gather from memory. May read a sample."""
        if not self.gathers and self._has_items and self._gives_list is None:
            self._readable_sample()
        return self.gathers_tensors or self._gives_list is False

    def batch(self, epoch: int, indices: Indices, position: int, keys: Indices | None = None) -> Any:
        """The samples ``indices`` as a batch, which begins at ``position`` of ``epoch``.

        ``keys``: what the draws of samples are keyed by, in place of their indices, where one may occur twice.

        Raises:
            SampleError: the data set failed, or ``collate``.
        """
        if self._gather is not None:
            try:
                return self._gather(indices)
            except Exception:  # one by one, they show which of them it is
                self._gather = None
        wanted = _Wanted(epoch, indices, position, indices if keys is None else keys)
        if self._drawn is not None:
            marks = [generator.mark() for generator in self._unsown]
            batch, missed, _ = self._read(wanted, *self._drawn)
            if not missed and [generator.mark() for generator in self._unsown] == marks:
                return batch
            for generator, mark in zip(self._unsown, marks, strict=True):
                generator.reset(mark)
        batch, by_samples, by_batch = self._read(wanted, _ALL, _ALL, notes=True)
        known = self._drawn or (frozenset(), frozenset())
        self._drawn = known[0] | by_samples, known[1] | by_batch
        self._unsown = [generators()[place] for place in _ALL - self._drawn[0] - self._drawn[1]]
        return batch

    def _read(
        self, wanted: _Wanted, samples: Places, batches: Places, *, notes: bool = False
    ) -> tuple[Any, set[int], set[int]]:
        """The batch, with these generators seeded for each sample and for the batch.

        Also which others samples drew from; with ``notes``, which of all of them samples did, and which the batch.
        """
        if not samples and not batches:
            return self._collated(self._samples(wanted, {}), wanted.indices), set(), set()
        seeded, by_samples = samples | batches, set[int]()
        every: Sequence[Any] = generators()
        keys = draw_keys(self._seed, wanted.epoch, wanted.keys, wanted.position)
        starts = {place: every[place].starts(keys if place in samples else keys[-1:]) for place in seeded}
        with _entered(seeded):
            between = [(place, every[place].mark()) for place in batches - samples]
            items = self._samples(wanted, {place: starts[place] for place in samples}, by_samples if notes else None)
            by_samples.update(place for place, mark in between if every[place].mark() != mark)
            for place in seeded:
                every[place].seed(starts[place][-1])
            sown = [(place, every[place].mark()) for place in seeded if notes]
            batch = self._collated(items, wanted.indices)
            by_batch = {place for place, mark in sown if every[place].mark() != mark}
            is_whole = 0 not in seeded or not every[0].run_out()
        return (batch, by_samples, by_batch) if is_whole else self._read(wanted, samples, batches, notes=notes)

    def _samples(
        self, wanted: _Wanted, starts: Mapping[int, Sequence[Any]], drawn: set[int] | None = None
    ) -> list[Any] | None:
        """The samples, each after seeding from ``starts``, whose places that were drawn from are added to ``drawn``.

        ``None``: they are to be read as a whole.
        """
        numbers: list[int] = wanted.indices.tolist()
        if self._gives_list is False:
            return None
        if self._gives_list and not starts:
            with contextlib.suppress(Exception):  # one by one, they show which of them it is
                return list(self._dataset.__getitems__(numbers))
        pairs = [(place, generators()[place]) for place in starts]
        sowing: Iterable[Any] = repeat(None)  # seeds when it is advanced
        if starts:
            sowing = zip(*(map(generator.seed, starts[place]) for place, generator in pairs), strict=True)
        if drawn is None and self._skipped is None and not self._has_sample and not self._has_items:
            return self._plain_samples(numbers, sowing)
        items: list[Any] = []
        readable: list[int] = []
        for index, key, _ in zip(numbers, wanted.keys.tolist(), sowing, strict=False):
            marks = [] if drawn is None else [generator.mark() for _, generator in pairs]
            try:
                items.append(self._item(wanted.epoch, index, key))
            except Exception as error:
                self._leave_out(index, error)
                continue
            readable.append(index)
            if drawn is not None:
                after = zip(pairs, marks, strict=True)
                drawn.update(place for (place, generator), mark in after if generator.mark() != mark)
            if self._has_items and not self._gives_list:  # as has just been seen
                return None
        if self._skipped is None:
            return items
        self._readable = items[-1:] or self._readable
        if not 0 < len(items) < min(self._least, len(numbers)):
            return items
        few = DataError(f"left out: the model has BatchNorm, which needs {self._least} samples in a micro-batch")
        for index in readable:
            self._leave_out(index, few)
        return []

    def _plain_samples(self, numbers: list[int], sowing: Iterable[Any]) -> list[Any]:
        """What the loop in :meth:`_samples` does, without what most data sets do not need: 0.4 µs a sample less."""
        items: list[Any] = []
        try:
            for index, _ in zip(numbers, sowing, strict=False):
                items.append(self._dataset[index])
        except Exception as error:
            self._leave_out(numbers[len(items)], error)
        return items

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
        """One sample that can be read; a stream has only those ``after`` what was asked for."""
        first, later = range(min(TRIED, len(self._dataset))), range(after + 1, after + 1 + TRIED)
        for index in () if self._readable else chain(first, later):
            with contextlib.suppress(Exception):
                self._readable = [self._item(0, index, index)]
                break
        if not self._readable:
            what = f"none of {TRIED:,} training samples could be read"
            raise SampleError(what, why=f"some are listed in {self._skipped}", fix="check the data and Task.datasets()")
        return self._readable

    def _item(self, epoch: int, index: int, key: int) -> Any:
        if self._has_sample:
            leaf, at = leaf_of(self._dataset, index)
            return leaf.sample(at, sample_rng(self._seed, epoch, key)) if draws_keyed(leaf) else leaf[at]
        if not self._has_items:
            return self._dataset[index]
        found = self._dataset.__getitems__([index])
        if self._gives_list is None:
            self._gives_list = isinstance(found, list)
        return found[0] if self._gives_list else None

    def _collated(self, items: list[Any] | None, indices: Indices) -> Any:
        if items is not None and not items and len(indices):
            return Unreadable(self._collate(self._readable_sample(int(indices[-1])) * len(indices)))
        try:
            batch = self._dataset.__getitems__(indices) if items is None else self._collate(items)
            if batch is None:
                raise TaskError(
                    f"collate made None of {len(indices)} samples" if items is not None else "__getitems__ gave None",
                    why="what it returns is the batch that the loss takes",
                    fix="return the batch at its end",
                )
            return batch
        except LockstepError:
            raise
        except Exception as error:
            name, numbers = type(self._dataset).__name__, indices.tolist()
            none = [index for index, item in zip(numbers, items or (), strict=False) if item is None]
            few = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
            what, fix = f"samples {few} of {name} could not be made into a batch", _FIX
            if none:
                what, fix = f"sample {none[0]} of {name} is None", "leave it out with select()"
            elif items is not None:
                pairs = zip(items, numbers, strict=False) if self._collate is collated else ()
                misfit = next(filter(None, starmap(find_misfit, pairs)), None)
                fix = "return tensors, arrays or numbers" if isinstance(error, TypeError) else "make their shapes equal"
                what, fix = misfit or (what, fix)
                fix += " in the data set, or write Task.collate (or pass collate=)"
            raise SampleError(what, why=_told(error), fix=fix) from error


def sample_error(dataset: Any, index: int, error: Exception) -> SampleError:
    """What to raise from ``error``, which ``dataset`` raised for sample ``index``."""
    name = type(dataset).__name__
    with contextlib.suppress(Exception):  # its own indices may be what is wrong
        leaf, at = leaf_of(dataset, index)
        if leaf is not dataset:
            name += f" (sample {at} of {type(leaf).__name__})"
    return SampleError(f"sample {index} of {name} could not be read", why=_told(error), fix=_FIX)


_FIX = "fix the data set, or leave the sample out"


def _told(error: Exception) -> str:
    """The error, and the line of the user's that raised it."""
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({where[-1].filename}:{where[-1].lineno}, in {where[-1].name})" if len(where) > 1 else ""
    return f"{type(error).__name__}{': ' if str(error) else ''}{error}{place}"
