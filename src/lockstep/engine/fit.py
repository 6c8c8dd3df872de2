"""Training on one rank: the loop, and what happens at its steps, at the ends of epochs and at the end.

The loop is a generator of finished steps. It sees windows, a strategy and an update, never a device.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
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
from lockstep.engine.run_log import RunLog, record_samples, report_skipped
from lockstep.engine.state import EndedBy, RunResult
from lockstep.engine.strategies.base import Flags
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import begin_epoch, begin_stream, kept_on, loaded, training_source, walk
from lockstep.engine.validation import Validation
from lockstep.rundir.heartbeat import Activity, pulse

#: A name, whether to call it there, and what to call: with the :class:`Window` of the step that starts, or the
#: :class:`StepResult` of the one that has ended.
Hook = tuple[str, Callable[[Any], bool], Callable[[Any], None]]


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
        yield StepResult(state.step, window, update.lr, reduced.total, reduced.count, ended, reduced.flags)


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
        """Take steps until the run ends, and call hooks around them."""
        rank, plan, state, log, trace = self.parts.rank, self.parts.rank.plan, self.parts.state, self.log, self.trace
        before, after = self._hooks_before(), self._hooks_after()
        start: dict[str, int] = {"epoch": state.epoch, "position": state.position}
        loader = loaded(self.source, plan, rank.world, **start, settled=self.validation.settle_loader)
        batches = TimedBatches(loader if trace is None else trace.batches(loader))
        self.parts.train()
        self.task._lockstep_context.is_training = True
        log.unpause()
        pulse.at(Activity.FIRST_STEP, state.step)
        settings = rank.config.telemetry
        with contextlib.closing(loader), memory_snapshot(rank) if settings.memory_snapshot else nullcontext():
            windows = _announced(walk(plan, rank.world, **start), before)
            steps = training_steps(self.parts, windows, batches, lambda: log.requests(state.step + 1))
            with profiled(rank, steps, state.step) if settings.profile else nullcontext(steps) as watched:
                for step in watched:
                    log.step(step.window.size, batches.waited_s())
                    for _, when, do in after:
                        if when(step):
                            do(step)
                    if log.ended_by is not None:
                        break
        log.flush()
        if trace is not None:
            trace.write()

    def _hooks_before(self) -> list[Hook]:
        hooks: list[Hook] = []
        rank = self.parts.rank
        if rank.config.telemetry.record_samples and (rank.world.is_main or not rank.plan.pipelined):
            # Before, since a step needs all ranks: whichever rank dies, every file has all that a checkpoint has.
            record = record_samples(rank, self.parts.state, self.source.indices)
            hooks.append(("record the samples", _always, record))
        begun = set[int]()  # epochs of this attempt

        def begins(window: Window) -> bool:
            is_new = window.epoch not in begun
            begun.add(window.epoch)
            return is_new

        hooks.append(("begin the epoch", begins, self._begin_epoch))
        if self.parts.callbacks:
            hooks.append(("on_step_start", _always, lambda window: self._callback("on_step_start")))
        return hooks

    def _begin_epoch(self, window: Window) -> None:
        begin_epoch(self.datasets.train, window.epoch, self.parts.rank.plan.task.train_samples)
        self._callback("on_epoch_start")

    def _hooks_after(self) -> list[Hook]:
        rank, trace, checkpoints, losses = self.parts.rank, self.trace, self.checkpoints, self.log.losses
        total, every_steps = rank.plan.total_steps, rank.config.validation.every_steps

        def ends_epoch(step: StepResult) -> bool:
            return step.epoch_ended or step.step >= total

        def saves(step: StepResult) -> bool:
            return step.flags is not None and step.flags.save > 0 and not step.epoch_ended

        hooks: list[Hook] = []
        if trace is not None:
            update = trace.after_update
            hooks.append(("trace the update", _always, lambda s: update(s.window.requests, s.loss_total, s.loss_count)))
        hooks.append(("sum the loss", _always, lambda step: losses.add(step.loss_total, step.loss_count)))
        strategy = self.parts.strategy
        hooks.append(("name a sum out of range", lambda step: strategy.sums_in_half, self._out_of_range()))
        if rank.config.averaging.name != "none":
            averages = self.parts.update.averages
            hooks.append(("average the weights", _always, lambda step: averages.update(step.step)))
        if self.parts.callbacks:
            hooks.append(("on_step_end", _always, lambda step: self._callback("on_step_end")))
        for number, (do, every) in enumerate(self.task.hooks()):
            hooks.append((f"hook {number} of the task", _every(every), self._of_task(do)))
        hooks.append(("log", lambda step: self.log.is_logged(step.step), self._log_step))
        if every_steps and self.datasets.val is not None:
            due = _every(every_steps)
            hooks.append(("validate", lambda step: due(step) and not ends_epoch(step), self._validate_within_epoch))
        if self.source.skipped:
            hooks.append(("report skipped samples", ends_epoch, self._skipped()))
        hooks.append(("end the epoch", ends_epoch, self._end_epoch))
        hooks.append(("save", saves, lambda step: checkpoints.save()))
        hooks.append(("end the step", _always, self._end_step))
        if trace is not None:
            after = trace.after_hooks
            hooks.append(
                ("trace the hooks", _always, lambda step: after(step.step, merged=checkpoints.saved_at == step.step))
            )
        return hooks

    def _of_task(self, hook: Callable[..., Any]) -> Callable[[StepResult], None]:
        def call(step: StepResult) -> None:
            self.scalars.update(hook(step, self.parts.model) or {})

        return call

    def _skipped(self) -> Callable[[StepResult], None]:
        """Notes how many samples have been left out so far, where that has changed (``data.on_bad_row``)."""
        known = 0

        def report(step: StepResult) -> None:
            nonlocal known
            known = report_skipped(self.parts.rank, known)

        return report

    def _out_of_range(self) -> Callable[[StepResult], None]:
        """Notes the first total of a task that sums in half precision, where it is infinite."""
        is_noted = False

        def report(step: StepResult) -> None:
            nonlocal is_noted
            if not is_noted and math.isinf(step.loss_total):
                is_noted = True
                text = (
                    f"The total of the loss is infinite in step {step.step}: the task sums it in half precision, whose "
                    "largest number is 65,504 in float16. Return one value per item, Loss(values, count): they are "
                    "summed in single precision."
                )
                self.parts.rank.note("loss_out_of_range", text, "warning")

        return report

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
        loss, speed = self.log.epoch_so_far()
        epoch = step.window.epoch + 1
        if step.epoch_ended:
            self._callback("on_epoch_end")
            if math.isnan(loss):
                text = (
                    f"Epoch {epoch} has trained nothing: in none of its steps did the loss have items "
                    "and a finite value. A count of 0 says that all samples are left out (weights, ignored labels)."
                )
                self.parts.rank.note("nothing_counted", text, "warning")
        row, improved = {"train_loss": loss}, False
        config, is_last = self.parts.rank.config, step.step >= self.parts.rank.plan.total_steps
        every_epochs, every_steps = config.validation.every_epochs, config.validation.every_steps
        is_due = step.epoch_ended and (epoch % every_epochs == 0 or epoch >= config.training.epochs)
        is_due = is_due or bool(every_steps and step.step % every_steps == 0)
        if self.datasets.val is not None and (is_due or is_last):
            row |= self._validate()
            improved = is_due and self._judge(row)
        row |= {"lr": step.lr, "samples_per_s": speed.samples_per_s, "duration_s": speed.seconds}
        if step.epoch_ended:
            self.parts.update.end_epoch()
        self.log.epoch(row, improved, ended=step.epoch_ended)
        self.checkpoints.save(best=improved)

    def _validate_within_epoch(self, step: StepResult) -> None:
        metrics = self._validate()
        improved = self._judge(metrics)
        self.log.evaluated(metrics, improved)
        if improved:
            self.checkpoints.save(best=True)

    def _validate(self) -> dict[str, float]:
        self.log.pause()
        metrics = self.validation.run()
        self.log.unpause()
        return metrics

    def _judge(self, metrics: dict[str, float]) -> bool:
        if (value := metrics.get(self.parts.rank.plan.monitor)) is not None:
            self.parts.update.judge(value)
        return self.log.judge(metrics)

    def _end_step(self, step: StepResult) -> None:
        """Decide whether the run ends here; if not, time this rank's work in a step that will be logged."""
        self.log.agreed(step.flags)
        if self.log.ended_by is None and (step.step + 1) % self.parts.rank.config.telemetry.log_interval == 0:
            self.log.time_own_work()


def _always(at: Any) -> bool:
    return True


def _every(steps: int) -> Callable[[StepResult], bool]:
    return lambda step: step.step % steps == 0


def _announced(windows: Iterator[Window], hooks: Sequence[Hook]) -> Iterator[Window]:
    """``windows``; each is asked for right before its step, which is when the hooks are called."""
    for window in windows:
        for _, when, do in hooks:
            if when(window):
                do(window)
        yield window


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
