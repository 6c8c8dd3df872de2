from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import Order
from lockstep.data.sampling import BucketedOrder, deal, hash_lengths
from lockstep.errors import ConfigError, DataError
from lockstep.planning.batch import parts


def lengths_of(samples: int, most: int = 50) -> np.ndarray:
    return np.random.default_rng(samples).integers(1, most + 1, samples)


@given(
    samples=st.integers(1, 3_000), block=st.integers(1, 40), blocks=st.integers(1, 20), seed=st.integers(0, 2**63 - 1)
)
def test_an_epoch_is_windows_of_the_order_cut_into_blocks_sorted_by_length(
    samples: int, block: int, blocks: int, seed: int
) -> None:
    window, order, lengths = block * blocks, Order(samples, seed), lengths_of(samples)
    indices = BucketedOrder(order, lengths, window, block).slice(2, 0, samples)
    for start in range(0, samples, window):
        mine = indices[start : start + window]
        source = order.slice(2, start, min(start + window, samples))
        assert sorted(mine) == sorted(source)
        place = {sample: position for position, sample in enumerate(source)}
        ranked = sorted(source, key=lambda sample: (lengths[sample], place[sample]))
        expected = {tuple(ranked[first : first + block]) for first in range(0, len(ranked), block)}
        found, left = set(), list(mine)
        while left:
            size = len(next(chunk for chunk in expected if chunk[0] == left[0]))
            found.add(tuple(left[:size]))
            left = left[size:]
        assert found == expected


@given(samples=st.integers(1, 2_000), data=st.data())
def test_slices_are_parts_of_one_sequence(samples: int, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, samples), max_size=6).map(sorted))
    lengths = lengths_of(samples)
    whole = BucketedOrder(Order(samples, 1), lengths, 64, 16).slice(0, 0, samples)
    used = BucketedOrder(Order(samples, 1), lengths, 64, 16)
    parts = [used.slice(0, a, b) for a, b in zip([0, *cuts], [*cuts, samples], strict=True)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_blocks_are_shuffled_anew_in_every_window_and_epoch() -> None:
    lengths = np.arange(4_096)
    order = BucketedOrder(Order(4_096, 1), lengths, 1_024, 32)

    def ranks(epoch: int, window: int) -> list[int]:
        """Which of the window's blocks stands where."""
        indices = order.slice(epoch, window * 1_024, (window + 1) * 1_024)
        return np.argsort(np.argsort(indices[::32])).tolist()

    seen = [ranks(epoch, window) for epoch in range(2) for window in range(4)]
    assert all(sorted(row) == list(range(32)) and row != sorted(row) for row in seen)
    assert len({tuple(row) for row in seen}) == len(seen)


def test_it_saves_most_of_the_padding() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000)

    def padded(order: Order | BucketedOrder) -> float:
        batches = lengths[order.slice(0, 0, 20_000)].reshape(-1, 32)
        return float(batches.max(axis=1).sum() * 32 / lengths.sum())

    assert padded(Order(20_000, 1)) > 3
    assert padded(BucketedOrder(Order(20_000, 1), lengths, 4_096, 32)) < 1.15


def test_equal_lengths_keep_a_random_order() -> None:
    indices = BucketedOrder(Order(512, 1), np.ones(512), 512, 512).slice(0, 0, 512)
    assert np.array_equal(indices, Order(512, 1).slice(0, 0, 512))


def test_the_bucketed_order_is_pinned() -> None:
    order = BucketedOrder(Order(5_000, 42), np.arange(5_000) * 7_919 % 50, 256, 8)
    assert order.slice(1, 300, 310).tolist() == [3491, 3291, 2541, 3691, 2558, 4858, 3958, 1308, 4787, 1887]


@pytest.mark.parametrize(("window", "block"), [(100, 32), (0, 8), (8, 0), (-8, 8), (4, 8)])
def test_a_window_that_is_no_multiple_of_the_block_is_refused(window: int, block: int) -> None:
    with pytest.raises(ConfigError, match=rf"{window} samples .*\b{block}\b") as caught:
        BucketedOrder(Order(10, 0), np.ones(10), window, block)
    assert caught.value.fix


@pytest.mark.parametrize("lengths", [np.ones(9), np.ones((10, 1)), ["long"] * 10])
def test_lengths_that_do_not_fit_the_samples_are_refused(lengths: np.ndarray) -> None:
    with pytest.raises(DataError, match="10 samples"):
        BucketedOrder(Order(10, 0), lengths, 8, 8)


def test_a_slice_outside_the_epoch_is_refused() -> None:
    with pytest.raises(IndexError, match=r"\b0 to 11\b.*\b10 samples"):
        BucketedOrder(Order(10, 0), np.ones(10), 8, 8).slice(0, 0, 11)


@given(items=st.integers(1, 500), lanes=st.sampled_from([1, 2, 4, 8, 64]))
def test_dealt_items_are_strided_within_each_lane(items: int, lanes: int) -> None:
    dealt = deal(items, lanes)
    assert sorted(dealt) == list(range(items))
    rounds = items // lanes
    for lane, (start, stop) in enumerate(parts(items, lanes)):
        mine = dealt[start:stop].tolist()
        assert mine[:rounds] == list(range(items))[lane : lane + rounds * lanes : lanes] or rounds == 0
        assert all(item >= rounds * lanes for item in mine[rounds:])
    if items % lanes == 0:
        assert dealt.tolist() == [item for lane in range(lanes) for item in range(items)[lane::lanes]]


@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=200).map(sorted),
    lanes=st.sampled_from([2, 4, 8]),
)
def test_lanes_of_sorted_items_are_equal_work(lengths: list[int], lanes: int) -> None:
    """But for one item in a lane's favour, and those of the last round: strided sums interleave."""
    work = np.array(lengths)[deal(len(lengths), lanes)]
    rounds = len(lengths) // lanes
    sums = [work[start : start + rounds].sum() for start, _ in parts(len(lengths), lanes)]
    assert max(sums) - min(sums) <= (lengths[-1] - lengths[0] if rounds else 0)


def test_any_other_length_is_another_hash() -> None:
    lengths = lengths_of(100)
    others = [lengths.copy() for _ in lengths]
    for place, other in enumerate(others):
        other[place] += 1
    assert len({hash_lengths(other) for other in [lengths, *others]}) == 101
    assert hash_lengths(np.repeat(lengths, 2)[::2]) == hash_lengths(lengths), "whatever lies between them in memory"
