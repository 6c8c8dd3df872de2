"""Mixtures: exact shares in every prefix, each part in its own epochs, stages, and wrong input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.mixture import Mixture
from lockstep.errors import DataError


class Sized:
    """A data set of any size."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


@given(
    shares=st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any),
    sizes=st.lists(st.integers(1, 40) | st.just(10**9), min_size=7, max_size=7),
    epoch=st.integers(0, 10**6),
)
def test_every_prefix_has_the_exact_share_of_each_part(shares: list[int], sizes: list[int], epoch: int) -> None:
    parts = {str(place): Sized(sizes[place]) for place in range(len(shares))}
    order = Mixture(parts, dict(zip(parts, shares, strict=True))).sampling().order(800, 5)
    ends = np.cumsum(sizes[: len(shares)])
    of_part = np.searchsorted(ends, order.slice(0, 0, 800), side="right")
    counts = np.cumsum(of_part[:, None] == np.arange(len(shares)), axis=0)
    exact = np.arange(1, 801)[:, None] * np.array(shares) / sum(shares)
    assert np.abs(counts - exact).max() < 1
    # The same at any epoch, and in any slices.
    whole = order.slice(epoch, 0, 800)
    assert np.array_equal(np.concatenate([order.slice(epoch, 0, 345), order.slice(epoch, 345, 800)]), whole)


def test_each_part_has_its_own_epochs() -> None:
    order = Mixture({"a": Sized(10), "b": Sized(4)}, {"a": 0.5, "b": 0.5}).sampling().order(14, 1)
    run = np.concatenate([order.slice(epoch, 0, 14) for epoch in range(40)])
    for first, size in ((0, 10), (10, 4)):
        mine = run[(run >= first) & (run < first + size)]
        rounds = mine[: len(mine) // size * size].reshape(-1, size)
        assert (np.sort(rounds) == np.arange(first, first + size)).all()


def test_stages_begin_at_their_sample_and_parts_continue() -> None:
    shares = {"a": 1.0, "b": 0.0}
    mixture = Mixture({"a": Sized(10), "b": Sized(10)}, shares, {25: {"a": 0.5, "b": 0.5}, 60: {"a": 0, "b": 1}})
    assert "from sample 25: a 0.5, b 0.5" in mixture.sampling().facts.kind
    order = mixture.sampling().order(20, 1)
    run = np.concatenate([order.slice(epoch, 0, 20) for epoch in range(4)])
    assert (run[:25] < 10).all()
    assert (run[25:60] < 10).sum() in (17, 18)
    assert (run[60:] >= 10).all()
    mine = run[run < 10]
    assert (np.sort(mine[:40].reshape(4, 10)) == np.arange(10)).all(), "the second stage continues its epochs"


def test_shares_without_a_small_denominator_are_rounded_and_sum_to_one() -> None:
    mixture = Mixture({"a": Sized(3), "b": Sized(3), "c": Sized(3)}, {"a": 0.1234567, "b": 1 / 3, "c": 0.7})
    (exact,) = mixture.stages.values()
    assert sum(exact) == 1
    assert float(exact[0]) == pytest.approx(0.1234567 / (0.8234567 + 1 / 3), abs=1 / 65536)


@pytest.mark.parametrize(
    ("parts", "shares", "words"),
    [
        ({}, {}, "names no data set"),
        ({"a": []}, {"a": 1}, "'a' of a mixture is empty"),
        ({"a": [1]}, {"b": 1}, "shares of a mixture are those of b"),
        ({"a": [1]}, {"a": 0}, "all shares"),
        ({"a": [1]}, {"a": -1}, "share of 'a'"),
        ({"a": [1]}, {"a": float("nan")}, "share of 'a'"),
    ],
)
def test_wrong_mixtures_are_refused(parts: Any, shares: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Mixture(parts, shares)
