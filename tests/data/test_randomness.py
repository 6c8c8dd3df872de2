from __future__ import annotations

import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from lockstep.data.randomness import derive_key, dropout_seed, sample_rng, worker_init

NUMBERS = st.integers(0, 2**63 - 1)


@given(seed=NUMBERS, epoch=NUMBERS, index=NUMBERS)
def test_a_samples_stream_depends_on_its_key_alone(seed: int, epoch: int, index: int) -> None:
    np.random.default_rng(0).normal()
    assert np.array_equal(sample_rng(seed, epoch, index).random(4), sample_rng(seed, epoch, index).random(4))


@given(seed=st.integers(0, 2**62), epoch=st.integers(0, 10**6), index=st.integers(0, 10**12))
def test_seeds_epochs_and_samples_have_streams_of_their_own(seed: int, epoch: int, index: int) -> None:
    keys = [(seed, epoch, index), (seed + 1, epoch, index), (seed, epoch + 1, index), (seed, epoch, index + 1)]
    streams = np.stack([sample_rng(*key).random(8) for key in keys])
    assert len(np.unique(streams)) == streams.size


def test_streams_of_consecutive_samples_are_independent() -> None:
    drawn = np.stack([sample_rng(1, 0, index).standard_normal(64) for index in range(4_000)])
    assert abs(drawn.mean()) < 4 / np.sqrt(drawn.size)
    neighbours = [(a * b).mean() for a, b in pairwise(drawn)]
    assert abs(np.mean(neighbours)) < 4 / np.sqrt(drawn.size)
    assert abs(np.var(neighbours) * 64 - 1) < 0.1


def test_streams_are_pinned() -> None:
    assert derive_key("order", 42, 0) == 3949410544342511396
    assert sample_rng(42, 3, 7).bit_generator.random_raw(2).tolist() == [11364030588228655597, 6348685306997290123]
    assert dropout_seed(42, 10, 1) == dropout_seed(42, 10, 1, 0) == 14399311669047360595


def test_keys_do_not_run_together() -> None:
    assert derive_key("a", 1, 23) != derive_key("a", 12, 3)
    assert derive_key("a", 1) != derive_key("b", 1)
    assert derive_key("a", np.int64(5)) == derive_key("a", 5)


def test_every_step_and_lane_has_a_dropout_seed_of_its_own() -> None:
    seeds = [dropout_seed(seed, step, lane) for seed in range(2) for step in range(500) for lane in range(8)]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    for seed in (*seeds[:10], 2**64 - 1):
        torch.Generator().manual_seed(seed)


def test_dropout_masks_repeat_with_their_seed_and_differ_without() -> None:
    def mask(step: int, lane: int) -> list[bool]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(dropout_seed(42, step, lane))
            return (torch.nn.functional.dropout(torch.ones(64)) > 0).tolist()

    assert mask(3, 1) == mask(3, 1)
    assert mask(3, 1) != mask(3, 2)
    assert mask(3, 1) != mask(4, 1)


class Draws(Dataset[tuple[float, float, float]]):
    """A data set that draws from the global generators, as careless ones do."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))


def drawn(seed: int, rank: int, epoch: int) -> list[float]:
    loader = DataLoader(Draws(), batch_size=2, num_workers=2, worker_init_fn=worker_init(seed, rank, epoch))
    return torch.stack([torch.stack(batch) for batch in loader]).flatten().tolist()


@pytest.fixture
def sigchld() -> Iterator[None]:
    """A DataLoader with workers leaves a handler of its own behind."""
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.usefixtures("sigchld")
def test_workers_draw_numbers_of_their_own_and_the_same_again() -> None:
    values = drawn(1, 0, 0)
    assert len(set(values)) == 24
    assert drawn(1, 0, 0) == values


@pytest.mark.usefixtures("sigchld")
def test_ranks_and_epochs_have_workers_of_their_own() -> None:
    base = drawn(1, 0, 0)
    others = [drawn(2, 0, 0), drawn(1, 1, 0), drawn(1, 0, 1)]
    assert all(not set(base) & set(other) for other in others)


def test_a_worker_init_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(worker_init(1, 2, 3))) == worker_init(1, 2, 3)


def test_keys_are_the_same_in_another_process() -> None:
    """Python's own hash is not: it is salted."""
    code = "from lockstep.data.randomness import derive_key; print(derive_key('order', 1, 2))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == derive_key("order", 1, 2)
