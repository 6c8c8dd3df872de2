"""The loop of a task on one rank: its steps, evaluations, epochs and end.

It sees windows, and parts that take their steps, never a device.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.checkpoint.writer import Steady
from lockstep.data.requests import Source, Window
from lockstep.data.stream import Stream
from lockstep.engine.diagnostics.profiler import profiled
from lockstep.engine.diagnostics.step_trace import Trace
from lockstep.engine.parts import Parts, StepResult
from lockstep.engine.resume import load_best
from lockstep.engine.run_log import RunLog, record_samples
from lockstep.engine.state import EndedBy, RunResult
from lockstep.engine.task import Datasets, Task
from lockstep.engine.trained import train_mode
from lockstep.engine.training import Training
from lockstep.engine.training_data import begin_epoch, loaded, walk
from lockstep.engine.validation import Validation
from lockstep.rundir.heartbeat import Activity, pulse

#: Bytes on a GPU that may be copied there, so that the copy to host memory need not be waited for.
MAX_CLONED_BYTES = 2**30
#: A task's hook: a function of a :class:`StepResult` and the model, and the number of steps between its calls.
TaskHook = tuple[Callable[..., Mapping[str, float] | None], int]
_OUT_OF_RANGE = (
    "The total of the loss is infinite in step {step}: the task sums it in half precision, whose largest number is "
    "65,504 in float16. Return one value per item, Loss(values, count): they are summed in single precision."
)
_NOTHING_COUNTED = (
    "Epoch {epoch} has trained nothing: in none of its steps did the loss have items and a finite value. A count of 0 "
    "says that all samples are left out (weights, ignored labels)."
)


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
        """Return seconds since the last call."""
        waited = self._waited_s
        self._waited_s = 0.0
        return waited


class TaskTraining(Training):
    """The loop of a task on one rank.

    Args:
        source: the training batches.
        trace: records steps for ``lockstep verify``; ``None``: nothing is recorded.
    """

    def __init__(
        self, task: Task, datasets: Datasets, parts: Parts, log: RunLog, source: Source, trace: Trace | None
    ) -> None:
        rank = parts.rank
        super().__init__(rank, log, parts.strategy.passes, (parts.update,), compares=rank.config.debug.trace == "off")
        self._task = task
        self._datasets = datasets
        self._parts = parts
        self._source = source
        self._trace = trace
        self._validation = Validation(rank, task, datasets, parts)
        self._task_hooks: Sequence[TaskHook] = ()
        #: The newest values of the task's hooks, by name.
        self._scalars: dict[str, float] = {}
        self._first_step = self.state.step + 1

    def run(self) -> RunResult:
        """Train, save, and test the best weights."""
        log = self.log
        self.check()
        log.start(self._parts.notes)
        self._validation.sanity_check()
        if log.ended_by is None:
            self._train()
        self.save()
        self.wait()
        final = log.final_evaluation
        self.averages.swap()  # the test uses the weights that are saved
        if log.ended_by is EndedBy.COMPLETED and self._datasets.test is not None:
            final |= self._validation.test(load_best(self.rank, self._task, self._module, self.state.step))
        pulse.at(Activity.ENDING)
        return log.finish(final)

    def _train(self) -> None:
        """Take steps until the run ends. Comments name the calls by which the loop of a session does the same."""
        log = self.log
        trace = self._trace
        with self._opened() as (windows, batches):  # batches()
            # backward() of each micro-batch, and step()
            steps = (self._parts.step(window, batches, log.requests(self.state.step + 1)) for window in windows)
            with profiled(self.rank, steps, self.state.step) as watched:
                for step in watched:
                    log.step(step.window.size, batches.waited_s())
                    self._finish_step(step)  # log()
                    ends_epoch = step.epoch_ended or step.step >= self.rank.plan.total_steps
                    if ends_epoch:
                        self._end_epoch(step)  # evaluate(), and the end of epochs()
                    elif self._is_due(step.step):
                        self._validate_within_epoch()
                    log.end_step(step.flags, None if ends_epoch else self.save)
                    if trace is not None:
                        trace.after_hooks(step.step, merged=self.saved_at == step.step)
                    if log.ended_by is not None:
                        break
        log.flush()
        if trace is not None:
            trace.write()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Iterator[Window], TimedBatches]]:
        """Begin to train: yields the windows from where the run is to its end, and their batches."""
        rank = self.rank
        state = self.state
        loader = loaded(
            self._source,
            rank.plan,
            rank.world,
            epoch=state.epoch,
            position=state.position,
            settled=self._validation.settle_loader,
        )
        self._task_hooks = self._task.hooks()
        train_mode(self._module)
        self._task._lockstep_context.is_training = True
        self.log.unpause()
        pulse.at(Activity.FIRST_STEP, state.step)
        windows = walk(rank.plan, rank.world, epoch=state.epoch, position=state.position)
        with contextlib.closing(loader):
            batches = loader if self._trace is None else self._trace.batches(loader)
            yield self._begin_windows(windows), TimedBatches(batches)

    def _begin_windows(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Begin the epoch and the step of each window. It is asked for right before its step."""
        rank = self.rank
        epoch = -1
        record = None
        if rank.config.telemetry.record_samples and (rank.world.is_main or not rank.plan.pipelined):
            # Before, since a step needs all ranks: whichever rank dies, every file has all that a checkpoint has.
            record = record_samples(rank, self.state, self._source.indices)
        for window in windows:
            if record is not None:
                record(window)
            if window.epoch != epoch:
                epoch = window.epoch
                begin_epoch(self._datasets.train, epoch, rank.plan.task.train_samples)
                self._callback("on_epoch_start")
            self._callback("on_step_start")
            yield window

    def _finish_step(self, step: StepResult) -> None:
        """Sum the loss, average weights, call callbacks and hooks, and emit the row of a log interval."""
        parts = self._parts
        if step.step == self._first_step:
            self.check_names()
        if self._trace is not None:
            self._trace.after_update(step.window.requests, step.loss_total, step.loss_count)
        self.log.losses.add(step.loss_total, step.loss_count)
        if parts.strategy.sums_in_half and math.isinf(step.loss_total):
            self.log.note_once("loss_out_of_range", _OUT_OF_RANGE.format(step=step.step))
        self.averages.update(step.step)
        self._callback("on_step_end")
        for hook, every in self._task_hooks:
            if step.step % every == 0:
                self._scalars.update(hook(step, parts.model) or {})
        if self.log.is_logged(step.step):
            self.log_step(dict(self._scalars), is_empty=not float(step.loss_count))

    def _is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after ``step`` (``validation.every_steps``)."""
        every = self.rank.config.validation.every_steps
        return every is not None and self._datasets.val is not None and step % every == 0

    def _callback(self, event: str) -> None:
        self._parts.callbacks.call(event, self._task._lockstep_context, self._parts.strategy.module)

    def _end_epoch(self, step: StepResult) -> None:
        """Validate if that is due, emit the epoch's row, and save.

        Where ``max_steps`` ends the run, it is evaluated, too. Such an evaluation judges nothing: without the stop
        there would be none, and a run that resumes has the best and the patience of one that was not stopped.
        """
        loss = self.log.sum_epoch()
        epoch = step.window.epoch + 1
        if step.epoch_ended:
            self._callback("on_epoch_end")
            if math.isnan(loss):
                self.rank.note("nothing_counted", _NOTHING_COUNTED.format(epoch=epoch), "warning")
        config = self.rank.config
        is_last = step.step >= self.rank.plan.total_steps
        is_due = step.epoch_ended and (epoch % config.validation.every_epochs == 0 or epoch >= config.training.epochs)
        is_due = is_due or self._is_due(step.step)
        metrics = {"train_loss": loss}
        judged = None
        if self._datasets.val is not None and (is_due or is_last):
            metrics |= self._validate()
            judged = metrics if is_due else None
        self.record_epoch(metrics, ended=step.epoch_ended, judged=judged)

    def _validate_within_epoch(self) -> None:
        metrics = self._validate()
        self.advance_rates(metrics)
        improved = self.log.judge(metrics)
        self.log.evaluated(metrics, improved)
        if improved:
            self.save(best=True)

    def _validate(self) -> dict[str, float]:
        self.log.pause()
        metrics = self._validation.run()
        self.log.unpause()
        return metrics

    # Checkpoints.

    def _steady(self) -> Steady | None:
        """Keep weights and optimizer state as they are until the next update, which waits for their copy (one GPU).

        Not where something besides the update may write to them before.
        """
        has_hooks = getattr(self._task.hooks, "__func__", None) is not Task.hooks
        swaps = self.averages.trained() is not None
        if self.rank.device.type != "cuda" or self._divides or swaps or has_hooks or len(self._parts.callbacks):
            return None
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        whole = sum(value.nbytes for value in self._module.state_dict().values() if isinstance(value, Tensor))
        if whole - sum(parameter.nbytes for parameter in trained) > MAX_CLONED_BYTES:
            return None
        weights = {parameter.data_ptr() for parameter in trained}
        return lambda path, tensor: tensor.data_ptr() in weights or path[:2] == ("trainer", "update")

    def _trainer_state(self) -> dict[str, Any]:
        content = super()._trainer_state()
        content |= {"update": self._parts.update.state_dict(), "task": self._task.state_dict()}
        if isinstance(self._datasets.train, Stream):
            samples = self.state.epoch * self.rank.plan.batch.samples + self.state.position
            content["stream"] = self._datasets.train.state_dict(samples)
        return content
