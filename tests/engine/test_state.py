"""Which evaluation is the best, and when patience runs."""

from __future__ import annotations

import math

from lockstep.engine.state import TrainState, judge


def judged(values: list[tuple[float, float]], mode: str = "min") -> list[tuple[int | None, int]]:
    """After each (metric, loss): the best epoch, and the evaluations without gain."""
    state, found = TrainState(), []
    for epoch, (value, loss) in enumerate(values, start=1):
        judge(state, {"val_loss": loss, "val_wer": value}, value, mode, epoch)
        state = TrainState.from_state_dict(state.state_dict())
        found.append((state.best_epoch, state.evaluations_without_gain))
    return found


def test_the_loss_breaks_ties_and_patience_waits_while_it_falls() -> None:
    stuck = [(1.0, 3.0), (1.0, 2.0), (1.0, 2.5), (1.0, 2.6), (0.9, 2.7), (0.9, 2.8), (0.9, 2.6), (1.0, 1.0)]
    assert judged(stuck) == [(1, 0), (2, 0), (2, 1), (2, 2), (5, 0), (5, 1), (7, 0), (7, 1)]
    assert judged([(0.5, 1.0), (0.5, 0.9), (0.4, 0.1), (0.5, 0.9)], "max") == [(1, 0), (2, 0), (2, 1), (2, 2)]


def test_values_that_are_not_finite_are_never_the_best() -> None:
    assert judged([(math.nan, 1.0), (1.0, math.nan), (1.0, 2.0), (math.inf, 0.0)]) == [
        (None, 1),
        (2, 0),
        (2, 1),
        (2, 2),
    ]
