"""Gaps and floors: arithmetic that must not be fooled by NaN, by zeros or by its own growth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.verification.trajectory import (
    ROUNDING,
    Divergence,
    Trajectory,
    divergence,
    floor_of,
    gap_between,
    order_effect,
)

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
    assert gap_between(one, one)["loss"].max() == 0
    assert np.allclose(gap_between(one, other)["loss"], share, rtol=1e-6)
    assert np.array_equal(gap_between(one, other)["loss"], gap_between(other, one)["loss"])


def test_nan_equals_nan_and_nothing_else() -> None:
    one, other = trajectory([1.0, math.nan, math.nan]), trajectory([1.0, math.nan, 2.0])
    assert gap_between(one, other)["loss"].tolist() == [0.0, 0.0, math.inf]


def test_a_parameter_that_rounding_alone_moves_is_left_out() -> None:
    sizes = {"layer.weight": 2, "layer.bias": 1}
    one = trajectory([1.0, 1.0], sizes=sizes)
    shifted = one.weights.copy()
    shifted[1:] -= np.array([1e-7, 0.0, 2.0], dtype=np.float32)
    other = trajectory([1.0, 1.0], weights=shifted, sizes=sizes)
    assert one.moved_by_rounding(other) == ["layer.bias"]
    gap = gap_between(one.without(["layer.bias"]), other.without(["layer.bias"]))["weights"]
    assert gap.max() < 1e-6 < gap_between(one, other)["weights"].min()
    assert one.without(["layer.bias"]).sizes == {"layer.weight": 2}


def test_weights_are_measured_against_the_way_they_came() -> None:
    one = trajectory([1.0, 1.0])
    shifted = one.weights.copy()
    shifted[1:] += 0.5
    gap = gap_between(one, trajectory([1.0, 1.0], weights=shifted))
    assert gap["weights"] == pytest.approx([0.5, 0.25])


@given(st.lists(st.floats(0, 1e-3), min_size=3, max_size=3), st.floats(2.0, 100.0))
def test_the_floor_never_falls_and_parting_is_beyond_it(noise: list[float], factor: float) -> None:
    base = trajectory([1.0, 1.0, 1.0])
    noisy = gap_between(base, trajectory([1.0 - n for n in noise]))
    floor = floor_of([noisy], base)
    values = floor["loss"]
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


def test_buffers_count_only_where_training_agrees_and_each_for_itself() -> None:
    means = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], dtype=np.float32)
    large = 1e6 * means
    base = trajectory([1.0, 1.0], merged=(0, 1, 2), buffers={"large": large, "mean": means})
    other = means + np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 0.1]], dtype=np.float32)
    gap = gap_between(base, trajectory([1.0, 1.0], merged=(0, 1, 2), buffers={"large": large, "mean": other}))
    assert floor_of([], base).parting(gap, 30) == ("buffer mean", 1)
    early = gap_between(base, trajectory([1.0, 1.0], merged=(0, 1), buffers={"large": large[:2], "mean": means[:2]}))
    assert floor_of([], base).parting(early, 30) is None, "the other run has not merged after the second step"
    far = gap_between(base, trajectory([1.0, 1.1], merged=(0, 1, 2), buffers={"large": large, "mean": other}))
    assert floor_of([], base).parting(far, 30) == ("loss", 1)


@pytest.mark.parametrize(
    ("row", "norm", "found"),
    [
        (0, 1.0, Divergence(1, 0, "b", "start")),
        (3, 1.0, Divergence(1, 2, "b", "optimizer")),
        (3, 2.0, Divergence(1, 2, "b", "gradient")),
        (4, 1.0, Divergence(1, 2, "b", "hook")),
        (None, 1.0, Divergence(1, 2, "mean", "merge")),
    ],
)
def test_ranks_that_diverge_are_found_with_step_parameter_and_reason(
    row: int | None, norm: float, found: Divergence
) -> None:
    def columns(rank: int) -> dict[str, Any]:
        sums, norms = np.zeros((5, 2), dtype=np.int64), np.ones(2)
        if rank == 1 and row is not None:
            sums[row:, 1], norms[1] = 7, norm
        return {
            "sums": sums,
            "names": np.array(["a", "b"]),
            "grad_norm": norms,
            "merged": np.array([0, 2]),
            "shared": np.array(["mean"]),
            "buffer_sums": np.array([[0], [rank]]),
        }

    assert divergence([columns(0), columns(1)]) == found
    assert divergence([columns(0), columns(0)]) is None


def test_a_run_and_its_resume_make_one() -> None:
    whole = trajectory([4.0, 3.0, 2.0], merged=(0, 1, 3), buffers={"mean": np.ones((3, 1), dtype=np.float32)})
    weights = whole.weights[1:].copy()
    resumed = trajectory(
        [3.0, 2.0],
        weights=weights,
        digest=whole.digest[1:],
        merged=(0, 3),
        buffers={"mean": np.ones((2, 1), dtype=np.float32)},
    )
    both = whole.then(1, resumed)
    assert both.merged == whole.merged
    assert whole.first_other_samples(both) is None
    assert floor_of([], whole).parting(gap_between(whole, both), 30) is None


@pytest.mark.parametrize(
    ("losses", "effect"),
    [
        ([0.0, 4e-7, 5e-3], (3, 5e-3)),  # kept from batch to batch
        ([2e-3, 0.0, 0.0], (1, 2e-3)),
        ([4e-7, 2e-5, 5e-3], None),  # rounding that grew
        ([0.0, 0.0, 0.0], None),
    ],
)
def test_a_jump_of_the_loss_is_no_rounding(losses: list[float], effect: tuple[int, float] | None) -> None:
    assert order_effect({"loss": np.array(losses)}) == effect
