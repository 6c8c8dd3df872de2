"""Mixtures: exact shares in every prefix, each part in its own epochs, stages, and wrong input."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset

import lockstep
from lockstep import Datasets, Mixture, Packed
from lockstep.errors import ConfigError, DataError
from tests.toys import Toy


class Sized:
    """A data set of any size."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.slow
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


def test_a_mixture_within_a_mixture_keeps_its_shares() -> None:
    inner = Mixture({"b": Sized(6), "c": Sized(4)}, {"b": 0.75, "c": 0.25})
    outer = Mixture({"a": Sized(100), "inner": inner}, {"a": 0.5, "inner": 0.5})
    run = outer.sampling().order(400, 1).slice(0, 0, 400)
    for stop in (8, 100, 400):
        counts = np.diff([0, *(int((run[:stop] < end).sum()) for end in (100, 106, 110))])
        assert np.abs(counts - stop * np.array([0.5, 0.375, 0.125])).max() <= 1
    assert [outer.joined[place] for place in (99, 100, 105, 106, 109)] == [99, 0, 5, 0, 3]
    assert isinstance(outer.joined, ConcatDataset)
    other = Mixture({"b": Sized(6), "c": Sized(4)}, {"b": 0.5, "c": 0.5})
    changed = Mixture({"a": Sized(100), "inner": other}, {"a": 0.5, "inner": 0.5})
    assert outer.sampling().facts.digest != changed.sampling().facts.digest


class Holding(Toy):
    """Trains on a data set that it is given."""

    def __init__(self, train: Any) -> None:
        super().__init__()
        self.train = train

    def datasets(self) -> Datasets:
        return Datasets(self.train)


def test_what_takes_samples_of_a_mixture_by_number_is_refused() -> None:
    mixture = Mixture({"a": [[1]], "b": [[2]]}, {"a": 0.5, "b": 0.5})
    for made in (Subset(mixture, [0]), ConcatDataset([mixture, [[3]]])):
        with pytest.raises(ConfigError, match="Mixture"):
            lockstep.plan(Holding(made))
        with pytest.raises(ConfigError, match=rf"\bMixture\b.*\b{type(made).__name__}\b"):
            Mixture({"a": made}, {"a": 1}).sampling()
    with pytest.raises(ConfigError, match=r"\bMixture\b.*\bPacked\b"):
        Packed(mixture, 4)


def test_shares_without_a_small_denominator_are_rounded_and_sum_to_one() -> None:
    mixture = Mixture({"a": Sized(3), "b": Sized(3), "c": Sized(3)}, {"a": 0.1234567, "b": 1 / 3, "c": 0.7})
    (exact,) = mixture.stages.values()
    assert sum(exact) == 1
    assert float(exact[0]) == pytest.approx(0.1234567 / (0.8234567 + 1 / 3), abs=1 / 65536)


@pytest.mark.parametrize(
    ("parts", "shares", "words"),
    [
        ({}, {}, "names no data set"),
        ({"a": []}, {"a": 1}, "'a' .*empty"),
        ({"a": {1, 2}}, {"a": 1}, "length"),
        ({"a": [1]}, {"b": 1}, r"shares .*\bb\b"),
        ({"a": [1]}, {"a": 0}, "shares"),
        ({"a": [1]}, {"a": -1}, "share .*'a'"),
        ({"a": [1]}, {"a": float("nan")}, "share .*'a'"),
        ({"a": [1]}, {"a": "1"}, "share .*'a'"),
        ({"a": [1], "b": [2]}, {"a": 10_000_000, "b": 50}, "share .*'b' .*5e-06"),
    ],
)
def test_wrong_mixtures_are_refused(parts: Any, shares: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Mixture(parts, shares)


def test_a_stage_begins_at_a_whole_number_of_samples() -> None:
    with pytest.raises(DataError, match=r"\b10\.5"):
        Mixture({"a": [1]}, {"a": 1}, {10.5: {"a": 1}})  # type: ignore[dict-item]
    assert [*Mixture({"a": [1]}, {"a": 1}, {np.int64(10): {"a": 1}, 2e1: {"a": 1}}).stages] == [0, 10, 20]  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "number",
    [np.float32, np.float64, torch.tensor, lambda x: torch.tensor(x, dtype=torch.float64), np.array, Decimal, Fraction],
)
def test_shares_are_numbers_of_any_kind(number: Any) -> None:
    parts = {"a": Sized(3), "b": Sized(3)}
    assert Mixture(parts, {"a": number(0.25), "b": number(0.75)}).stages == {0: (Fraction(1, 4), Fraction(3, 4))}
