"""The order of samples: a pure function of (seed, epoch, position), with random access.

A keyed permutation of [0, n) stands in for a shuffled index array: any slice of any epoch costs the
same, wherever it lies, and nothing grows with the data set.

From 1,024 samples on it is a generalised Feistel network on Z_a × Z_b (Black and Rogaway, "Ciphers
with arbitrary finite domains", CT-RSA 2002) with a = ⌈√n⌉ and b = ⌈n/a⌉. A round adds to one half a
hash of the other, modulo a or b in turn, so it can be undone and is a permutation of [0, ab). A
result outside [0, n) is put through again ("cycle walking"); since ab - n < a, one in √n is.

Ten rounds. Too few show in neighbours: positions p, p + 1 that hold samples s, s + 1 (mod n) should
occur once an epoch. At n = 1,024, the worst case, they occurred 1.943 times with four rounds, 1.027
with six and 0.998 with eight, each ± 0.003 (``benchmarks/order.py --rounds``). Every two rounds divide
the excess by about √n, so ten leave a margin.

Below 1,024 samples a network's halves are too small to mix well, and a whole epoch is cheap: there
the order sorts one hash per position, which is a uniform shuffle.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lockstep.data.randomness import derive_key
from lockstep.errors import DataError

#: Stands in every checkpoint. Any change to which sample a position gets needs a new number.
ORDER_VERSION = 1
#: Positions computed at a time, and kept for the next slice.
BLOCK = 65_536
#: Data sets smaller than this are shuffled whole.
SHUFFLE_BELOW = 1_024
ROUNDS = 10
#: Keeps a and b at most 2**31, so that no sum or product below leaves 64 bits.
MAX_SAMPLES = 2**62

_WORDS = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Order:
    """The order in which a run of ``seed`` visits a data set of ``samples`` samples.

    One object serves one reader well: it keeps the block of positions that it computed last.

    Raises:
        DataError: there are no samples, or more than ``MAX_SAMPLES``.
    """

    def __init__(self, samples: int, seed: int) -> None:
        if not 1 <= samples <= MAX_SAMPLES:
            raise DataError(
                f"a data set of {samples} samples has no order",
                why=f"an epoch needs between 1 and {MAX_SAMPLES} samples",
                fix="check where the task's data lies, and its filters",
            )
        self.samples = samples
        self.seed = seed
        self._cache: tuple[int, int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self.samples

    def __repr__(self) -> str:
        return f"Order(samples={self.samples}, seed={self.seed})"

    def __reduce__(self) -> tuple[object, ...]:
        return (Order, (self.samples, self.seed))

    def slice(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """The samples at positions [start, stop) of ``epoch``: shape [stop - start], the caller's own.

        Costs time and memory in proportion to ``stop - start``, and at most two blocks more.

        Raises:
            IndexError: not 0 ≤ start ≤ stop ≤ samples.
        """
        check_slice(self.samples, epoch, start, stop)
        indices = np.empty(stop - start, dtype=np.int64)
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first = number * BLOCK
            low, high = max(start, first), min(stop, first + BLOCK)
            indices[low - start : high - start] = self._block(epoch, number)[low - first : high - first]
        return indices

    def _block(self, epoch: int, number: int) -> NDArray[np.int64]:
        cache = self._cache
        if cache is not None and cache[:2] == (epoch, number):
            return cache[2]
        if self.samples < SHUFFLE_BELOW:
            block = shuffled(self.samples, derive_key("order", self.seed, epoch))
        else:
            first = number * BLOCK
            positions = np.arange(first, min(first + BLOCK, self.samples), dtype=np.uint64)
            keys = [derive_key("order", self.seed, epoch, turn) for turn in range(ROUNDS)]
            block = _permute(positions, self.samples, keys).view(np.int64)
        self._cache = (epoch, number, block)
        return block


def check_slice(samples: int, epoch: int, start: int, stop: int) -> None:
    """Refuse a slice that does not lie in an epoch of ``samples`` positions."""
    if epoch < 0 or not 0 <= start <= stop <= samples:
        raise IndexError(f"positions {start} to {stop} of epoch {epoch} are not in an epoch of {samples} samples")


def shuffled(count: int, key: int) -> NDArray[np.int64]:
    """[0, count) in a random order fixed by ``key``: shape [count].

    Sorts the outputs of the SplitMix64 generator, which are all different, so that no tie favours
    an order. (``Generator.permutation`` would tie the order of a run to a version of NumPy.)
    """
    words = np.arange(1, count + 1, dtype=np.uint64)
    words *= _GOLDEN
    words += np.uint64(key)
    return np.argsort(_mix(words, np.empty_like(words)), kind="stable").astype(np.int64, copy=False)


def mixed(words: _WORDS) -> _WORDS:
    """A bijective hash of each of ``words``, with all bits mixed."""
    return _mix(words.copy(), np.empty_like(words))


def _permute(positions: _WORDS, samples: int, keys: list[int]) -> _WORDS:
    """The keyed permutation of [0, samples), at ``positions``."""
    a = math.isqrt(samples - 1) + 1
    b = -(-samples // a)
    values = _feistel(positions, a, b, keys)
    outside = np.flatnonzero(values >= samples)
    while outside.size:
        values[outside] = walked = _feistel(values[outside], a, b, keys)
        outside = outside[walked >= samples]
    return values


def _feistel(values: _WORDS, a: int, b: int, keys: list[int]) -> _WORDS:
    """One pass of the network over ``values`` in [0, ab); they stay as they are."""
    modulus, other_modulus = np.uint64(a), np.uint64(b)
    half, other = np.divmod(values, other_modulus)
    hashed, scratch = np.empty_like(values), np.empty_like(values)
    for key in keys:
        np.add(other, np.uint64(key), out=hashed)
        _mix(hashed, scratch)
        # One bit fewer leaves room for the half, so the sum does not wrap.
        hashed >>= np.uint64(1)
        half += hashed
        # NumPy's division by a constant is vectorised, its remainder is not: ten times the time.
        np.floor_divide(half, modulus, out=scratch)
        scratch *= modulus
        half -= scratch
        half, other, modulus, other_modulus = other, half, other_modulus, modulus
    if len(keys) % 2:
        half, other = other, half
    half *= np.uint64(b)
    half += other
    return half


def _mix(words: _WORDS, scratch: _WORDS) -> _WORDS:
    """SplitMix64's finaliser, in place (Steele, Lea, Flood, OOPSLA 2014; Stafford's variant 13)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(words, np.uint64(shift), out=scratch)
        words ^= scratch
        words *= np.uint64(factor)
    np.right_shift(words, np.uint64(31), out=scratch)
    words ^= scratch
    return words
