"""The loop: a generator of finished steps. It sees a window, a strategy and an update, never a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.data.requests import Window
from lockstep.engine.optim.step import Update
from lockstep.engine.state import TrainState
from lockstep.engine.strategies.base import Flags, Strategy


@dataclass(slots=True)
class StepResult:
    """A finished optimizer step. ``loss_total`` and ``loss_count`` sum over all ranks, on the device."""

    step: int
    window: Window
    lr: float
    loss_total: Tensor
    loss_count: Tensor | float
    epoch_ended: bool
    flags: Flags | None


def training_steps(
    windows: Iterator[Window],
    batches: Iterator[Any],
    strategy: Strategy,
    update: Update,
    state: TrainState,
    *,
    epoch_over: Callable[[int], bool],
    requested: Callable[[], Flags],
    norm_every: int,
) -> Iterator[StepResult]:
    """Run one optimizer step per window and yield its result; ``state`` is already updated when a result is yielded.

    Args:
        windows: this rank's part of each step (:func:`lockstep.data.requests.windows`).
        batches: the batch of each request of each window, in order.
        epoch_over: whether an epoch ends with the window that stops at this position.
        requested: this rank's requests, on which all ranks must agree (stop, time, save).
        norm_every: steps between gradient norms when nothing needs them.
    """
    for window in windows:
        reduced = strategy.gradients(window, batches, state.step, requested())
        update.apply(state.step, reduced.count, reduced.divisor, want_norm=(state.step + 1) % norm_every == 0)
        state.advance(len(window.requests), window.size, window.epoch, window.stop)
        yield StepResult(
            state.step, window, update.lr, reduced.total, reduced.count, epoch_over(window.stop), reduced.flags
        )
