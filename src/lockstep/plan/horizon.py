"""How long a run goes on, and at which learning rate."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from lockstep.config import RunConfig
from lockstep.plan.batch import BatchPlan
from lockstep.plan.plan import Choice, ResumePoint, TaskFacts
from lockstep.plan.schedule import Schedule, resolve_schedule, warmup_note


class Course(NamedTuple):
    """``notes``: what the user should think about."""

    epochs: int
    total_steps: int
    schedule: Schedule
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]


def resolve_course(config: RunConfig, batch: BatchPlan, resume: ResumePoint | None, facts: TaskFacts) -> Course:
    """Epochs, optimizer steps and schedule of a run, from what an earlier attempt has left of it."""
    own_lr = facts.optimizer_lr
    base_lr = config.optimizer.lr if own_lr is None else own_lr
    lr, lr_reason, note = scale_lr(
        base_lr,
        config.optimizer.lr_scaling,
        global_batch=batch.global_batch,
        base_batch=config.optimizer.base_batch_size or config.training.batch_size,
    )
    if own_lr is not None:
        own = "the task's own optimizer (its first parameter group)"
        lr_reason = own if lr == base_lr else f"{own}: {lr_reason}"
    epochs, total, offset, length_reason = _length(config, batch, resume)
    schedule, schedule_reason = resolve_schedule(
        config.scheduler,
        lr=lr,
        scale=lr / base_lr,
        total_steps=total + offset,
        steps_per_epoch=batch.steps_per_epoch,
        offset=offset,
    )
    choices = (
        Choice(name="steps", value=str(total), reason=length_reason),
        Choice(name="learning rate", value=f"{lr:g}", reason=lr_reason),
        Choice(name="schedule", value="task", reason="the task's scheduler() sets the learning rates")
        if facts.own_schedule
        else Choice(name="schedule", value=config.scheduler.name, reason=schedule_reason),
    )
    unfinished = None if config.debug.fast_dev_run or facts.own_schedule else warmup_note(schedule, config.scheduler)
    return Course(epochs, total, schedule, choices, tuple(filter(None, (note, unfinished))))


def _length(config: RunConfig, batch: BatchPlan, resume: ResumePoint | None) -> tuple[int, int, int, str]:
    """Epochs, total optimizer steps, the schedule's offset, and the reason."""
    t = config.training
    if config.debug.fast_dev_run:
        return 1, 1, 0, "fast_dev_run: one step"
    per_epoch, offset = batch.steps_per_epoch, 0
    total = t.epochs * per_epoch
    start = config.debug.start_position
    if resume is None and start:
        resume = ResumePoint(step=0, epoch=0, position=start, samples_seen=0, global_batch=batch.global_batch)
    if resume:  # an earlier resume may have changed the global batch, so what is left is counted from here
        total = resume.step + batch.steps_left(resume.position) + (t.epochs - resume.epoch - 1) * per_epoch
        offset = t.epochs * per_epoch - total
    reason = f"{t.epochs} epochs × {per_epoch} steps"
    if t.max_steps is not None and t.max_steps < total:
        epochs = t.epochs if resume else -(-t.max_steps // per_epoch)
        return epochs, t.max_steps, offset, f"max_steps, before {reason} are over"
    return t.epochs, total, offset, reason


Scaling = Literal["none", "linear", "sqrt"]


def scale_lr(lr: float, scaling: Scaling, *, global_batch: int, base_batch: int) -> tuple[float, str, str | None]:
    """The learning rate that runs, why, and a note when the user should think about it.

    ``linear``: lr × global / base (Goyal et al. 2017, https://arxiv.org/abs/1706.02677; for SGD).
    ``sqrt``: lr × √(global / base) (Krizhevsky 2014, https://arxiv.org/abs/1404.5997; for Adam see
    Malladi et al. 2022, https://arxiv.org/abs/2205.10287). ``none``: lr as given.

    Args:
        lr: for a global batch of ``base_batch`` samples.
        global_batch: samples per optimizer step.
        base_batch: samples per optimizer step that ``lr`` was tuned for.
    """
    ratio = global_batch / base_batch
    if scaling == "linear":
        return lr * ratio, f"{lr:g} × {global_batch}/{base_batch} (linear scaling)", None
    if scaling == "sqrt":
        return lr * math.sqrt(ratio), f"{lr:g} × √({global_batch}/{base_batch}) (square-root scaling)", None
    note = None
    if ratio > 1:
        note = (
            f"The global batch is {global_batch}, {ratio:g} × {base_batch}. The learning rate stays {lr:g}; "
            f"linear scaling would set {lr * ratio:g} (--lr-scaling linear), with warm-up."
        )
    return lr, "as configured; never changed silently", note
