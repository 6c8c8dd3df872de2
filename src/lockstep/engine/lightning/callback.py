"""What a Trainer does with a user's module, as the events of a run; and what ranks agree on after each step."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from lockstep.checkpoint.policy import SavePolicy
from lockstep.config import RunConfig
from lockstep.engine.diagnostics.stragglers import RankWatch
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.lightning.dataloaders import Step, epoch_steps
from lockstep.engine.optim.step import match_layouts
from lockstep.engine.state import TrainState, judge
from lockstep.engine.strategies.base import FLAG_INTERVAL, Flags
from lockstep.events import EpochEnded, Evaluated, Note, RunStarted, Sink, StepLogged
from lockstep.plan import Plan
from lockstep.telemetry.progress_board import Activity, pulse
from lockstep.telemetry.scalars import as_row, monitored, row_name
from lockstep.telemetry.throughput import Throughput


@dataclass(kw_only=True, eq=False, repr=False)
class Recorder(Checkpoint):
    """Counts steps and samples, emits events, saves, and stops all ranks on the same step.

    A ``Checkpoint`` in Lightning's sense: its epoch-end hook comes after the module's own, so rows are complete.
    State is saved at the beginning of the next batch, when the module's hooks and the schedulers have run.

    Args:
        save: saves the Trainer's state, as the best or not; collective.
        poll: reports a save that is done.
    """

    config: RunConfig
    plan: Plan
    state: TrainState
    collectives: Collectives
    sink: Sink
    attempt: int
    run_dir: Path
    stop_requested: Callable[[], bool]
    heartbeat: Callable[[int, int], None]
    save: Callable[[pl.Trainer, bool], None]
    poll: Callable[[], None]

    def __post_init__(self) -> None:
        config, plan, state = self.config, self.plan, self.state
        self._policy = SavePolicy(config.checkpoint.every_steps, config.checkpoint.every_s, step=state.step)
        self._speed = Throughput()
        self._started, self._earlier_s = time.monotonic(), state.elapsed_s
        self._epoch_sums = torch.tensor([state.epoch_loss, state.epoch_count], dtype=torch.float64)
        self._interval_sums = self._epoch_sums.clone()
        self._paused = ExitStack()
        self._losses: list[tuple[Tensor, int]] = []
        self._returns_loss = False
        self._steps: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._micro = 0
        self._due: bool | None = None
        self._left_at: float | None = None
        self._waited_s = 0.0
        self._earlier: dict[str, Any] = {}
        self._norm: float | None = None
        self._monitor = plan.monitor
        self._remarked = False
        #: Whether the newest validation, in mid-epoch, has been judged already.
        self._judged = False
        self._lr = math.nan
        self.ended_by: str | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, earlier attempts included."""
        return self._earlier_s + time.monotonic() - self._started

    @property
    def is_over(self) -> bool:
        """Whether an earlier attempt did all there was to do."""
        patience = self.config.training.early_stopping_patience
        return self.state.step >= self.plan.total_steps or 0 < patience <= self.state.evaluations_without_gain

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plan, state = self.plan, self.state
        for optimizer in trainer.optimizers:
            match_layouts(optimizer)  # Lightning has restored them
        where = (self.run_dir, self.attempt, state.step, plan.total_steps, plan.as_dict())
        self.sink.emit(RunStarted(*where, position=lambda: state.step))
        self._ranks = RankWatch(
            self.collectives,
            trainer.strategy.root_device,
            pl_module.parameters(),
            self._speed,
            self.sink.emit,
            attempt=self.attempt,
            step=state.step,
        )
        for note in plan.notes:
            self.sink.emit(note)
        pulse.at(Activity.FIRST_STEP, state.step)
        self._begin_epoch()
        self._interval = self._epoch_mark = self._speed.mark()

    def _begin_epoch(self) -> None:
        self._steps = epoch_steps(self.plan.batch, self.collectives.rank, self.state.position)
        self._step, self._micro = None, 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save_if_due(trainer)

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
            if self._is_logged(self.state.step + 1):
                self._ranks.before_logged_step()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._is_logged(self.state.step + 1):
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._step is not None
        start, stop = self._step.mine[self._micro]
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            # The Trainer has divided it for the accumulation.
            self._returns_loss = True
            self._losses.append((loss.detach() * trainer.accumulate_grad_batches, stop - start))
        self._micro += 1
        stepped = self._micro == len(self._step.mine)
        if stepped:
            self._finish_step(trainer, self._step)
            self._step, self._micro = None, 0
        if self.config.validation.every_steps is not None:
            # Lightning knows validations every so many batches, or at the ends of epochs; this asks it for both.
            trainer.val_check_batch = 1 if stepped and self._validates() else sys.maxsize
        self._left_at = time.perf_counter()

    def _validates(self) -> bool:
        """Whether a validation follows this step: at the end of every so many epochs, and every so many steps."""
        every, state = self.config.validation, self.state
        if self.plan.batch.window(state.position) is None:
            return (state.epoch + 1) % every.every_epochs == 0
        return every.every_steps is not None and state.step % every.every_steps == 0

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        pulse.at(Activity.EVALUATING)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.at(Activity.COMPUTING_METRICS)  # of the module's own hook, which comes after this one

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.at(Activity.EVALUATING)
        self._paused.enter_context(self._speed.paused())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.at(Activity.HOOKS)
        self._paused.close()
        self._left_at = time.perf_counter()
        if trainer.sanity_checking:
            return
        self._judged = not trainer.is_last_batch
        if trainer.is_last_batch:
            return  # the epoch's row judges it
        metrics = _of_validation(_numbers(trainer.callback_metrics))
        epoch = self.state.epoch + 1
        improved = self._judge(metrics, epoch)
        self.sink.emit(Evaluated(self.attempt, epoch, self.state.step, metrics, improved))
        if improved:
            self._due = True
        trainer.should_stop = trainer.should_stop or self.ended_by is not None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.plan.batch.window(self.state.position) is not None and self.ended_by != "completed":
            return  # a stop in mid-epoch
        total, count = self._epoch_sums.tolist()
        speed, state = self._speed.since(self._epoch_mark), self.state
        row = {"train_loss": total / count if count else math.nan} if self._returns_loss else {}
        row |= _numbers(self._fresh(trainer))
        row |= {"lr": self._lr, "samples_per_s": speed.samples_per_s, "duration_s": speed.seconds}
        epoch = state.epoch + 1
        improved = not (self._judged and _is_of_validation(self._monitor)) and self._judge(row, epoch)
        if self.ended_by == "completed":
            trainer.should_stop = True
        if self.plan.batch.window(state.position) is None:
            state.epoch, state.position, state.epoch_loss, state.epoch_count = epoch, 0, 0.0, 0.0
            self._interval_sums -= self._epoch_sums  # of what the next log tells
            self._epoch_sums.zero_()
        self._ranks.end_epoch(state.step, epoch)
        self._epoch_mark = self._speed.mark()
        self.sink.emit(EpochEnded(self.attempt, epoch, state.step, row, improved))
        self._due = improved
        self._begin_epoch()
        if trainer.should_stop and self.ended_by is None:  # a callback of the user's
            self.ended_by = "completed"

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ranks.flush()
        if self._due is None and self.ended_by != "completed":
            self._due = False
        self._save_if_due(trainer)
        pulse.at(Activity.ENDING)

    def _fresh(self, trainer: pl.Trainer) -> dict[str, Any]:
        """What was logged since the last epoch's row: Lightning keeps every value, as the same object, for ever."""
        metrics, earlier = dict(trainer.callback_metrics), self._earlier
        self._earlier = metrics
        return {name: value for name, value in metrics.items() if value is not earlier.get(name)}

    # One step.

    def _finish_step(self, trainer: pl.Trainer, step: Step) -> None:
        state = self.state
        state.step += 1
        state.micro_step += len(step.mine)
        state.samples_seen += step.stop - step.start
        state.position = step.stop
        self._speed.add(step.stop - step.start, self._waited_s)
        self._waited_s = 0.0
        self.heartbeat(state.step, self.plan.total_steps)
        pulse.at(Activity.HOOKS, state.step)
        over = self.plan.batch.window(state.position) is None
        log = self._is_logged(state.step)
        on_host = trainer.strategy.root_device.type == "cpu"
        if on_host or over or log or state.step % FLAG_INTERVAL == 0:
            self._agree(trainer, over)
        if log:
            self._log(trainer)

    def _agree(self, trainer: pl.Trainer, epoch_over: bool) -> None:
        """Sum losses and requests over ranks, so that all of them act on the same step."""
        device = trainer.strategy.root_device
        losses = torch.stack([loss.double() * size for loss, size in self._losses]).sum() if self._losses else 0.0
        count = float(sum(size for _, size in self._losses))
        self._losses = []
        requests = self._requests()
        sums = torch.tensor([0.0, count, *requests], dtype=torch.float64, device=device)
        sums[0] += losses
        if self.collectives.size > 1:
            dist.all_reduce(sums)
        values = sums.tolist()
        if math.isfinite(values[0]):
            self._epoch_sums += torch.tensor(values[:2], dtype=torch.float64)
        self.state.epoch_loss, self.state.epoch_count = self._epoch_sums.tolist()
        flags = Flags(*values[2:])
        if flags.save and not epoch_over:
            self._due = False
        if self.state.step >= self.plan.total_steps:
            self.ended_by, trainer.should_stop = "completed", True
        elif flags.stop or flags.time_up:
            self.ended_by, trainer.should_stop = "stopped" if flags.stop else "time is up", True
            if not epoch_over:
                trainer.limit_val_batches = 0  # a stop in mid-epoch does not wait for an evaluation

    def _requests(self) -> Flags:
        """What this rank asks all ranks to agree on; clocks are rank 0's alone."""
        stop = float(self.stop_requested())
        if not self.collectives.is_main:
            return Flags(stop)
        limit = self.config.training.max_time_s
        time_up = limit is not None and time.monotonic() - self._started > limit
        return Flags(stop, float(time_up), float(self._policy.due(self.state.step)))

    def _log(self, trainer: pl.Trainer) -> None:
        total, count = (self._epoch_sums - self._interval_sums).tolist()
        speed, state = self._speed.since(self._interval), self.state
        self.sink.emit(
            StepLogged(
                attempt=self.attempt,
                step=state.step,
                epoch=state.epoch + 1,
                samples_seen=state.samples_seen,
                loss=total / count if count else self._logged_loss(trainer),
                lr=self._lr,
                grad_norm=self._norm,
                samples_per_s=speed.samples_per_s,
                data_wait_share=speed.data_wait_share,
                skipped_steps=0,
                scalars=_numbers(trainer.logged_metrics),
            )
        )
        self._ranks.log(state.step, state.epoch + 1)
        self._interval, self._interval_sums = self._speed.mark(), self._epoch_sums.clone()
        self.poll()

    def _logged_loss(self, trainer: pl.Trainer) -> float | None:
        """Of a module that returns none, as with manual optimization."""
        if self._returns_loss:
            return math.nan
        names = [f"{name}{step}" for name in ("loss", "train_loss", "train/loss") for step in ("", "_step")]
        return next((float(trainer.logged_metrics[name]) for name in names if name in trainer.logged_metrics), None)

    def _is_logged(self, step: int) -> bool:
        return step % self.config.telemetry.log_interval == 0 or step >= self.plan.total_steps

    def _judge(self, row: dict[str, float], epoch: int) -> bool:
        """Rank 0's verdict for all: what a module logs without sync_dist differs between ranks."""
        monitor = self._monitor
        found = self.collectives.broadcast(monitored(row, monitor))
        self._remark(found[0] if found else None, row)
        if found is None:
            return False
        if judge(self.state, _of_validation(row), found[1], self.plan.mode, epoch):
            return True
        patience = self.config.training.early_stopping_patience
        if patience and self.state.evaluations_without_gain >= patience:
            self.ended_by = "completed"
            text = f"Early stopping: {monitor} has not improved for {patience} evaluations."
            self.sink.emit(Note("early_stopping", text))
        return False

    def _remark(self, name: str | None, row: Mapping[str, float]) -> None:
        """Says once what the best epoch is judged by where that is not the monitor itself."""
        if self._remarked or name in (self._monitor, row_name(self._monitor)):
            return
        self._remarked = True
        text = f"There are several validation loaders: the best epoch is judged by {name}."
        if name is None:
            names = ", ".join(row.keys() - {"train_loss", "lr", "samples_per_s", "duration_s"}) or "nothing"
            text = f"No epoch is the best: the module does not log {self._monitor!r}; it logs {names}."
        self.sink.emit(Note("monitor_missing", f"{text} checkpoint.monitor sets another name."))

    def _save_if_due(self, trainer: pl.Trainer) -> None:
        if self._due is not None:
            best, self._due = self._due, None
            self._policy.saved(self.state.step)
            with pulse.during(Activity.SAVING):
                self.save(trainer, best)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The scalars among ``metrics``, by the names of rows. The recorder's own mean of the loss keeps its name."""
    found = {name: float(value) for name, value in metrics.items() if torch.as_tensor(value).numel() == 1}
    return as_row(found, taken=("train_loss",))


def _of_validation(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if _is_of_validation(name)}


def _is_of_validation(name: str) -> bool:
    return row_name(name).startswith("val_")
