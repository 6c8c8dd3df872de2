"""Model, strategy and update of one rank, and the step that they take."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.data.requests import Window
from lockstep.engine.optim.step import Update
from lockstep.engine.rank_context import RankContext
from lockstep.engine.state import TrainState
from lockstep.engine.strategies.base import Strategy
from lockstep.engine.strategies.reducers import Flags
from lockstep.engine.trained import Callbacks, bare
from lockstep.events import Note


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


class Parts(NamedTuple):
    """What takes the steps of one rank.

    ``draws``: the random functions that the forward pass has called, a set that may still grow. ``notes``: shown at
    the start.
    """

    rank: RankContext
    strategy: Strategy
    update: Update
    state: TrainState
    callbacks: Callbacks
    draws: Set[str]
    notes: list[Note]

    @property
    def model(self) -> nn.Module:
        """The task's model, without the wrappers of a strategy."""
        return bare(self.strategy.module)

    def step(self, window: Window, batches: Iterator[Any], flags: Flags) -> StepResult:
        """Take the optimizer step of ``window``, this rank's part of a global batch.

        Args:
            batches: of the requests of the window, in order.
            flags: this rank's requests, on which all ranks must agree (stop, time, save).
        """
        state = self.state
        update = self.update
        plan = self.rank.plan
        reduced = self.strategy.gradients(window, batches, state.step, flags)
        want_norm = (state.step + 1) % self.rank.config.telemetry.log_interval == 0
        update.apply(state.step, reduced.count, reduced.divisor, want_norm=want_norm)
        state.advance(len(window.requests), window.size, window.epoch, window.stop)
        ended = plan.batch.window(window.stop) is None
        return StepResult(state.step, window, update.rates.lr, reduced.total, reduced.count, ended, reduced.flags)

    def remark(self, text: str | None) -> None:
        if text:
            self.notes.append(Note("remark", text))
