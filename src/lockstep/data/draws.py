"""The global generators of ``random``, NumPy and torch, seeded for what is about to draw from them.

Ordinary data sets draw without a generator, and would draw other numbers on another number of ranks or workers. So
these are seeded before whatever draws, which is made cheap: Python's and NumPy's are one algorithm (MT19937), whose
state NumPy makes in a third of the time that ``random.seed`` takes; and a comparison of states shows who does not draw.

On one core, with Python 3.11, NumPy 2.4 and torch 2.13: a seed takes 1.9 µs (``random.seed`` 4.7), 1.6 µs and 1.1 µs
(``torch.manual_seed``, which is for GPUs too, 121); a mark 0.2, 0.2 and 1.4 µs (``random.getstate`` 6.9,
``np.random.get_state`` 32).
"""

from __future__ import annotations

import ctypes
import random
import sys
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.data.order import mixed
from lockstep.data.randomness import derive_key

#: Its stubs lack two functions.
_np: Any = np.random
_WORDS = 624
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

#: A seed for each of :func:`generators`, in [0, 2**32).
Words = tuple[int, int, int]


class Generator(Protocol):
    """A global generator of this process."""

    def mark(self) -> Any:
        """A value that a draw changes."""

    def reset(self, mark: Any) -> None:
        """Undo the draws since ``mark``."""

    def enter(self) -> Any:
        """What :meth:`leave` takes; in between, this may be seeded and drawn from, and nothing comes of it."""

    def leave(self, state: Any) -> None: ...

    def seed(self, word: int) -> None: ...


class _Memory:
    """An MT19937 state: 624 words, and the number of the next one, which lies before or after them."""

    def __init__(self, address: int, *, number_first: bool) -> None:
        self._all = (ctypes.c_char * (4 * _WORDS + 4)).from_address(address)
        self._view = memoryview(self._all).cast("B")
        first = 4 if number_first else 0
        self.words = self._view[first : first + 4 * _WORDS]
        self.number = self._view[0:4] if number_first else self._view[4 * _WORDS :]

    @classmethod
    def of_numpy(cls, generator: np.random.MT19937) -> _Memory:
        return cls(generator.ctypes.state_address, number_first=False)

    def read(self) -> bytes:
        return self._all.raw

    def write(self, content: bytes) -> None:
        self._view[:] = content

    def values(self) -> tuple[int, ...]:
        return (*np.frombuffer(self.words, np.uint32).tolist(), int.from_bytes(self.number, sys.byteorder))


class _Python:
    """``random``. Its state is read where CPython keeps it; if it does not lie there, through the public functions."""

    def __init__(self) -> None:
        self._generator: Any = random.random.__self__  # type: ignore[attr-defined]
        bits = np.random.MT19937(0)
        self._maker, self._made = np.random.RandomState(bits), _Memory.of_numpy(bits)
        self._memory: _Memory | None = None
        if sys.implementation.name == "cpython" and random.Random.__basicsize__ >= object.__basicsize__ + 4 * _WORDS:
            memory = _Memory(id(self._generator) + object.__basicsize__, number_first=True)
            self._memory = memory if memory.values() == self._generator.getstate()[1] else None

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

    enter, leave = mark, reset

    def seed(self, word: int) -> None:
        self._maker.seed(word)
        if self._memory is None:
            self._generator.setstate((3, self._made.values(), None))
        else:
            self._memory.words[:] = self._made.words
            self._memory.number[:] = self._made.number
            self._generator.gauss_next = None


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
            self._known = bits, _Memory.of_numpy(bits) if isinstance(bits, np.random.MT19937) else None
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

    def seed(self, word: int) -> None:
        np.random.seed(word)


class _Torch:
    """torch's generator of the CPU."""

    def __init__(self) -> None:
        self._generator = torch.default_generator

    def mark(self) -> bytes:
        return self._generator.get_state().numpy().tobytes()

    def reset(self, mark: bytes) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(mark), dtype=torch.uint8))

    def enter(self) -> Any:
        return self._generator.get_state()

    def leave(self, state: Any) -> None:
        self._generator.set_state(state)

    def seed(self, word: int) -> None:
        self._generator.manual_seed(word)


@lru_cache(maxsize=1)
def generators() -> tuple[Generator, Generator, Generator]:
    return _Python(), _Numpy(), _Torch()


def sample_words(seed: int, epoch: int, indices: NDArray[np.int64]) -> list[Words]:
    """Seeds for what each of the samples ``indices`` draws."""
    keys = indices.astype(np.uint64) * _GOLDEN + np.uint64(derive_key("draws", seed, epoch))
    first, second = mixed(keys), mixed(keys + np.uint64(1))
    columns = (first & np.uint64(0xFFFFFFFF)).tolist(), (first >> np.uint64(32)).tolist(), (second >> np.uint64(32))
    return list(zip(columns[0], columns[1], columns[2].tolist(), strict=True))


def batch_words(seed: int, epoch: int, position: int) -> Words:
    """Seeds for what a batch draws as a whole: the one that begins at ``position`` of ``epoch``."""
    key, other = derive_key("batch draws", seed, epoch, position), derive_key("batch draws", seed, epoch, position, 1)
    return key & 0xFFFFFFFF, key >> 32, other >> 32
