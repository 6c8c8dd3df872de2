"""Which evaluation was the best so far: one rule for every engine."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lockstep.engine.state import TrainState


def judge(state: TrainState, metrics: Mapping[str, float], value: float, mode: str, epoch: int) -> bool:
    """Note in ``state`` whether ``value`` is the best so far; ``metrics`` are those of its evaluation.

    Of equal values the one with the smaller ``val_loss`` is the best: a word error rate stays at 1 while the first
    letters are learnt.
    """
    best = state.best_value
    loss, lowest = metrics.get("val_loss", math.nan), state.best_metric.get("val_loss", math.nan)
    better = best is None or (value < best if mode == "min" else value > best) or (value == best and loss < lowest)
    if not better or not math.isfinite(value):
        state.evaluations_without_gain += 1
        return False
    state.best_value, state.best_epoch, state.best_step = value, epoch, state.step
    state.best_metric = {name: v for name, v in metrics.items() if name.startswith("val_")}
    state.evaluations_without_gain = 0
    return True
