"""The events of a run from a Trainer that trains a user's module, and the requests that ranks agree on after a step."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from lockstep._compat.lightning import call_before
from lockstep.engine.optim.averages import Averages
from lockstep.engine.optim.groups import match_layouts
from lockstep.engine.partition import blocks_of, checkpoint_activations
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import frozen_names
from lockstep.engine.run_log import RunLog
from lockstep.engine.state import EndedBy
from lockstep.engine.strategies.reducers import FLAG_INTERVAL, step_sums
from lockstep.engine.task import Task
from lockstep.lightning.callbacks import logged_since
from lockstep.lightning.dataloaders import Step, epoch_steps
from lockstep.rundir.heartbeat import Activity, pulse
from lockstep.telemetry.loggers import as_row, row_name

#: Stands for the checkpoints of the run as a path.
RUN_CHECKPOINTS = "lockstep"
#: Likewise, for a state in memory, which later checkpoints are.
KEPT_STATE = "lockstep-kept"


class RunLogCallback(Checkpoint):
    """Drives the run log from a Trainer: counts steps and samples, saves, and stops all ranks on the same step.

    A ``Checkpoint`` in Lightning's sense: its epoch-end hook comes after that of the module, so rows are complete.
    State is saved at the start of the next batch or epoch, when the module's hooks and the schedulers have run. Of a
    run that ends within an epoch, the state before the hooks of the epoch's end is saved: a resumed run calls them.

    Attributes:
        averages: of the weights; in use while it validates and saves. Made when the module is on its device.
        evaluated: values that the latest evaluation logged, or without names of a validation, the latest epoch.
    """

    averages: Averages | None = None
    _module: pl.LightningModule
    evaluated: Mapping[str, float] = MappingProxyType({})

    def __init__(self, rank: RankContext, log: RunLog, averaged: Mapping[str, Any] | None = None) -> None:
        self._rank = rank
        self._log = log
        self._state = log.state
        self._batch = rank.plan.batch
        self._averaged = averaged
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self._losses: list[tuple[Tensor, int]] = []
        self._returns_loss = False
        self._steps: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._micro = 0
        #: Whether to save at the next batch, and as the best or not.
        self._due: bool | None = None
        #: Whether the checkpoint that is being saved is the best so far.
        self._saves_best = False
        self._left_at: float | None = None
        self._waited_s = 0.0
        self._earlier: dict[str, Any] = {}
        self._lr = math.nan
        self._norm: float | None = None
        #: Whether the latest validation was within an epoch, and so has been judged already.
        self._judged = False
        #: Whether the state to save is kept, from before the end of the epoch.
        self._is_kept = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():  # that of the Trainer stops without a checkpoint
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self._module = pl_module
        for optimizer in trainer.optimizers:
            match_layouts(optimizer)  # Lightning has restored them
        if self._rank.config.training.activation_checkpointing:
            checkpoint_activations(pl_module, blocks_of(Task(), pl_module))
        self.averages = Averages(self._rank.config.averaging, pl_module, self._rank.plan.total_steps)
        self.averages.restore(self._averaged)
        call_before(trainer.fit_loop, "on_advance_start", lambda: self._save_if_due(trainer))
        call_before(trainer.fit_loop.epoch_loop, "on_advance_end", lambda: self._after_batch(trainer))
        call_before(trainer.fit_loop, "on_advance_end", lambda: self._before_epoch_end(trainer))
        pulse.at(Activity.FIRST_STEP, self._state.step)
        self._log.unpause()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._steps = epoch_steps(self._batch, self._rank.collectives.rank, self._state.position)
        self._step = None
        self._micro = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        pulse.at(Activity.STEP)
        trainer.fit_loop.restarting = False  # else plateau schedulers would miss the end of a resumed epoch
        if self._left_at is not None:
            self._waited_s += time.perf_counter() - self._left_at
        self._save_if_due(trainer)
        groups = trainer.optimizers[0].param_groups if trainer.optimizers else []
        self._lr = float(groups[0]["lr"]) if groups else math.nan
        if self._step is None:
            self._step = next(self._steps)
            if self._log.is_logged(self._state.step + 1):
                self._log.time_own_work()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._log.is_logged(self._state.step + 1):
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = self._step
        every = self._rank.config.validation
        assert step is not None
        start, stop = step.micro_batches[self._micro]
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            # The Trainer has divided it for the accumulation.
            self._returns_loss = True
            self._losses.append((loss.detach() * trainer.accumulate_grad_batches, stop - start))
        self._micro += 1
        stepped = self._micro == len(step.micro_batches)
        if stepped:
            self._finish_step(trainer, step)
            self._step = None
            self._micro = 0
        if every.every_steps is not None:
            # Lightning validates every N batches or at the ends of epochs; this makes it do both.
            validates = self._state.step % every.every_steps == 0
            if self._is_epoch_over:
                validates = (self._state.epoch + 1) % every.every_epochs == 0
            trainer.val_check_batch = 1 if stepped and validates else sys.maxsize
        self._left_at = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.at(Activity.EVALUATING)
        self._log.pause()
        if self.averages is not None:  # else it is the sanity check
            self.averages.swap()

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        pulse.at(Activity.EVALUATING)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.at(Activity.COMPUTING_METRICS)  # in the hook of the module, which comes next

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.at(Activity.HOOKS)
        if self.averages is not None:
            self.averages.swap()
        self._log.unpause()
        self._left_at = time.perf_counter()
        if trainer.sanity_checking:
            return
        self._judged = not trainer.is_last_batch
        if self._judged:  # else the epoch's row judges it
            metrics = _of_validation(_numbers(trainer.callback_metrics))
            improved = self._log.judge(self._of_main(metrics), uses_patience=self._uses_patience)
            self._log.evaluated(metrics, improved)
            self._due = True if improved else self._due
            trainer.should_stop = trainer.should_stop or self._log.ended_by is not None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        over = self._is_epoch_over
        if not over and not trainer.should_stop:
            return  # on_train_batch_start() has left the rest of the epoch out
        mean_loss = self._log.sum_epoch()
        metrics = dict(trainer.callback_metrics)
        row = logged = _numbers(logged_since(self._earlier, metrics))
        self._earlier = metrics
        self.evaluated = _of_validation(logged) or logged
        if self._returns_loss:
            row = logged | {"train_loss": mean_loss}  # that of a module may be of the last batch, on rank 0
        is_judged = self._judged and row_name(self._rank.plan.monitor).startswith("val_")
        improved = self._log.end_epoch(
            row,
            self._lr,
            ended=over,
            judged=None if is_judged else self._of_main(self._log.epoch_numbers(self._lr) | row),
            uses_patience=self._uses_patience,
        )
        if self._log.ended_by is EndedBy.COMPLETED:
            trainer.should_stop = True
        self._due = improved
        if over:
            self._begin_epoch()
        if trainer.should_stop and self._log.ended_by is None:  # a callback of the user's
            self._log.ended_by = EndedBy.COMPLETED

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log.flush()
        self._save_if_due(trainer)
        pulse.at(Activity.ENDING)

    # One step.

    @property
    def _is_epoch_over(self) -> bool:
        return self._batch.window(self._state.position) is None

    def _finish_step(self, trainer: pl.Trainer, step: Step) -> None:
        state = self._state
        state.advance(len(step.micro_batches), step.stop - step.start, state.epoch, step.stop)
        assert self.averages is not None
        self.averages.update(state.step)
        self._log.step(step.stop - step.start, self._waited_s)
        self._waited_s = 0.0
        logs = self._log.is_logged(state.step)
        on_host = trainer.strategy.root_device.type == "cpu"
        if on_host or logs or self._is_epoch_over or state.step % FLAG_INTERVAL == 0:
            self._agree(trainer)
        if logs:
            loss: float | None = math.nan
            if not self._returns_loss:  # as with manual optimization
                names = [f"{name}{end}" for name in ("loss", "train_loss", "train/loss") for end in ("", "_step")]
                logged = trainer.logged_metrics
                loss = next((float(logged[name]) for name in names if name in logged), None)
            self._log.log_step(self._lr, self._norm, _numbers(trainer.logged_metrics), without_items=loss)

    def _agree(self, trainer: pl.Trainer) -> None:
        """Sum losses and requests over ranks, so that all of them act on the same step."""
        over = self._is_epoch_over
        losses = self._losses
        self._losses = []
        sums = step_sums(trainer.strategy.root_device)
        sums.begin(self._log.requests(self._state.step))
        for loss, size in losses:
            sums.add(loss.double() * size, size)
        total, count, _, flags = sums.reduced(0)
        assert flags is not None
        self._log.losses.add(total, count)
        if flags.save and not over:
            self._due = False
        self._log.agreed(flags)
        if self._log.ended_by is not None:
            trainer.should_stop = True
            if not over and self._is_stopped:
                trainer.limit_val_batches = 0  # a stop does not wait for an evaluation

    @property
    def _is_stopped(self) -> bool:
        return self._log.ended_by in (EndedBy.SIGNAL, EndedBy.TIME)

    def _after_batch(self, trainer: pl.Trainer) -> None:
        """Keep the state of a run that ends here, within an epoch, before it is evaluated."""
        if trainer.should_stop and not self._is_epoch_over and not self._is_stopped:
            self._save(trainer, keep=True)

    def _before_epoch_end(self, trainer: pl.Trainer) -> bool:
        """Return whether to call the hooks of the epoch's end: not where a stop request ends the run within it.

        With ``max_steps`` they are called, as by any Trainer, and again in a run that is resumed.
        """
        if self._is_epoch_over or not trainer.should_stop:
            return True
        if not self._is_stopped:
            self._save(trainer, keep=True)
            return True
        self._due = bool(self._due)
        self._save_if_due(trainer)
        return False

    def _of_main(self, row: Mapping[str, float]) -> dict[str, float]:
        """Return the ``row`` of rank 0: values logged without sync_dist differ between ranks. Collective."""
        values: dict[str, float] = self._rank.collectives.broadcast(dict(row))
        return values

    @property
    def _uses_patience(self) -> bool:
        """Whether an evaluation now counts for early stopping, not only as the best.

        At the step of ``max_steps`` there may be one that would not be due otherwise.
        """
        every = self._rank.config.validation.every_steps
        is_due = self._is_epoch_over or (every is not None and self._state.step % every == 0)
        return is_due or self._log.ended_by is not EndedBy.COMPLETED

    def _save_if_due(self, trainer: pl.Trainer) -> None:
        if self._due is not None:
            self._saves_best = self._due
            self._due = None
            self._log.saved()
            self._save(trainer)

    def write(self, weights: dict[str, Any], rest: dict[str, Any]) -> None:
        """Start to write a checkpoint with this state of Lightning's; called on rank 0."""
        assert self.averages is not None
        trainer = {
            "state": self._log.current_state(),
            "task": {},
            "lightning": rest,
            "averages": self.averages.trained(),
        }
        frozen = frozen_names(self._module)
        self._log.write({"model": weights, "trainer": trainer, "frozen": frozen}, best=self._saves_best)

    def _save(self, trainer: pl.Trainer, *, keep: bool = False) -> None:
        """Save the run's state; ``keep``: later calls save this state. Collective; rank 0 writes."""
        if keep and self._is_kept:
            return
        self._is_kept = keep
        assert self.averages is not None
        with pulse.during(Activity.SAVING), self.averages.in_use():
            trainer.save_checkpoint(KEPT_STATE if keep else RUN_CHECKPOINTS, weights_only=False)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars among ``metrics``, by the names of rows. The mean loss of the run keeps its name."""
    scalars = {name: float(value) for name, value in metrics.items() if torch.as_tensor(value).numel() == 1}
    return as_row(scalars, taken=("train_loss",))


def _of_validation(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if row_name(name).startswith("val_")}
