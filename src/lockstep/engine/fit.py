"""The verbs of a run: what happens around the steps. One object an attempt, the same calls on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.content import check_saveable
from lockstep.checkpoint.policy import SavePolicy, retained
from lockstep.checkpoint.store import Snapshot
from lockstep.checkpoint.writer import BackgroundWriter
from lockstep.config import RunConfig
from lockstep.data.requests import Window
from lockstep.engine.diagnostics.step_trace import Trace
from lockstep.engine.diagnostics.stragglers import RankWatch
from lockstep.engine.distributed.agreement import check_agreement
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.evaluate import Callbacks, evaluate, evaluation
from lockstep.engine.loop import StepResult
from lockstep.engine.meter import LossMeter
from lockstep.engine.optim.precision import Precision
from lockstep.engine.optim.step import Update
from lockstep.engine.resume import manifest_of
from lockstep.engine.state import TrainState, judge
from lockstep.engine.strategies.base import Flags, Strategy
from lockstep.engine.task import Datasets, Task
from lockstep.engine.trained import bare
from lockstep.errors import NonFiniteError, UnsupportedError
from lockstep.events import EpochEnded, Evaluated, Note, PictureDrawn, RunStarted, Sink, StepLogged
from lockstep.plan import Plan
from lockstep.telemetry.pictures import check_picture
from lockstep.telemetry.progress_board import Activity, pulse
from lockstep.telemetry.throughput import Throughput


class TimedBatches:
    """Passes batches on and adds up how long the step waited for them, in seconds."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._next = batches.__next__
        self._clock = time.perf_counter
        self.waited_s = 0.0

    def __iter__(self) -> TimedBatches:
        return self

    def __next__(self) -> Any:
        before = self._clock()
        pulse.at(Activity.WAITING_FOR_DATA)
        batch = self._next()
        pulse.at(Activity.STEP)
        self.waited_s += self._clock() - before
        return batch


@dataclass
class Fit:
    """What one attempt trains with. Rank 0 alone has a real ``sink``, and a ``writer`` unless all ranks write."""

    task: Task
    config: RunConfig
    plan: Plan
    datasets: Datasets
    strategy: Strategy
    update: Update
    precision: Precision
    state: TrainState
    collectives: Collectives
    device: torch.device
    sink: Sink
    writer: BackgroundWriter | None
    attempt: int
    run_dir: Path
    stop_requested: Callable[[], bool]
    heartbeat: Callable[[int, int], None]
    pins: Mapping[str, Any]
    trace: Trace
    remarks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    scalars: dict[str, float] = field(default_factory=dict)
    ended_by: str | None = None

    def __post_init__(self) -> None:
        config = self.config.checkpoint
        self._policy = SavePolicy(config.every_steps, config.every_s, step=self.state.step)
        self._speed = Throughput()
        self._started = time.monotonic()
        self._earlier_s = self.state.elapsed_s
        self._meter = LossMeter(self.device)
        self._meter.reset(self.state.epoch_loss, self.state.epoch_count)
        self._hooks = list(self.task.hooks())
        self._callbacks = Callbacks(self.task)
        if "on_after_backward" in self._callbacks:
            self.update.after_backward = lambda: self._call("on_after_backward")
        self.strategy.draws.everything |= self.state.draws_seeded
        self._monitor = self.plan.monitor
        self._loader = self.plan.loader
        self._skipped_at_log = self.update.skipped
        self._step_at_log = self.state.step
        self.saved_at = -1

    @property
    def is_over(self) -> bool:
        """Whether an earlier attempt did all there was to do: every step, or until early stopping."""
        patience = self.config.training.early_stopping_patience
        return self.state.step >= self.plan.total_steps or 0 < patience <= self.state.evaluations_without_gain

    # Before the first step.

    def start(self) -> None:
        self._refuse_divided()
        if self.writer is not None:  # now, not after an epoch
            check_saveable(self.strategy.module.state_dict(), self.trainer_state())
        total = self.plan.total_steps
        at = self.state.step
        self.heartbeat(at, total)  # there may be no step left that would tell
        self._emit(RunStarted(self.run_dir, self.attempt, at, total, self.plan.as_dict(), lambda: self.state.step))
        for note in self.plan.notes:
            self._emit(note)
        for remark in self.remarks:
            self._emit(Note("remark", remark))
        for warning in self.warnings:
            self._emit(Note("warning", warning, "warning"))
        if self.config.validation.sanity_steps and self.datasets.val is not None and self.state.step == 0:
            with self._evaluation():
                self._evaluate(self.datasets.val, chunks=self.config.validation.sanity_steps * self.collectives.size)
                self._show(remarks=False)  # nobody wants to read what untrained weights say
        self._interval = self._speed.mark()
        self._epoch_mark = self._speed.mark()
        self._interval_sums = self._meter.read()
        pulse.at(Activity.FIRST_STEP, self.state.step)
        # Compiled code would be compiled again for the hooks that time a rank's own work; a gradient that is divided
        # is there when all ranks have done theirs.
        untimed = self.config.training.compile or self.strategy.is_sharded
        timed = () if untimed else self.strategy.module.parameters()
        self._ranks = RankWatch(
            self.collectives, self.device, timed, self._speed, self._emit, attempt=self.attempt, step=self.state.step
        )

    # Around every step.

    def before_steps(self, windows: Iterator[Window]) -> Iterator[Window]:
        """``windows``, each of which is asked for right before its step."""
        return self._announced(windows) if self._callbacks else windows

    def _announced(self, windows: Iterator[Window]) -> Iterator[Window]:
        epoch = -1
        for window in windows:
            if window.epoch != epoch:
                epoch = window.epoch
                self._call("on_epoch_start")
            self._call("on_step_start")
            yield window

    def _call(self, event: str) -> None:
        self._callbacks.call(event, self.task.context, self.strategy.module)

    def requested(self) -> Flags:
        """What this rank asks all ranks to agree on; clocks are rank 0's alone."""
        stop = float(self.stop_requested())
        if not self.collectives.is_main:
            return Flags(stop=stop)
        limit = self.config.training.max_time_s
        time_up = float(limit is not None and time.monotonic() - self._started > limit)
        return Flags(stop, time_up, float(self._policy.due(self.state.step + 1)))

    def after_step(self, result: StepResult, waited_s: float) -> None:
        self._meter.add(result.loss_total, result.loss_count)
        self._speed.add(result.window.size, waited_s)
        self.heartbeat(result.step, self.plan.total_steps)
        pulse.at(Activity.HOOKS, result.step)
        if self._callbacks:
            self._call("on_step_end")
        for hook, every in self._hooks:
            if result.step % every == 0:
                self.scalars.update(hook(result, bare(self.strategy.module)) or {})
        if result.step % self.config.telemetry.log_interval == 0 or result.step == self.plan.total_steps:
            self._log(result)
        every_steps = self.config.validation.every_steps
        ends = result.epoch_ended or result.step >= self.plan.total_steps
        if every_steps and result.step % every_steps == 0 and not ends:
            self._validate_between_epochs()
        if ends:
            self._end_epoch(result)
        flags = result.flags or Flags()
        if flags.save and not result.epoch_ended:
            self.save()
        if self.ended_by is None:
            self.ended_by = self._reason_to_end(result, flags)
        if self.ended_by is not None:
            self._ranks.flush()
        elif (result.step + 1) % self.config.telemetry.log_interval == 0:
            self._ranks.before_logged_step()

    def _reason_to_end(self, result: StepResult, flags: Flags) -> str | None:
        if result.step >= self.plan.total_steps:
            return "completed"
        if flags.stop:
            return "stopped"
        if flags.time_up:
            return "time is up"
        return None

    def _log(self, result: StepResult) -> None:
        total, count = self._meter.read()
        before_total, before_count = self._interval_sums
        items = count - before_count
        speed = self._speed.since(self._interval)
        counts_more = speed.seconds > 0 and items > 1.001 * speed.samples_per_s * speed.seconds
        skipped = self.update.skipped
        self.state.skipped_steps = skipped
        norm = self.update.grad_norm
        if items or float(result.loss_count):  # steps without items have no loss to report
            self._emit(
                StepLogged(
                    attempt=self.attempt,
                    step=result.step,
                    epoch=result.window.epoch + 1,
                    samples_seen=self.state.samples_seen,
                    loss=(total - before_total) / items if items else math.nan,
                    lr=result.lr,
                    grad_norm=None if norm is None else float(norm),
                    samples_per_s=speed.samples_per_s,
                    data_wait_share=speed.data_wait_share,
                    skipped_steps=skipped,
                    scalars=dict(self.scalars),
                    items_per_s=items / speed.seconds if counts_more else None,
                )
            )
        self._ranks.log(result.step, result.window.epoch + 1)
        self._interval, self._interval_sums = self._speed.mark(), (total, count)
        if self.writer is not None:
            self.writer.poll()
        self._check_skipped(result.step, skipped)

    def _check_skipped(self, step: int, skipped: int) -> None:
        """End a run that goes nowhere. ``skipped`` is reduced, so every rank raises or none does."""
        steps = step - self._step_at_log
        if steps < min(100, self.plan.total_steps):
            return
        share = (skipped - self._skipped_at_log) / steps
        self._step_at_log, self._skipped_at_log = step, skipped
        if share > self.config.training.max_skipped_share:
            raise NonFiniteError(
                f"{share:.0%} of the last {steps} steps had no finite gradient and were skipped",
                why="the loss or its gradient is NaN or infinite",
                fix="lower the learning rate, use bf16-mixed or 32 instead of 16-mixed, or find the operator with "
                "--set debug.detect_anomaly=true",
            )

    # At the end of an epoch.

    def _end_epoch(self, result: StepResult) -> None:
        total, count = self._meter.read()
        speed = self._speed.since(self._epoch_mark)
        epoch = result.window.epoch + 1
        self._ranks.end_epoch(result.step, epoch)
        if result.epoch_ended:
            self._call("on_epoch_end")
        row: dict[str, float] = {"train_loss": total / count if count else math.nan}
        last = result.step >= self.plan.total_steps
        improved = False
        if self.datasets.val is not None and (epoch % self.config.validation.every_epochs == 0 or last):
            metrics = self._validate()
            row |= metrics
            improved = self._judge({**row, **metrics}, epoch, extra=not result.epoch_ended)
        row |= {"lr": result.lr, "samples_per_s": speed.samples_per_s, "duration_s": speed.seconds}
        if result.epoch_ended:  # max_steps may end a run in mid-epoch, and a resume goes on there
            self.update.end_epoch()
            self.state.epoch, self.state.position = self.state.epoch + 1, 0
            before_total, before_count = self._interval_sums
            self._interval_sums = before_total - total, before_count - count  # of what the next log tells
            self._meter.reset()
        self._epoch_mark = self._speed.mark()
        self._emit(EpochEnded(self.attempt, epoch, result.step, row, improved))
        self.save(best=improved)

    def _validate_between_epochs(self) -> None:
        if self.datasets.val is None:
            return
        metrics, epoch = self._validate(), self.state.epoch + 1
        improved = self._judge(metrics, epoch)
        self._emit(Evaluated(self.attempt, epoch, self.state.step, metrics, improved))
        if improved:
            self.save(best=True)

    def _validate(self) -> dict[str, float]:
        with self._speed.paused():
            self.strategy.check_buffers()
            with self._evaluation():
                values = self._evaluate(self.datasets.val, self._chunks)
                self._show()
        return {f"val_{name}": value for name, value in values.items() if isinstance(value, float | int)}

    def _show(self, *, remarks: bool = True) -> None:
        """What the task has to say and to show of an evaluation, to which rank 0 alone has the metrics."""
        if not self.collectives.is_main:
            return
        with torch.no_grad():
            said = self._asked(self.task.remarks)
            drawn = self._asked(self.task.pictures) if remarks else {}
        if not remarks:
            return
        for remark in said:
            self._emit(Note("task_remark", remark))
        for name, pixels in drawn.items():
            check_picture(name, pixels)
            self._emit(PictureDrawn(self.attempt, self.state.epoch + 1, self.state.step, name, pixels))

    def _asked(self, method: Callable[..., Any]) -> Any:
        return method(bare(self.strategy.module)) if signature(method).parameters else method()

    def _refuse_divided(self) -> None:
        """One rank alone cannot call a model that is divided among ranks."""
        for method in (self.task.remarks, self.task.pictures):
            if (self.plan.sharded or self.plan.pipelined) and signature(method).parameters:
                raise UnsupportedError(
                    f"the task's {method.__name__}() takes the model, which strategy "
                    f"{self.plan.placement['strategy']} divides",
                    why="it is called on one rank, which has only a part of the model",
                    fix="keep what it shows in evaluate(), or train with --strategy ddp",
                )

    def _evaluation(self) -> AbstractContextManager[None]:
        return evaluation(self.task, self.strategy.module, self._callbacks)

    def _judge(self, metrics: Mapping[str, float], epoch: int, *, extra: bool = False) -> bool:
        """Is this the best so far? Values are equal on all ranks, so all of them stop, or none.

        ``extra``: an evaluation in mid-epoch that a run without ``max_steps`` does not have.
        """
        value = metrics.get(self._monitor)
        if value is None:
            text = f"Monitored metric {self._monitor!r} was not reported; available: {', '.join(metrics)}."
            self._emit(Note("monitor_missing", text, "warning"))
            return False
        if not extra:
            self.update.judge(value)
        if judge(self.state, metrics, value, self.plan.mode, epoch):
            return True
        patience = self.config.training.early_stopping_patience
        if patience and self.state.evaluations_without_gain >= patience:
            self.ended_by = "completed"
            text = f"Early stopping: {self._monitor} has not improved for {patience} evaluations."
            self._emit(Note("early_stopping", text))
        return False

    @property
    def _chunks(self) -> int | None:
        """How many batches an evaluation takes; ``None``: all."""
        debug = self.config.debug
        return self.collectives.size if debug.fast_dev_run else debug.limit_eval_batches

    def _evaluate(self, dataset: Any, chunks: int | None = None, step: int | None = None) -> dict[str, Any]:
        return evaluate(
            self.strategy.evaluating(self.task),
            self.strategy.module,
            dataset,
            self.collectives,
            batch_size=self.plan.eval_batch_size,
            device=self.device,
            precision=self.precision,
            loader=self._loader,
            seed=self.plan.seed,
            step=self.state.step if step is None else step,
            chunks=chunks,
            ghosts=self.plan.sharded,
            together=self.plan.pipelined,
        )

    def test(self, step: int) -> tuple[dict[str, float], dict[str, Any]]:
        """Metrics of the test set as ``(numbers, tables)``: a confusion matrix is a table. ``step``: of the weights."""
        if self.datasets.test is None:
            return {}, {}
        with self._evaluation():
            found = self._evaluate(self.datasets.test, self._chunks, step)
        values = {f"test_{name}": value for name, value in found.items()}
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, float | int)}
        return numbers, {name: value for name, value in values.items() if name not in numbers}

    # Checkpoints.

    def save(self, *, best: bool = False) -> None:
        """Collective: buffers and weights are compared, then rank 0 writes in the background, or each its part."""
        if self.saved_at == self.state.step and not best:
            return
        self.saved_at = self.state.step
        self.strategy.check_buffers()
        if not (self.plan.sharded or self.plan.pipelined) and self.config.debug.trace == "off":
            check_agreement(self.strategy.module, self.update.optimizer, self.collectives)
        self._policy.saved(self.state.step)
        if self.writer is None and not self.strategy.is_sharded:
            return
        with pulse.during(Activity.SAVING):
            state = {"model": self.strategy.module.state_dict(), "trainer": self.trainer_state()}
            if self.writer is not None and self.writer.store.takes_parts:
                from lockstep.engine.distributed.dtensor_state import own_part

                state = own_part(state, is_main=self.collectives.is_main)
            else:
                state = self.strategy.whole(state, self.collectives, keep=self.writer is not None)
            if self.writer is not None:
                self._write(self.writer, state, best)

    def _write(self, writer: BackgroundWriter, state: dict[str, Any], best: bool) -> None:
        copy = writer.to_host(state)
        keep = retained(
            [*writer.store.steps(), self.state.step], self.config.checkpoint.keep_last, self.state.best_step
        )
        snapshot = Snapshot(self.state.step, **copy, manifest=self.manifest())
        writer.submit(snapshot, best=best, keep=keep)

    def trainer_state(self) -> dict[str, Any]:
        self.state.epoch_loss, self.state.epoch_count = self._meter.read()
        self.state.elapsed_s = self.elapsed_s
        self.state.draws_seeded = self.strategy.draws.everything
        if not (self.plan.sharded or self.plan.pipelined):
            named = self.strategy.module.named_parameters()
            self.state.frozen = [name for name, parameter in named if not parameter.requires_grad]
        return {
            "state": self.state.state_dict(),
            "update": self.update.state_dict(),
            "task": self.task.state_dict(),
        }

    def manifest(self) -> dict[str, Any]:
        return manifest_of(self.config, self.plan, self.state, self.attempt, self.pins)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, earlier attempts included."""
        return self._earlier_s + time.monotonic() - self._started

    def settle_loader(self, workers: int, text: str) -> None:
        """Training has measured that ``workers`` loader processes are best; evaluations need not try more."""
        self._loader = self._loader.model_copy(update={"most_workers": workers})
        self.remark(text)

    def remark(self, text: str) -> None:
        """Tell people something; rank 0's word is heard."""
        self._emit(Note("remark", text))

    def _emit(self, event: Any) -> None:
        self.sink.emit(event)
