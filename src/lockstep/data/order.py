"""The order of samples, and the random streams of each: pure functions of (seed, epoch, position), with random access.

From 1,024 samples on, the order is a generalised Feistel network on Z_a × Z_b (Black and Rogaway, "Ciphers with
arbitrary finite domains", CT-RSA 2002) with a = ⌈√n⌉ and b = ⌈n/a⌉; a result outside [0, n) is put through again. With
four rounds, positions p, p + 1 had samples s, s + 1 (mod n) 1.943 times an epoch at n = 1,024, the worst case, with six
1.027, with eight 0.998, each ± 0.003, of 1 in a random order (``benchmarks/order.py --rounds``). It has ten. Smaller
data sets are sorted by one hash per position.

Random streams belong to the run, not to a process. Each is keyed by a purpose and a few whole numbers, hashed to 64
bits (BLAKE2b, RFC 7693), so no stream is a shifted copy of another, as happens with ``seed + rank``.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.arithmetic import ceil_div
from lockstep.errors import DataError
from lockstep.hardware import parent_death


def derive_key(purpose: str, *numbers: int) -> int:
    """Return a key in [0, 2**64) for ``numbers`` (of any size) under ``purpose`` (at most 16 ASCII characters)."""
    text = ",".join(str(int(number)) for number in numbers)
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode(), usedforsecurity=False)
    return int.from_bytes(digest.digest(), "little")


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the generator for the augmentation of one sample in one epoch (about 10 µs to make).

    Two samples of an epoch cannot share a stream: ``index`` is half of the Philox key (Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
    """
    key = np.array([derive_key("sample", seed, epoch), index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def dropout_seed(seed: int, step: int, part: int, device_number: int = 0, purpose: str = "dropout") -> int:
    """Return a seed in [0, 2**64) for ``torch.manual_seed``, before ``part`` of optimizer step ``step`` runs.

    ``part`` is the lane in exact mode, the rank in fast mode, the chunk in an ``evaluation``; ``device_number`` is
    the index of a device of the rank. All bits are mixed, since torch's CPU generator takes only the lower 32 of them.
    """
    return derive_key(purpose, seed, step, part, *([device_number] if device_number else []))


@dataclass(frozen=True)
class WorkerInit:
    """A ``worker_init_fn``: ties a loader worker to its rank, and seeds NumPy, ``random`` and torch in it.

    The seeds, one for each rank, worker and ``epoch``, are for draws that :mod:`lockstep.data.reader` does not key by
    sample, as in the loaders of a ``LightningModule``.
    """

    seed: int
    rank: int
    epoch: int

    def __call__(self, worker_id: int) -> None:
        import torch

        if multiprocessing.parent_process() is not None:
            parent_death.bind_loader_worker()
        # One key for all would give random.random() and np.random.rand() the same numbers: both are MT19937.
        purposes = ("worker python", "worker numpy", "worker torch")
        python, numpy, of_torch = (derive_key(p, self.seed, self.epoch, self.rank, worker_id) for p in purposes)
        random.seed(python)
        np.random.seed([numpy & 0xFFFFFFFF, numpy >> 32])
        torch.manual_seed(of_torch)


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


class BlockOrder:
    """An order computed in blocks of positions, of which the latest is kept: an object for each reader."""

    samples: int
    #: Positions of a block.
    block = 4096
    _latest: tuple[int, int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self.samples

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_latest"}

    def slice(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions [start, stop) of ``epoch``: shape [stop - start], a new array.

        Costs time and memory in proportion to ``stop - start``, and at most two blocks more.
        """
        check_slice(self.samples, epoch, start, stop)
        indices = np.empty(stop - start, dtype=np.int64)
        for first in range(start - start % self.block, stop, self.block):
            low = max(start, first)
            high = min(stop, first + self.block)
            if self._latest is None or self._latest[:2] != (epoch, first):
                self._latest = epoch, first, self._compute(epoch, first, min(first + self.block, self.samples))
            indices[low - start : high - start] = self._latest[2][low - first : high - first]
        return indices

    def _compute(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        raise NotImplementedError


class Order(BlockOrder):
    """The order in which a run of ``seed`` visits a data set of ``samples`` samples.

    Raises:
        DataError: there are no samples, or more than ``MAX_SAMPLES``.
    """

    #: No sample is seen twice in an epoch.
    repeats = False
    block = BLOCK

    def __init__(self, samples: int, seed: int) -> None:
        if not 1 <= samples <= MAX_SAMPLES:
            raise DataError(
                f"a data set of {samples} samples has no order",
                why=f"an epoch needs 1 to {MAX_SAMPLES} samples",
                fix="check where the task's data lies, and its filters",
            )
        self.samples = samples
        self.seed = seed

    def __repr__(self) -> str:
        return f"Order(samples={self.samples}, seed={self.seed})"

    def _compute(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        if self.samples < SHUFFLE_BELOW:
            return shuffled(self.samples, derive_key("order", self.seed, epoch))
        keys = [derive_key("order", self.seed, epoch, turn) for turn in range(ROUNDS)]
        return _permute(np.arange(start, stop, dtype=np.uint64), self.samples, keys).view(np.int64)


def check_slice(samples: int, epoch: int, start: int, stop: int) -> None:
    """Refuse a slice that does not lie in an epoch of ``samples`` positions."""
    if epoch < 0 or not 0 <= start <= stop <= samples:
        raise IndexError(f"positions {start} to {stop} of epoch {epoch} are not in an epoch of {samples} samples")


def shuffled(count: int, key: int) -> NDArray[np.int64]:
    """Return [0, count) in a random order fixed by ``key``, shape [count], by sorting SplitMix64's outputs."""
    # Generator.permutation would tie the order of a run to a version of NumPy.
    words = words_of(np.arange(count, dtype=np.uint64), key)
    return np.argsort(mixed(words), kind="stable").astype(np.int64, copy=False)


def words_of(places: _WORDS, key: int) -> _WORDS:
    """Return the states of the SplitMix64 generator with seed ``key`` after ``places`` numbers."""
    words = places + np.uint64(1)
    words *= _GOLDEN
    words += np.uint64(key)
    return words


def _permute(positions: _WORDS, samples: int, keys: list[int]) -> _WORDS:
    a = math.isqrt(samples - 1) + 1
    b = ceil_div(samples, a)
    values = _feistel(positions, a, b, keys)
    outside = np.flatnonzero(values >= samples)
    while outside.size:
        values[outside] = walked = _feistel(values[outside], a, b, keys)
        outside = outside[walked >= samples]
    return values


def _feistel(values: _WORDS, a: int, b: int, keys: list[int]) -> _WORDS:
    """Put ``values`` in [0, ab) through one pass of the network; they stay as they are."""
    modulus = np.uint64(a)
    other_modulus = np.uint64(b)
    half, other = np.divmod(values, other_modulus)
    hashed = np.empty_like(values)
    scratch = np.empty_like(values)
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


def mixed(words: _WORDS) -> _WORDS:
    """Put each of ``words`` through a bijective hash, in place."""
    return _mix(words, np.empty_like(words))


def _mix(words: _WORDS, scratch: _WORDS) -> _WORDS:
    """Apply SplitMix64's finaliser, in place (Steele, Lea, Flood, OOPSLA 2014; Stafford's variant 13)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(words, np.uint64(shift), out=scratch)
        words ^= scratch
        words *= np.uint64(factor)
    np.right_shift(words, np.uint64(31), out=scratch)
    words ^= scratch
    return words
