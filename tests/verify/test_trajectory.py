"""Gaps and floors: arithmetic that must not be fooled by NaN, by zeros or by its own growth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.verify.trajectory import ROUNDING, Trajectory, floor_of, gap_between

LOSSES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6)


def trajectory(losses: list[float], **changes: Any) -> Trajectory:
    steps = len(losses)
    values: dict[str, Any] = {
        "loss": np.array(losses),
        "count": np.full(steps, 8.0),
        "grad_norm": np.ones(steps),
        "lr": np.full((steps, 1), 0.1),
        "weights": np.cumsum(np.ones((steps + 1, 3), dtype=np.float32), axis=0),
        "digest": np.arange(steps, dtype=np.uint64),
        "samples": np.full(steps, 8),
        "draws": (),
        "validation": ({"val_loss": 1.0},),
        "fingerprint": "a",
    }
    return Trajectory(**{**values, **changes})


@given(LOSSES, st.floats(1e-9, 0.5))
def test_a_gap_is_relative_symmetric_and_zero_only_for_equals(losses: list[float], share: float) -> None:
    one, other = trajectory(losses), trajectory([loss * (1 - share) for loss in losses])
    assert gap_between(one, one).loss.max() == 0
    assert np.allclose(gap_between(one, other).loss, share, rtol=1e-6)
    assert np.array_equal(gap_between(one, other).loss, gap_between(other, one).loss)


def test_nan_equals_nan_and_nothing_else() -> None:
    one, other = trajectory([1.0, math.nan, math.nan]), trajectory([1.0, math.nan, 2.0])
    assert gap_between(one, other).loss.tolist() == [0.0, 0.0, math.inf]


def test_weights_are_measured_against_the_way_they_came() -> None:
    one = trajectory([1.0, 1.0])
    shifted = one.weights.copy()
    shifted[1:] += 0.5
    gap = gap_between(one, trajectory([1.0, 1.0], weights=shifted))
    assert gap.weights == pytest.approx([0.5, 0.25])


@given(st.lists(st.floats(0, 1e-3), min_size=3, max_size=3), st.floats(2.0, 100.0))
def test_the_floor_never_falls_and_parting_is_beyond_it(noise: list[float], factor: float) -> None:
    base = trajectory([1.0, 1.0, 1.0])
    noisy = gap_between(base, trajectory([1.0 - n for n in noise]))
    floor = floor_of([noisy], base)
    values = floor.values["loss"]
    assert (np.diff(values) >= 0).all()
    assert values[0] >= ROUNDING
    assert floor.parting(noisy, factor) is None
    far = trajectory([1.0, 1.0, 1.0 - min(0.9, 2 * factor * float(values[2]))])
    assert floor.parting(gap_between(base, far), factor) == ("loss", 2)


def test_no_number_in_a_validation_is_a_difference_and_no_crash() -> None:
    base = trajectory([1.0])
    gap = gap_between(base, trajectory([1.0], validation=({"val_loss": math.nan},)))
    assert floor_of([], base).parting(gap, 30) == ("validation loss", 0)


def test_validation_counts_only_where_training_agrees() -> None:
    base = trajectory([1.0, 1.0])
    floor = floor_of([], base)
    other = {"validation": ({"val_loss": 2.0},)}
    assert floor.parting(gap_between(base, trajectory([1.0, 1.0], **other)), 30) == ("validation loss", 0)
    assert floor.parting(gap_between(base, trajectory([1.0, 1.1], **other)), 30) == ("loss", 1)
