"""Formulas of communication benchmarks."""

from __future__ import annotations

import pytest

from lockstep.lab.bench.comm import bus_factor, message_sizes

SIZES = message_sizes(64 << 20)


def test_bus_bandwidths_follow_nccl_tests() -> None:
    assert bus_factor("all_reduce", 8) == pytest.approx(1.75)
    assert bus_factor("all_gather", 4) == pytest.approx(0.75)
    assert bus_factor("reduce_scatter", 4) == pytest.approx(0.75)
    assert bus_factor("broadcast", 4) == 1


def test_sizes_go_from_1_kb_to_the_largest() -> None:
    assert SIZES[0] == 1024
    assert SIZES[-1] == 64 << 20
