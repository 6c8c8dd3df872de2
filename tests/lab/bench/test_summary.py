"""Arithmetic on measured times, for any times."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.lab.bench.measure import slow_ranks, summarise, with_waits
from lockstep.lab.bench.scaling import device_counts, merged
from lockstep.lab.bench.timing import PARTS

SECONDS = st.floats(1e-6, 10.0)
STEP = st.fixed_dictionaries(dict.fromkeys(PARTS, SECONDS))


@st.composite
def ranks_of_steps(draw: st.DrawFn) -> list[list[dict[str, float]]]:
    ranks, steps = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    return [draw(st.lists(STEP, min_size=steps, max_size=steps)) for _ in range(ranks)]


@given(ranks_of_steps(), st.integers(1, 10_000))
def test_parts_add_up_to_the_step_and_shares_to_one(ranks: list[list[dict[str, float]]], samples: int) -> None:
    row = summarise(ranks, samples)
    assert sum(row["parts_ms"].values()) == pytest.approx(row["mean_ms"])
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert row["step_ms_low"] <= row["step_ms"] <= row["step_ms_high"]
    assert row["samples_per_s"] == pytest.approx(samples / row["step_ms"] * 1e3)
    assert set(row["shares"]) == {*PARTS, "wait"}


@given(ranks_of_steps())
def test_waiting_is_taken_from_communication_and_the_busiest_rank_never_waits(
    ranks: list[list[dict[str, float]]],
) -> None:
    for before, after in zip(zip(*ranks, strict=True), zip(*with_waits(ranks), strict=True), strict=True):
        for old, new in zip(before, after, strict=True):
            assert new["communication"] + new["wait"] == pytest.approx(old["communication"])
            assert new["communication"] >= 0
            assert new["wait"] >= 0
        busy = [sum(old.values()) - old["communication"] for old in before]
        assert after[busy.index(max(busy))]["wait"] == 0


def test_a_slow_rank_makes_the_other_wait() -> None:
    own = dict.fromkeys(PARTS, 0.0)
    fast = [{**own, "forward": 1.0, "communication": 3.0}] * 3
    slow = [{**own, "forward": 3.0, "communication": 1.0}] * 3
    row = summarise([fast, slow], 64)
    assert row["parts_ms"]["wait"] == pytest.approx(1000)  # 2 s on one rank, none on the other
    assert row["parts_ms"]["communication"] == pytest.approx(1000)
    assert slow_ranks(row["busy_ms"]) == [1]
    assert slow_ranks([5.0]) == []


def test_a_hiccup_changes_neither_the_median_nor_the_parts() -> None:
    steps = [{**dict.fromkeys(PARTS, 0.0), "forward": 0.01} for _ in range(20)]
    steps[7]["forward"] = 5.0
    row = summarise([steps], 10)
    assert row["step_ms"] == pytest.approx(10)
    assert row["parts_ms"]["forward"] == pytest.approx(10)


@given(st.integers(1, 1000))
def test_one_device_and_all_of_them_are_measured(devices: int) -> None:
    counts = device_counts(devices)
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert counts[-1] == devices
    assert len(counts) <= 14


def repeats(mode: str, *rates: float) -> list[dict[str, Any]]:
    """Rows of two devices; a rate of 0: out of memory."""
    label = {"devices": ["cpu", "cpu"], "ranks": 2, "strategy": "fsdp", "mode": mode}
    rest = {"status": "ok", "global_batch": 8, "accumulate": 1, "epoch_s": 1.0, "step_ms": 2.0, "memory_mb": 1.0}
    rest |= {"memory_mb_per_device": [1.0, 1.0], "busy_ms": [1.0, 1.0]}
    rest["shares"] = {"data": 0.5, "forward": 0.5}
    bad = {**label, "status": "out of memory", "reason": "rank 1 was killed"}
    return [{**label, **rest, "samples_per_s": rate} if rate else bad for rate in rates]


def test_repeats_that_failed_beside_good_ones_are_told() -> None:
    notes: list[str] = []
    (row,) = merged(repeats("weak", 1.0, 0, 3.0), notes)
    assert notes == [
        "2 devices, fsdp weak: 1 of 3 repeats ended early, the first one out of memory (rank 1 was killed)"
    ]
    assert (row["repeats"], row["samples_per_s"], row["status"]) == (2, 2.0, "ok")
    notes.clear()
    assert [row["status"] for row in merged([*repeats("weak", 1.0, 1.0), *repeats("strong", 0, 0)], notes)] == [
        "ok",
        "out of memory",
    ]
    assert notes == [], "its row says so"
