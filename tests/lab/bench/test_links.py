"""Formulas of communication benchmarks, the α–β fit, and slow links."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.lab.bench.comm import bus_factor, fit_alpha_beta, message_sizes, slow_links

SIZES = message_sizes(64 << 20)


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7))
def test_the_fit_recovers_latency_and_bandwidth(alpha: float, beta: float) -> None:
    fit = fit_alpha_beta(SIZES, [alpha + beta * size for size in SIZES])
    assert fit.alpha_s == pytest.approx(alpha, rel=1e-6)
    assert fit.beta_s_per_byte == pytest.approx(beta, rel=1e-6)
    assert fit.error < 1e-6


@given(st.lists(st.floats(1e-6, 1.0), min_size=len(SIZES), max_size=len(SIZES)))
def test_no_fit_predicts_negative_times(seconds: list[float]) -> None:
    fit = fit_alpha_beta(SIZES, seconds)
    assert fit.alpha_s >= 0
    assert fit.beta_s_per_byte >= 0
    assert fit.seconds(SIZES[-1]) >= fit.seconds(0)


def test_bus_bandwidths_follow_nccl_tests() -> None:
    assert bus_factor("all_reduce", 8) == pytest.approx(1.75)
    assert bus_factor("all_gather", 4) == pytest.approx(0.75)
    assert bus_factor("reduce_scatter", 4) == pytest.approx(0.75)
    assert bus_factor("broadcast", 4) == 1


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_slow_rank_is_told_from_a_slow_link(ranks: int) -> None:
    pairs = list(itertools.combinations(range(ranks), 2))
    assert slow_links(dict.fromkeys(pairs, 10.0)) == ([], [])
    one_rank = {pair: 3.0 if 1 in pair else 10.0 for pair in pairs}
    assert slow_links(one_rank) == ([1], [])
    one_link = {pair: 3.0 if pair == (0, 2) else 10.0 for pair in pairs}
    assert slow_links(one_link) == ([], [(0, 2)])


def test_two_ranks_have_nothing_to_compare() -> None:
    assert slow_links({(0, 1): 1.0}) == ([], [])


def test_sizes_go_from_1_kb_to_the_largest() -> None:
    assert SIZES[0] == 1024
    assert SIZES[-1] == 64 << 20
