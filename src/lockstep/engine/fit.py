"""Training on one rank: the loop, and what happens at its steps, at the ends of epochs and at the end.

The loop is a generator of finished steps. It sees windows, a strategy and an update, never a device.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from lockstep.checkpoint.store import Snapshot
from lockstep.data.requests import Source, Window
from lockstep.engine.checkpoints import Checkpoints
from lockstep.engine.diagnostics.mfu import peak_share
from lockstep.engine.diagnostics.profiler import memory_snapshot, profiled
from lockstep.engine.diagnostics.step_trace import Trace, trace_file
from lockstep.engine.parts import Parts, build_parts
from lockstep.engine.rank_context import RankContext
from lockstep.engine.run_log import RunLog, record_samples
from lockstep.engine.state import EndedBy, RunResult
from lockstep.engine.strategies.reducers import Flags
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import begin_epoch, begin_stream, kept_on, loaded, training_source, walk
from lockstep.engine.validation import Validation
from lockstep.rundir.heartbeat import Activity, pulse

#: What a task's hooks are: a function of a :class:`StepResult` and the model, and after how many steps to call it.
TaskHook = tuple[Callable[..., Mapping[str, float] | None], int]
_OUT_OF_RANGE = (
    "The total of the loss is infinite in step {step}: the task sums it in half precision, whose largest number is "
    "65,504 in float16. Return one value per item, Loss(values, count): they are summed in single precision."
)
_NOTHING_COUNTED = (
    "Epoch {epoch} has trained nothing: in none of its steps did the loss have items and a finite value. A count of 0 "
    "says that all samples are left out (weights, ignored labels)."
)


class Fitting(Protocol):
    """What trains one rank until the plan is fulfilled, or a stop is agreed on."""

    @property
    def log(self) -> RunLog:
        """The record of the run."""

    def run(self) -> RunResult:
        """Train, and record how the run ended."""


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
    parts: Parts, windows: Iterator[Window], batches: Iterator[Any], requested: Callable[[], Flags]
) -> Iterator[StepResult]:
    """Run one optimizer step per window and yield its result; the state is already updated when a result is yielded.

    Args:
        windows: this rank's part of each step (:func:`lockstep.data.requests.windows`).
        batches: the batch of each request of each window, in order.
        requested: this rank's requests, on which all ranks must agree (stop, time, save).
    """
    strategy, update, state, batch = parts.strategy, parts.update, parts.state, parts.rank.plan.batch
    norm_every = parts.rank.config.telemetry.log_interval
    for window in windows:
        reduced = strategy.gradients(window, batches, state.step, requested())
        update.apply(state.step, reduced.count, reduced.divisor, want_norm=(state.step + 1) % norm_every == 0)
        state.advance(len(window.requests), window.size, window.epoch, window.stop)
        ended = batch.window(window.stop) is None
        yield StepResult(state.step, window, update.rates.lr, reduced.total, reduced.count, ended, reduced.flags)


class TimedBatches:
    """Passes batches on and measures how long the step waited for them."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._next = batches.__next__
        self._clock = time.perf_counter
        self._waited_s = 0.0

    def __iter__(self) -> TimedBatches:
        return self

    def __next__(self) -> Any:
        before = self._clock()
        pulse.at(Activity.WAITING_FOR_DATA)
        batch = self._next()
        pulse.at(Activity.STEP)
        self._waited_s += self._clock() - before
        return batch

    def waited_s(self) -> float:
        """Seconds since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited


@dataclass(frozen=True)
class Fit:
    """What one rank trains with, and the actions around its steps. Each action is called on every rank alike.

    ``source`` has the training batches, ``scalars`` the newest values of the task's own hooks by name.
    """

    task: Task
    datasets: Datasets
    parts: Parts
    log: RunLog
    validation: Validation
    checkpoints: Checkpoints
    trace: Trace | None
    source: Source
    scalars: dict[str, float]

    def run(self) -> RunResult:
        """Train, save, and test the best weights."""
        log, parts = self.log, self.parts
        self.checkpoints.check()
        log.start(parts.notes)
        self.validation.sanity_check()
        if log.ended_by is None:
            self._train()
        self.checkpoints.save()
        self.checkpoints.wait()
        final = log.final_evaluation
        parts.update.averages.swap()  # what is tested now is what is saved
        if log.ended_by is EndedBy.COMPLETED and self.datasets.test is not None:
            final |= self.validation.test(self.checkpoints.load_best())
        pulse.at(Activity.ENDING)
        return log.finish(final)

    def _train(self) -> None:
        """Take steps until the run ends."""
        rank, state, log, trace = self.parts.rank, self.parts.state, self.log, self.trace
        start: dict[str, int] = {"epoch": state.epoch, "position": state.position}
        loader = loaded(self.source, rank.plan, rank.world, **start, settled=self.validation.settle_loader)
        batches = TimedBatches(loader if trace is None else trace.batches(loader))
        task_hooks = self.task.hooks()
        self.parts.train()
        self.task._lockstep_context.is_training = True
        log.unpause()
        pulse.at(Activity.FIRST_STEP, state.step)
        settings = rank.config.telemetry
        with contextlib.closing(loader), memory_snapshot(rank) if settings.memory_snapshot else nullcontext():
            windows = self._begun(walk(rank.plan, rank.world, **start))
            steps = training_steps(self.parts, windows, batches, lambda: log.requests(state.step + 1))
            with profiled(rank, steps, state.step) if settings.profile else nullcontext(steps) as watched:
                for step in watched:
                    log.step(step.window.size, batches.waited_s())
                    self._end_step(step, task_hooks)
                    if log.ended_by is not None:
                        break
        log.flush()
        if trace is not None:
            trace.write()

    def _begun(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Begin the epoch and the step of each window. It is asked for right before its step."""
        rank, epoch, record = self.parts.rank, -1, None
        if rank.config.telemetry.record_samples and (rank.world.is_main or not rank.plan.pipelined):
            # Before, since a step needs all ranks: whichever rank dies, every file has all that a checkpoint has.
            record = record_samples(rank, self.parts.state, self.source.indices)
        for window in windows:
            if record is not None:
                record(window)
            if window.epoch != epoch:
                epoch = window.epoch
                begin_epoch(self.datasets.train, epoch, rank.plan.task.train_samples)
                self._callback("on_epoch_start")
            self._callback("on_step_start")
            yield window

    def _end_step(self, step: StepResult, task_hooks: Sequence[TaskHook]) -> None:
        """Call what follows a step, and decide whether the run ends here."""
        log, trace, checkpoints, parts = self.log, self.trace, self.checkpoints, self.parts
        ends_epoch = step.epoch_ended or step.step >= parts.rank.plan.total_steps
        if trace is not None:
            trace.after_update(step.window.requests, step.loss_total, step.loss_count)
        log.losses.add(step.loss_total, step.loss_count)
        if parts.strategy.sums_in_half and math.isinf(step.loss_total):
            log.note_once("loss_out_of_range", _OUT_OF_RANGE.format(step=step.step))
        parts.update.averages.update(step.step)
        self._callback("on_step_end")
        for hook, every in task_hooks:
            if step.step % every == 0:
                self.scalars.update(hook(step, parts.model) or {})
        if log.is_logged(step.step):
            self._log_step(step)
        if ends_epoch:
            self._end_epoch(step)
        elif self._is_due(step.step):
            self._validate_within_epoch()
        log.end_step(step.flags, None if ends_epoch else checkpoints.save)
        if trace is not None:
            trace.after_hooks(step.step, merged=checkpoints.saved_at == step.step)

    def _is_due(self, step: int) -> bool:
        """Whether an evaluation is due after ``step`` (``validation.every_steps``)."""
        every = self.parts.rank.config.validation.every_steps
        return every is not None and self.datasets.val is not None and step % every == 0

    def _callback(self, event: str) -> None:
        self.parts.callbacks.call(event, self.task._lockstep_context, self.parts.strategy.module)

    def _log_step(self, step: StepResult) -> None:
        update = self.parts.update
        norm = None if update.grad_norm is None else float(update.grad_norm)
        is_empty = not float(step.loss_count)
        self.log.log_step(step.lr, norm, dict(self.scalars), skipped=update.skipped, is_empty=is_empty)

    def _end_epoch(self, step: StepResult) -> None:
        """Validate where that is due, emit the epoch's row, and save.

        Where ``max_steps`` ends the run, it is evaluated, too. Such an evaluation judges nothing: without the stop
        there would be none, and a run that resumes has the best and the patience of one that was not stopped.
        """
        sums = self.log.epoch_so_far()
        epoch = step.window.epoch + 1
        if step.epoch_ended:
            self._callback("on_epoch_end")
            if math.isnan(sums.loss):
                self.parts.rank.note("nothing_counted", _NOTHING_COUNTED.format(epoch=epoch), "warning")
        config, is_last = self.parts.rank.config, step.step >= self.parts.rank.plan.total_steps
        is_due = step.epoch_ended and (epoch % config.validation.every_epochs == 0 or epoch >= config.training.epochs)
        is_due = is_due or self._is_due(step.step)
        metrics, judged = {"train_loss": sums.loss}, None
        if self.datasets.val is not None and (is_due or is_last):
            metrics |= self._validate()
            judged = metrics if is_due else None
        if judged is not None:
            self._advance_rates(judged)
        if step.epoch_ended:
            self.parts.update.rates.advance("epoch")
        improved = self.log.end_epoch(metrics, sums, step.lr, ended=step.epoch_ended, judged=judged)
        self.checkpoints.save(best=improved)

    def _validate_within_epoch(self) -> None:
        metrics = self._validate()
        self._advance_rates(metrics)
        improved = self.log.judge(metrics)
        self.log.evaluated(metrics, improved)
        if improved:
            self.checkpoints.save(best=True)

    def _validate(self) -> dict[str, float]:
        self.log.pause()
        metrics = self.validation.run()
        self.log.unpause()
        return metrics

    def _advance_rates(self, metrics: Mapping[str, float]) -> None:
        """Step a schedule that follows the monitored metric."""
        value = metrics.get(self.parts.rank.plan.monitor)
        if value is not None:
            self.parts.update.rates.advance("metric", value)


def build_fit(rank: RankContext, task: Task, datasets: Datasets, snapshot: Snapshot | None) -> Fit:
    """What this rank trains with, from ``snapshot`` or from the start. Collective."""
    parts = build_parts(rank, task, datasets, snapshot)
    rank, strategy, debug = parts.rank, parts.strategy, rank.config.debug
    done = parts.state.epoch * rank.plan.batch.samples + parts.state.position
    saved = None if snapshot is None else snapshot.trainer.get("stream")
    begin_stream(datasets, rank.run_dir.path, rank.attempt, rank.world, done, rank.plan.batch.global_batch, saved)
    source = training_source(task, datasets, rank.plan, rank.run_dir.path / f"skipped-rank{rank.world.rank}.jsonl")
    # Compiled code would be compiled again for the hooks that time a rank's own work; the gradient of a divided model
    # is complete only when all ranks have done theirs.
    untimed = rank.config.training.compile or strategy.divided_by is not None
    share = None
    if rank.device.type == "cuda":
        share, text = peak_share(task, source, rank.plan)
        parts.remark(text)
    log = RunLog(rank, parts.state, timed=lambda: () if untimed else strategy.module.parameters(), peak_share=share)
    trace = None
    if debug.trace != "off":
        file = trace_file(rank.run_dir.path, rank.world.rank)
        trace = Trace(debug, file, rank.world.is_main, parts.update, strategy.module, parts.draws)
        source = trace.source(source)
    else:
        source = replace(source, pad=task.pad, full=rank.plan.filled_to) if rank.plan.filled_to else source
        source, remark = kept_on(source, rank.device, rank.plan)
        parts.remark(remark)
    validation = Validation(rank, task, datasets, parts)
    checkpoints = Checkpoints(rank, task, parts, log, datasets.train)
    return Fit(task, datasets, parts, log, validation, checkpoints, trace, source, scalars={})
