"""How long a run trains, and at which learning rate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple, cast

from lockstep.config import RunConfig
from lockstep.events import Note
from lockstep.planning.batch import BatchPlan
from lockstep.planning.decision import Decision
from lockstep.planning.plan import ResumePoint, TaskFacts
from lockstep.planning.schedule import Schedule, resolve_schedule, warmup_notes


class Course(NamedTuple):
    """How long a run trains and at which learning rate, with the decisions and the notes on them."""

    epochs: int
    schedule: Schedule
    decisions: tuple[Decision, ...]
    notes: tuple[Note, ...]


def resolve_course(config: RunConfig, batch: BatchPlan, resume: ResumePoint | None, facts: TaskFacts) -> Course:
    """Epochs, optimizer steps and schedule of a run, from what an earlier attempt has left to do."""
    own_lr = facts.optimizer_lr
    base_lr = config.optimizer.lr if own_lr is None else own_lr
    rate, notes = scale_lr(
        base_lr,
        config.optimizer.lr_scaling,
        global_batch=batch.global_batch,
        base_batch=config.optimizer.base_batch_size or config.training.batch_size,
    )
    lr = cast(float, rate.value)
    if own_lr is not None:
        own = "the task's own optimizer (its first parameter group)"
        rate = replace(rate, reason=own if lr == base_lr else f"{own}: {rate.reason}")
    epochs, total, offset, reason = _length(config, batch, resume)
    schedule, scheduled = resolve_schedule(
        config.scheduler,
        lr=lr,
        scale=lr / base_lr,
        total_steps=total + offset,
        steps_per_epoch=batch.steps_per_epoch,
        offset=offset,
    )
    if facts.own_schedule:
        scheduled = [Decision("schedule", "schedule", "task", "the task's scheduler() sets the learning rates")]
    elif not config.debug.fast_dev_run:
        notes += warmup_notes(schedule, config.scheduler)
    return Course(epochs, schedule, (Decision("steps", "steps", total, reason), rate, *scheduled), tuple(notes))


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


def scale_lr(lr: float, scaling: Scaling, *, global_batch: int, base_batch: int) -> tuple[Decision, list[Note]]:
    """The peak learning rate, and a note where the user should consider scaling it.

    ``linear``: lr × global / base (Goyal et al. 2017, https://arxiv.org/abs/1706.02677; for SGD).
    ``sqrt``: lr × √(global / base) (Krizhevsky 2014, https://arxiv.org/abs/1404.5997; for Adam see
    Malladi et al. 2022, https://arxiv.org/abs/2205.10287). ``none``: lr as given.

    Args:
        lr: for a global batch of ``base_batch`` samples.
        global_batch: samples per optimizer step.
        base_batch: samples per optimizer step that ``lr`` was tuned for.
    """
    ratio, reason, notes = global_batch / base_batch, "as configured; never changed silently", []
    if scaling == "linear":
        reason, lr = f"{lr:g} × {global_batch}/{base_batch} (linear scaling)", lr * ratio
    elif scaling == "sqrt":
        reason, lr = f"{lr:g} × √({global_batch}/{base_batch}) (square-root scaling)", lr * math.sqrt(ratio)
    elif ratio > 1:
        text = (
            f"The global batch is {global_batch}, {ratio:g} × {base_batch}. The learning rate stays {lr:g}; "
            f"linear scaling would set {lr * ratio:g} (--lr-scaling linear), with warm-up."
        )
        notes.append(Note("lr_not_scaled", text))
    return Decision("lr", "learning rate", lr, reason), notes
