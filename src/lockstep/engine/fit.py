"""Training on one rank: the loop, and what happens at its steps and at the ends of epochs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from lockstep.data.loader import make_loader
from lockstep.data.requests import Source, Window
from lockstep.engine.checkpoints import Checkpoints
from lockstep.engine.diagnostics.profiler import memory_snapshot, profiled
from lockstep.engine.diagnostics.step_trace import Trace
from lockstep.engine.evaluate import train_mode
from lockstep.engine.loop import StepResult, training_steps
from lockstep.engine.parts import Parts
from lockstep.engine.rank_context import RankContext
from lockstep.engine.run_log import RunLog
from lockstep.engine.state import EndedBy, RunResult
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import walk
from lockstep.engine.validation import Validation
from lockstep.telemetry.progress_board import Activity, pulse

At = TypeVar("At", Window, StepResult)


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


class Hook(NamedTuple, Generic[At]):
    """``do(at)`` is called where ``when(at)`` is true, in the order of the hooks.

    ``at`` is the :class:`Window` of the step that starts, or the :class:`StepResult` of the one that has ended.
    """

    name: str
    when: Callable[[At], bool]
    do: Callable[[At], None]

    @staticmethod
    def call(hooks: Sequence[Hook[At]], at: At) -> None:
        for _, when, do in hooks:
            if when(at):
                do(at)


@dataclass(frozen=True)
class Fit:
    """What one rank trains with, and the actions that hooks call. Each action is called on every rank alike.

    Attributes:
        source: the training batches.
        scalars: the newest values of the task's own hooks, by name.
    """

    rank: RankContext
    task: Task
    datasets: Datasets
    parts: Parts
    log: RunLog
    validation: Validation
    checkpoints: Checkpoints
    trace: Trace | None
    source: Source
    scalars: dict[str, float]

    def run(self, before: Sequence[Hook[Window]], after: Sequence[Hook[StepResult]]) -> RunResult:
        """Train, save, and test the best weights; with hooks around the steps."""
        log, parts = self.log, self.parts
        self.checkpoints.check()
        log.start(parts.notes, parts.warnings)
        self.validation.sanity_check()
        if log.ended_by is None:
            self._train(before, after)
        self.checkpoints.save()
        self.checkpoints.wait()
        final = dict(parts.state.best_metric)
        parts.update.averages.swap()  # what is tested now is what is saved
        if log.ended_by is EndedBy.COMPLETED and self.datasets.test is not None:
            final |= self.validation.test(self.checkpoints.load_best())
        pulse.at(Activity.ENDING)
        return log.finish(final)

    def _train(self, before: Sequence[Hook[Window]], after: Sequence[Hook[StepResult]]) -> None:
        """Take steps until the run ends, and call hooks around them."""
        rank, plan, state, log, trace = self.rank, self.rank.plan, self.parts.state, self.log, self.trace
        start: dict[str, int] = {"epoch": state.epoch, "position": state.position}
        requests = chain.from_iterable(window.requests for window in walk(plan, rank.world, **start))
        settled, largest = self.validation.settle_loader, plan.batch.batch_size
        loader = make_loader(self.source, requests, plan.loader, rank.world.rank, largest=largest, settled=settled)
        batches = TimedBatches(loader if trace is None else trace.batches(loader))
        train_mode(self.parts.strategy.module)
        self.task.context.is_training = True
        log.unpause()
        pulse.at(Activity.FIRST_STEP, state.step)
        with contextlib.closing(loader), memory_snapshot(rank):
            steps = training_steps(
                _announced(walk(plan, rank.world, **start), before),
                batches,
                self.parts.strategy,
                self.parts.update,
                state,
                epoch_over=lambda stop: plan.batch.window(stop) is None,
                requested=lambda: log.requests(state.step + 1),
                norm_every=rank.config.telemetry.log_interval,
            )
            with profiled(rank, steps, state.step) as watched:
                for step in watched:
                    log.step(step.window.size, batches.waited_s())
                    Hook.call(after, step)
                    if log.ended_by is not None:
                        break
        log.flush()
        if trace is not None:
            trace.write()

    def callback(self, event: str) -> None:
        """Call the task's callbacks of ``event``."""
        self.parts.callbacks.call(event, self.task.context, self.parts.strategy.module)

    def log_step(self, step: StepResult) -> None:
        update = self.parts.update
        norm = None if update.grad_norm is None else float(update.grad_norm)
        is_empty = not float(step.loss_count)
        self.log.log_step(step.lr, norm, dict(self.scalars), skipped=update.skipped, is_empty=is_empty)

    def end_epoch(self, step: StepResult) -> None:
        """Validate where that is due, emit the epoch's row, and save. ``max_steps`` may end a run within an epoch."""
        loss, speed = self.log.epoch_so_far()
        if step.epoch_ended:
            self.callback("on_epoch_end")
            if math.isnan(loss):
                text = (
                    f"Epoch {step.window.epoch + 1} has trained nothing: in none of its steps did the loss have items "
                    "and a finite value. A count of 0 says that all samples are left out (weights, ignored labels)."
                )
                self.rank.note("nothing_counted", text, "warning")
        row, improved = {"train_loss": loss}, False
        every, last = self.rank.config.validation.every_epochs, step.step >= self.rank.plan.total_steps
        if self.datasets.val is not None and ((step.window.epoch + 1) % every == 0 or last):
            row |= self._validate()
            improved = self._judge(row, extra=not step.epoch_ended)
        row |= {"lr": step.lr, "samples_per_s": speed.samples_per_s, "duration_s": speed.seconds}
        if step.epoch_ended:
            self.parts.update.end_epoch()
        self.log.epoch(row, improved, ended=step.epoch_ended)
        self.checkpoints.save(best=improved)

    def validate(self, step: StepResult) -> None:
        """Validate within an epoch, and save where the result is the best so far."""
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

    def _judge(self, metrics: dict[str, float], *, extra: bool = False) -> bool:
        """``extra``: an evaluation within an epoch that a run without ``max_steps`` does not have."""
        monitor = self.rank.plan.monitor
        value = metrics.get(monitor)
        if value is None:
            available = ", ".join(metrics)
            text = f"Monitored metric {monitor!r} was not reported; available: {available}."
            self.rank.note("monitor_missing", text, "warning")
            return False
        if not extra:
            self.parts.update.judge(value)
        return self.log.judge(metrics, value)

    def end_step(self, step: StepResult) -> None:
        """Decide whether the run ends here; if not, time this rank's work in a step that will be logged."""
        self.log.agreed(step.flags)
        if self.log.ended_by is None and (step.step + 1) % self.rank.config.telemetry.log_interval == 0:
            self.log.time_own_work()


def _announced(windows: Iterator[Window], hooks: Sequence[Hook[Window]]) -> Iterator[Window]:
    """``windows``; each is asked for right before its step, which is when the hooks are called."""
    for window in windows:
        Hook.call(hooks, window)
        yield window
