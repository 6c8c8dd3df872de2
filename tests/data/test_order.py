from __future__ import annotations

import math
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
from numpy.typing import NDArray
from scipy import stats
from torch.utils.data import DataLoader, Dataset

from lockstep import Order
from lockstep.data.order import (
    BLOCK,
    MAX_SAMPLES,
    ORDER_VERSION,
    SHUFFLE_BELOW,
    WorkerInit,
    derive_key,
    dropout_seed,
    sample_rng,
)
from lockstep.errors import DataError

SEEDS = st.integers(0, 2**63 - 1)
#: Both sides of every border: the shuffle's end, powers of two, a block's end, and the round numbers.
SIZES = [1_000, 1_023, 1_024, 1_025, 2_047, 2_049, 4_095, 4_097, 10_000, 65_535, 65_537, 100_000]


def epochs_of(samples: int, number: int, seed: int = 5) -> NDArray[np.int64]:
    """Shape [number, samples]."""
    order = Order(samples, seed)
    return np.stack([order.slice(epoch, 0, samples) for epoch in range(number)])


def assert_plausible(counts: NDArray[np.int64], expected: NDArray[np.float64] | float, freedom: int) -> None:
    """A chi-square test of fixed seeds: it passes always or never."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    p = stats.chi2.sf(statistic, freedom)
    assert 1e-5 < p < 1 - 1e-5, f"chi-square {statistic:.1f} at {freedom} degrees of freedom: p = {p:.2g}"


def test_every_epoch_holds_every_sample_once_for_all_small_sizes() -> None:
    for samples in range(1, 3_001):
        indices = Order(samples, seed=7).slice(3, 0, samples)
        assert np.array_equal(np.sort(indices), np.arange(samples)), samples


@given(samples=st.integers(1, 300_000), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_every_epoch_holds_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    indices = Order(samples, seed).slice(epoch, 0, samples)
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(samples))


@given(samples=st.integers(1, 4 * BLOCK) | st.integers(1, MAX_SAMPLES), seed=SEEDS, data=st.data())
def test_slices_are_parts_of_one_sequence(samples: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, samples - 1))
    stop = data.draw(st.integers(start, min(samples, start + 3 * BLOCK)))
    cuts = data.draw(st.lists(st.integers(start, stop), max_size=5).map(sorted))
    whole = Order(samples, seed).slice(1, start, stop)
    used = Order(samples, seed)
    parts = [used.slice(1, a, b) for a, b in zip([start, *cuts], [*cuts, stop], strict=True)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert len(np.unique(whole)) == stop - start
    assert whole.size == 0 or (whole.min() >= 0 and whole.max() < samples)


@pytest.mark.parametrize("samples", [2, 3, 4, 5, pytest.param(6, marks=pytest.mark.slow)])
def test_every_permutation_of_a_few_samples_occurs_equally_often(samples: int) -> None:
    kinds = math.factorial(samples)
    order = np.concatenate([epochs_of(samples, 250 + 3 * kinds, seed) for seed in range(8)])
    _, counts = np.unique(order, axis=0, return_counts=True)
    assert len(counts) == kinds
    assert_plausible(counts, len(order) / kinds, kinds - 1)


@pytest.mark.parametrize("samples", SIZES)
def test_samples_fall_evenly_on_positions_and_on_neighbours(samples: int) -> None:
    bins, number = 24, max(4, 200_000 // samples)
    order = epochs_of(samples, number)
    group = np.arange(samples) * bins // samples
    sizes = np.bincount(group).astype(np.float64)
    expected = number * np.outer(sizes, sizes) / samples

    placed = np.zeros((bins, bins), dtype=np.int64)
    np.add.at(placed, (np.broadcast_to(group, order.shape), group[order]), 1)
    assert_plausible(placed, expected, (bins - 1) ** 2)

    follows = np.zeros((bins, bins), dtype=np.int64)
    np.add.at(follows, (group[order], group[np.roll(order, -1, axis=1)]), 1)
    # A sample cannot follow itself.
    expected = number * (np.outer(sizes, sizes) - np.diag(sizes)) / (samples - 1)
    assert_plausible(follows, expected, (bins - 1) ** 2)


@pytest.mark.parametrize("samples", [1_023, 1_024, 1_025, 1_100, 4_097])
def test_structure_of_the_network_does_not_show(samples: int) -> None:
    """Neighbours, in a line or in a column of Z_a × Z_b, stay neighbours as often as by chance."""
    number = 2_000
    order = epochs_of(samples, number)
    row = -(-samples // (math.isqrt(samples - 1) + 1))
    for step in (1, row):
        moved = (np.roll(order, -step, axis=1) - order) % samples
        for distance in (1, row, samples - row, samples - 1):
            kept = int((moved == distance).sum())
            mean = number * samples / (samples - 1)
            assert abs(kept - mean) < 4 * math.sqrt(mean), (step, distance, kept, mean)
    ascents = (np.diff(order, axis=1) > 0).sum(axis=1)
    assert abs(ascents.var() / ((samples + 1) / 12) - 1) < 4 * math.sqrt(2 / number)


def test_a_trillion_samples_are_one_sequence() -> None:
    samples, order = 10**12, Order(10**12, seed=3)
    starts = [0, BLOCK - 1_000, 10**6, 123_456_789_012, samples // 2, samples - 50_000]
    seen = np.concatenate([order.slice(0, start, start + 50_000) for start in starts])
    assert len(np.unique(seen)) == len(seen)
    assert seen.min() >= 0
    assert seen.max() < samples
    assert_plausible(np.bincount(seen * 64 // samples, minlength=64), len(seen) / 64, 63)


@given(samples=st.integers(20, 10**15), seed=SEEDS, epoch=st.integers(0, 1_000))
def test_epochs_and_seeds_have_orders_of_their_own(samples: int, seed: int, epoch: int) -> None:
    def head(seed: int, epoch: int) -> list[int]:
        return Order(samples, seed).slice(epoch, 0, min(samples, 100)).tolist()

    assert head(seed, epoch) != head(seed, epoch + 1)
    assert head(seed, epoch) != head(seed + 1, epoch)
    assert head(seed, epoch) != head(epoch, seed) or seed == epoch


def test_one_object_serves_epochs_and_places_in_any_turn() -> None:
    order = Order(200_000, seed=1)
    for epoch, start in [(0, 0), (1, 0), (0, 100_000), (1, 100_000), (0, 0)]:
        assert np.array_equal(order.slice(epoch, start, start + 9), Order(200_000, 1).slice(epoch, start, start + 9))


def test_what_a_slice_returns_belongs_to_the_caller() -> None:
    order = Order(5_000, seed=1)
    before = order.slice(0, 0, 10)
    order.slice(0, 0, 10)[:] = -1
    assert np.array_equal(order.slice(0, 0, 10), before)


def test_an_order_travels_to_a_worker_without_its_block() -> None:
    order = Order(10**9, seed=4)
    expected = order.slice(2, 10, 20)
    data = pickle.dumps(order)
    assert len(data) < 200
    assert np.array_equal(pickle.loads(data).slice(2, 10, 20), expected)


@pytest.mark.parametrize(("epoch", "start", "stop"), [(0, -1, 5), (0, 6, 5), (0, 0, 11), (-1, 0, 5)])
def test_a_slice_outside_the_epoch_is_refused(epoch: int, start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=rf"{start} to {stop}\b.*\b10 samples"):
        Order(10, seed=0).slice(epoch, start, stop)


@pytest.mark.parametrize("samples", [0, -1, MAX_SAMPLES + 1])
def test_a_size_without_an_order_is_refused(samples: int) -> None:
    with pytest.raises(DataError, match=rf" {samples} samples"):
        Order(samples, seed=0)


def test_the_order_is_pinned_by_its_version() -> None:
    """If this fails, old runs can no longer be resumed: raise ORDER_VERSION along with the new values."""
    assert ORDER_VERSION == 1
    assert SHUFFLE_BELOW == 1_024
    golden = {
        (1, 42, 0, 0): [0],
        (10, 42, 0, 0): [5, 2, 8, 7, 1, 4],
        (1_023, 42, 1, 500): [43, 502, 355, 710, 81, 929],
        (1_024, 42, 1, 500): [135, 37, 62, 373, 334, 284],
        (4_097, 0, 3, 4_090): [439, 700, 4044, 3599, 3789, 834],
        (10**6, 2**63 - 1, 7, 65_533): [28005, 379078, 344080, 29091, 757053, 412948],
        (10**12, 42, 0, 999_999_999_997): [443134185981, 675061053427, 763654802899],
        (MAX_SAMPLES, 42, 0, 1): [4406960280122596248, 739614629820892292, 4005738648462597415],
    }
    for (samples, seed, epoch, start), expected in golden.items():
        stop = start + len(expected)
        assert Order(samples, seed).slice(epoch, start, stop).tolist() == expected, samples


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
    loader = DataLoader(Draws(), batch_size=2, num_workers=2, worker_init_fn=WorkerInit(seed, rank, epoch))
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
    assert pickle.loads(pickle.dumps(WorkerInit(1, 2, 3))) == WorkerInit(1, 2, 3)


def test_keys_are_the_same_in_another_process() -> None:
    """Python's own hash is not: it is salted."""
    code = "from lockstep.data.order import derive_key; print(derive_key('order', 1, 2))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == derive_key("order", 1, 2)
