"""Random streams that belong to the run, not to a process.

Every stream is keyed by what it is for: a purpose and a few whole numbers, hashed to 64 bits
(BLAKE2b, RFC 7693, whose output is the same on every machine and in every Python). So the same
sample, step or lane draws the same numbers on any number of ranks and workers, and no stream is a
shifted copy of another, as happens with ``seed + rank``.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
from dataclasses import dataclass

import numpy as np

from lockstep.hardware import parent_death


def derive_key(purpose: str, *numbers: int) -> int:
    """A key in [0, 2**64) for ``numbers`` (of any size) under ``purpose`` (at most 16 ASCII characters)."""
    text = ",".join(str(int(number)) for number in numbers)
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode(), usedforsecurity=False)
    return int.from_bytes(digest.digest(), "little")


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator for the augmentation of one sample in one epoch (about 10 µs to make).

    Two samples of an epoch cannot share a stream: ``index`` is half of the Philox key (Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). NumPy keeps the stream of raw bits
    of Philox between versions, but not what ``normal()`` and its like make of them.
    """
    key = np.array([derive_key("sample", seed, epoch), index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def dropout_seed(seed: int, step: int, part: int, place: int = 0, purpose: str = "dropout") -> int:
    """A seed in [0, 2**64) for ``torch.manual_seed``, before ``part`` of optimizer step ``step`` runs.

    ``part`` is the lane in exact mode, the rank in fast mode, the chunk in an ``evaluation``; ``place`` is the device
    among those of one rank. All bits are mixed, since torch's CPU generator takes only the lower 32 of them.
    """
    return derive_key(purpose, seed, step, part, *([place] if place else []))


@dataclass(frozen=True)
class WorkerInit:
    """Ties a loader worker to its rank and seeds NumPy, ``random`` and torch in it; can be pickled."""

    seed: int
    rank: int
    epoch: int

    def __call__(self, worker_id: int) -> None:
        import torch

        if multiprocessing.parent_process() is not None:
            parent_death.bind_loader_worker()
        # One key for all would give random.random() and np.random.rand() the same numbers: both are MT19937.
        for library, seed in (("python", random.seed), ("numpy", _seed_numpy), ("torch", torch.manual_seed)):
            seed(derive_key(f"worker {library}", self.seed, self.epoch, self.rank, worker_id))


def _seed_numpy(key: int) -> None:
    np.random.seed([key & 0xFFFFFFFF, key >> 32])


def worker_init(seed: int, rank: int, epoch: int = 0) -> WorkerInit:
    """The ``worker_init_fn`` of a rank's ``DataLoader``.

    It is for code that draws from the global generators outside of what :mod:`lockstep.data.reader` keys by sample, as
    the loaders of a ``LightningModule`` do: distinct for every rank and worker, the same when the run is repeated, but
    not on another number of workers. A new loader for each epoch passes ``epoch``, or its workers would draw the same
    numbers in each.
    """
    return WorkerInit(seed, rank, epoch)
