"""Model, strategy and update of one rank, as the plan asks, from a checkpoint or from the start."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.checkpoint.store import Snapshot
from lockstep.data.requests import Window
from lockstep.engine.ablation import Watched
from lockstep.engine.distributed.buffers import check_start
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.engine.generators import seed_everything
from lockstep.engine.optim.precision import cast
from lockstep.engine.optim.step import Update, build_update, untrained_note
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import load_initial_weights, load_weights, restore, restored_state
from lockstep.engine.state import TrainState
from lockstep.engine.strategies.base import Strategy
from lockstep.engine.strategies.build import build_strategy, divide, on_device
from lockstep.engine.strategies.reducers import Flags
from lockstep.engine.task import Context, Datasets, Task
from lockstep.engine.trained import Callbacks, bare, build_model, refuse_meta, train_mode
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

    def train(self) -> None:
        train_mode(self.strategy.module)

    def remark(self, text: str | None) -> None:
        if text:
            self.notes.append(Note("remark", text))


def build_parts(rank: RankContext, task: Task, datasets: Datasets, snapshot: Snapshot | None) -> Parts:
    """Build them from ``snapshot``, or from the start. Collective."""
    config = rank.config
    plan = rank.plan
    state = restored_state(rank, snapshot)
    remarks = list[str | None]()
    task._lockstep_context = Context(state)
    seed_everything(plan.seed)  # opening the data may have drawn numbers
    model = build_model(task)
    refuse_meta(model)
    if snapshot is None:
        load_initial_weights(model, config.init_from, rank.collectives)
    if plan.sync_batchnorm:
        model = convert(model)
    model = cast(model, plan.placement["precision"])
    divided = None
    if plan.strategy.divides:
        divided = divide(rank, task, model, datasets)
    else:
        model = on_device(model, rank)
    update = build_update(rank, task, model, divided, validates=datasets.val is not None)
    remarks += [] if divided is None else divided.remarks
    if snapshot is not None:
        remarks += restore(rank, snapshot, state, model, lambda: _load(rank, snapshot, task, model, update))
    traces = config.debug.trace != "off"
    off = config.debug.switch_off
    warning = None
    if divided is None and not traces:  # a trace compares them itself
        warning = check_start(model, rank.collectives, exact=plan.reproducibility == "exact")
    watched = Watched(task, model, off) if traces or off else None
    strategy = build_strategy(rank, watched or task, model, update.precision, divided)
    if watched is not None:
        strategy.watching = watched.watching
    callbacks = Callbacks(task)
    update.after_backward = callbacks.caller("on_after_backward", task._lockstep_context, strategy.module)
    remarks.append(untrained_note(update, model, config.training.max_grad_norm))
    draws = set() if watched is None else watched.draws
    notes = [Note("remark", text) for text in remarks if text]
    notes += [] if warning is None else [Note("warning", warning, "warning")]
    return Parts(rank, strategy, update, state, callbacks, draws, notes)


def _load(rank: RankContext, snapshot: Snapshot, task: Task, model: nn.Module, update: Update) -> None:
    load_weights(model, snapshot.model, rank.run_dir.path)
    update.load_state_dict(snapshot.trainer["update"])
    task.load_state_dict(snapshot.trainer["task"])
