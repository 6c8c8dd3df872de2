"""Building what a rank trains with, and the hooks around its steps, from the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.checkpoint.store import Snapshot
from lockstep.data.requests import Window
from lockstep.engine.checkpoints import Checkpoints
from lockstep.engine.diagnostics.mfu import peak_share
from lockstep.engine.diagnostics.step_trace import Trace, trace_file
from lockstep.engine.fit import Fit, Hook
from lockstep.engine.loop import StepResult
from lockstep.engine.parts import build_parts
from lockstep.engine.rank_context import RankContext
from lockstep.engine.run_log import RunLog, report_skipped
from lockstep.engine.task import Datasets, Task
from lockstep.engine.trained import bare
from lockstep.engine.training_data import begin_stream, kept_on, training_source
from lockstep.engine.validation import Validation
from lockstep.telemetry.files import JsonLines


def build(rank: RankContext, task: Task, datasets: Datasets, snapshot: Snapshot | None) -> Fit:
    """What this rank trains with, from ``snapshot`` or from the start. Collective.

    Raises:
        LockstepError: it cannot be trained so, or ``snapshot`` does not fit.
    """
    parts = build_parts(rank, task, datasets, snapshot)
    rank, strategy = parts.rank, parts.strategy
    done = parts.state.epoch * rank.plan.batch.samples + parts.state.position
    saved = None if snapshot is None else snapshot.trainer.get("stream")
    begin_stream(datasets, rank.run_dir.path, rank.attempt, rank.world, done, rank.plan.batch.global_batch, saved)
    # Compiled code would be compiled again for the hooks that time a rank's own work; the gradient of a divided model
    # is complete only when all ranks have done theirs.
    untimed = rank.config.training.compile or strategy.is_sharded
    skipped = rank.run_dir.path / f"skipped-rank{rank.world.rank}.jsonl"
    source = training_source(task, datasets, rank.plan, skipped)
    share, remarks = None, list[str | None]()
    if rank.device.type == "cuda":
        share, text = peak_share(task, source, rank.plan)
        remarks.append(text)
    log = RunLog(rank, parts.state, timed=lambda: () if untimed else strategy.module.parameters(), peak_share=share)
    trace = None
    if rank.config.debug.trace == "off":
        source = replace(source, pad=task.pad, full=rank.plan.filled_to) if rank.plan.filled_to else source
        source, remark = kept_on(source, rank.device, rank.plan)
        remarks.append(remark)
    else:
        file = trace_file(rank.run_dir.path, rank.world.rank)
        trace = Trace(rank.config.debug, file, rank.world.is_main, parts.update, strategy.module, parts.draws)
        source = trace.source(source)
    parts = parts._replace(notes=(*parts.notes, *filter(None, remarks)))
    return Fit(
        rank,
        task,
        datasets,
        parts,
        log,
        Validation(rank, task, datasets, parts),
        Checkpoints(rank, task, parts, log, datasets.train),
        trace,
        source,
        scalars={},
    )


def hooks_before(fit: Fit) -> list[Hook[Window]]:
    """What happens before steps, in order."""
    hooks, epochs = [], _Changes()
    if fit.rank.config.telemetry.record_samples and (fit.rank.world.is_main or not fit.rank.plan.pipelined):
        # Before, since a step needs all ranks: every rank's file has all that a checkpoint has, whichever rank dies.
        hooks.append(Hook("record the samples", _always, _recorder(fit)))
    if fit.parts.callbacks:
        hooks.append(Hook("on_epoch_start", epochs, lambda window: fit.callback("on_epoch_start")))
        hooks.append(Hook("on_step_start", _always, lambda window: fit.callback("on_step_start")))
    return hooks


def hooks_after(fit: Fit) -> list[Hook[StepResult]]:
    """What happens after steps, in order."""
    rank, trace, checkpoints = fit.rank, fit.trace, fit.checkpoints
    total, every_steps = rank.plan.total_steps, rank.config.validation.every_steps

    def ends_epoch(step: StepResult) -> bool:
        return step.epoch_ended or step.step >= total

    def saves(step: StepResult) -> bool:
        return step.flags is not None and step.flags.save > 0 and not step.epoch_ended

    losses = fit.log.losses
    hooks = [Hook("sum the loss", _always, lambda step: losses.add(step.loss_total, step.loss_count))]
    if rank.config.averaging.name != "none":
        hooks.append(Hook("average the weights", _always, lambda step: fit.parts.update.averages.update(step.step)))
    if fit.parts.callbacks:
        hooks.append(Hook("on_step_end", _always, lambda step: fit.callback("on_step_end")))
    for number, (do, every) in enumerate(fit.task.hooks()):
        hooks.append(Hook(f"hook {number} of the task", _every(every), _of_task(do, fit)))
    hooks.append(Hook("log", lambda step: fit.log.is_logged(step.step), fit.log_step))
    if every_steps and fit.datasets.val is not None:
        due = _every(every_steps)
        hooks.append(Hook("validate", lambda step: due(step) and not ends_epoch(step), fit.validate))
    hooks += [
        *([Hook("report skipped samples", ends_epoch, _skipped(fit))] if fit.source.skipped else []),
        Hook("end the epoch", ends_epoch, fit.end_epoch),
        Hook("save", saves, lambda step: checkpoints.save()),
        Hook("end the step", _always, fit.end_step),
    ]
    if trace is not None:
        hooks.insert(0, Hook("trace the update", _always, trace.after_update))
        hooks.append(
            Hook("trace the hooks", _always, lambda step: trace.after_hooks(step, checkpoints.saved_at == step.step))
        )
    return hooks


def _always(at: Any) -> bool:
    return True


def _every(steps: int) -> Callable[[StepResult], bool]:
    return lambda step: step.step % steps == 0


class _Changes:
    """Whether a window is the first of its epoch that this attempt takes."""

    def __init__(self) -> None:
        self._epoch = -1

    def __call__(self, window: Window) -> bool:
        before, self._epoch = self._epoch, window.epoch
        return window.epoch != before


def _of_task(hook: Callable[..., Any], fit: Fit) -> Callable[[StepResult], None]:
    def call(step: StepResult) -> None:
        fit.scalars.update(hook(step, bare(fit.parts.strategy.module)) or {})

    return call


def _skipped(fit: Fit) -> Callable[[StepResult], None]:
    """Notes how many samples have been left out so far, where that has changed (``data.on_bad_row``)."""
    known = 0

    def report(step: StepResult) -> None:
        nonlocal known
        known = report_skipped(fit.rank, known)

    return report


def _recorder(fit: Fit) -> Callable[[Window], None]:
    """Appends the indices of this rank's samples to its file (``telemetry.record_samples``)."""
    file = JsonLines(fit.rank.run_dir.samples_file(fit.rank.world.rank))

    def record(window: Window) -> None:
        indices: list[int] = []
        for request in window.requests:
            if not request.ghost:
                indices += fit.source.indices(request).tolist()
        step = fit.parts.state.step + 1
        file.append({"attempt": fit.rank.attempt, "step": step, "epoch": window.epoch + 1, "indices": indices})

    return record
