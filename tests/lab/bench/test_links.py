"""Formulas of communication benchmarks, and the α–β fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.lab.bench.comm import bus_factor, fit_alpha_beta, message_sizes

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


def test_sizes_go_from_1_kb_to_the_largest() -> None:
    assert SIZES[0] == 1024
    assert SIZES[-1] == 64 << 20
