"""Length of a run, and its learning rate as a pure function of the optimizer step.

Every schedule begins with a linear warm-up whose first step already runs at ``lr / warmup_steps``, not at zero (Goyal
et al. 2017, https://arxiv.org/abs/1706.02677, section 2.2), and never falls below ``min_lr``. Since a resume holds the
global batch, the same step has seen the same number of samples on any devices.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple, cast

from lockstep.arithmetic import ceil_div
from lockstep.config import RunConfig, SchedulerConfig
from lockstep.config.sections import ScheduleName
from lockstep.errors import many
from lockstep.events import Note
from lockstep.planning.batch import BatchPlan
from lockstep.planning.decision import Decision, Frozen, decide

#: Divisor of the rate at the start of ``onecycle``.
ONE_CYCLE_START = 25.0
#: Steps of a run with ``debug.fast_dev_run``; the speed is that of the steps after the first, which is slower.
DEV_STEPS = 3


class Schedule(Frozen):
    """``at(step)`` returns the learning rate of the step that follows ``step`` finished ones.

    ``lr`` is the highest rate; it includes ``scale``, the factor of scaling by the batch. ``offset`` moves the origin
    when a resume changes the global batch (``--rescale-batch``), so that the schedule continues at the same share of
    the data.
    """

    name: ScheduleName
    lr: float
    scale: float = 1.0
    total_steps: int
    steps_per_epoch: int
    warmup_steps: int = 0
    min_lr: float = 0.0
    step_epochs: float = 10.0
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    power: float = 1.0
    decay: float = 0.96
    decay_steps: int = 10_000
    decay_share: float = 0.2
    patience: int = 3
    offset: int = 0

    @property
    def base_lr(self) -> float:
        """Highest rate before scaling, with which optimizers are constructed."""
        return self.lr / self.scale

    def at(self, step: int) -> float:
        step += self.offset
        floor = min(self.min_lr, self.lr)  # a floor above the peak would raise every rate
        if self.name == "onecycle":
            return self._one_cycle(step, floor)
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return max(floor, self._after_warmup(step, floor))

    def _one_cycle(self, step: int, floor: float) -> float:
        """Rise from a 25th of the rate and fall to the floor, both as a cosine, as torch's ``OneCycleLR`` does.

        Smith and Topin 2018, https://arxiv.org/abs/1708.07120; momentum stays as it is.
        """
        peak_step = max(1, self.warmup_steps) - 1
        if step < peak_step:
            return _cosine(self.lr / ONE_CYCLE_START, self.lr, step / peak_step)
        return _cosine(self.lr, floor, min(1.0, (step - peak_step) / max(1, self.total_steps - 1 - peak_step)))

    def _after_warmup(self, step: int, floor: float) -> float:
        steps_after_warmup = step - self.warmup_steps
        share = min(1.0, steps_after_warmup / max(1, self.total_steps - self.warmup_steps))
        epoch = step / self.steps_per_epoch
        if self.name == "cosine":  # Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts
            return _cosine(self.lr, floor, share)
        if self.name == "poly":
            return float(floor + (self.lr - floor) * (1 - share) ** self.power)
        if self.name == "wsd":  # Hu et al. 2024, https://arxiv.org/abs/2404.06395, with a linear decay
            share_of_decay_left = (self.total_steps - step) / (self.decay_share * self.total_steps)
            return floor + (self.lr - floor) * max(0.0, min(1.0, share_of_decay_left))
        if self.name == "step":
            return float(self.lr * self.gamma ** math.floor(epoch / self.step_epochs))
        if self.name == "multistep":
            return float(self.lr * self.gamma ** sum(epoch >= milestone for milestone in self.milestones))
        if self.name == "exponential":
            return float(self.lr * self.decay ** (steps_after_warmup / self.decay_steps))
        return self.lr


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))


#: Default length of the warm-up, in epochs.
WARMUP_EPOCHS = 2
#: Share of the run in which the rate of ``onecycle`` rises.
ONE_CYCLE_RISE = 0.3


class Course(NamedTuple):
    """Length and learning rates of a run, with their decisions and notes."""

    epochs: int
    schedule: Schedule
    decisions: tuple[Decision, ...]
    notes: tuple[Note, ...]


def resolve_course(
    config: RunConfig,
    batch: BatchPlan,
    *,
    done: tuple[int, int, int] | None = None,
    task_lr: float | None = None,
    has_scheduler: bool = False,
) -> Course:
    """Decide epochs, optimizer steps and schedule of a run.

    Args:
        done: steps, epochs and samples of the running epoch in earlier attempts; ``None`` without any.
        task_lr: learning rate of the task's optimizer; ``None`` if the optimizer is configured.
        has_scheduler: the task makes a scheduler.
    """
    base_lr = config.optimizer.lr if task_lr is None else task_lr
    base_batch = config.optimizer.base_batch_size or config.training.batch_size
    scaling = config.optimizer.lr_scaling
    lr_decision, notes = scale_lr(base_lr, scaling, global_batch=batch.global_batch, base_batch=base_batch)
    lr = cast(float, lr_decision.value)
    if task_lr is not None:
        source = "the task's optimizer (its first parameter group)"
        lr_decision = replace(lr_decision, reason=source if lr == base_lr else f"{source}: {lr_decision.reason}")
    epochs, total_steps, offset, reason = _length(config, batch, done)
    schedule, schedule_decisions = resolve_schedule(
        config.scheduler,
        lr=lr,
        scale=lr / base_lr,
        total_steps=total_steps + offset,
        steps_per_epoch=batch.steps_per_epoch,
        offset=offset,
    )
    if has_scheduler:
        reason_of_task = "the task's scheduler() sets the learning rates"
        schedule_decisions = [Decision("schedule", "schedule", "task", reason_of_task)]
    elif not config.debug.fast_dev_run and 0 < schedule.total_steps <= schedule.warmup_steps:
        setting = "--warmup-epochs 0" if config.scheduler.warmup_steps is None else "--set scheduler.warmup_steps=0"
        text = (
            f"Warm-up takes all {schedule.total_steps} steps: the learning rate grows to {schedule.lr:g} at the "
            f"last one, and the schedule never begins. Train longer, or set {setting}."
        )
        notes.append(Note("warmup_unfinished", text))
    decisions = (Decision("steps", "steps", total_steps, reason), lr_decision, *schedule_decisions)
    return Course(epochs, schedule, decisions, tuple(notes))


def _length(config: RunConfig, batch: BatchPlan, done: tuple[int, int, int] | None) -> tuple[int, int, int, str]:
    """Return epochs, total optimizer steps, the schedule's offset, and the reason."""
    epochs = config.training.epochs
    max_steps = config.training.max_steps
    if config.debug.fast_dev_run:
        return 1, min(DEV_STEPS, batch.steps_per_epoch), 0, "fast_dev_run: the steps after the first are timed"
    steps_per_epoch = batch.steps_per_epoch
    total_steps = epochs * steps_per_epoch
    offset = 0
    if done is None and config.debug.start_position:
        done = 0, 0, config.debug.start_position
    if done:  # an earlier resume may have changed the global batch, so count the remaining steps from here
        step, epoch, position = done
        total_steps = step + batch.steps_left(position) + (epochs - epoch - 1) * steps_per_epoch
        offset = epochs * steps_per_epoch - total_steps
    reason = f"{many(epochs, 'epoch')} × {many(steps_per_epoch, 'step')}"
    if max_steps is not None and max_steps < total_steps:
        started_epochs = epochs if done else ceil_div(max_steps, steps_per_epoch)
        return started_epochs, max_steps, offset, f"max_steps, before {reason} are over"
    return epochs, total_steps, offset, reason


def scale_lr(
    lr: float, scaling: Literal["none", "linear", "sqrt"], *, global_batch: int, base_batch: int
) -> tuple[Decision, list[Note]]:
    """Decide the peak learning rate, with a note if the user should consider scaling it.

    ``lr`` was tuned for ``base_batch`` samples a step. ``linear``: lr × global / base (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677; for SGD). ``sqrt``: lr × √(global / base) (Krizhevsky 2014,
    https://arxiv.org/abs/1404.5997; for Adam see Malladi et al. 2022, https://arxiv.org/abs/2205.10287).
    """
    ratio = global_batch / base_batch
    fraction = f"{global_batch}/{base_batch}"
    decision = decide(
        "lr",
        (scaling == "linear", lr * ratio, f"{lr:g} × {fraction} (linear scaling)"),
        (scaling == "sqrt", lr * math.sqrt(ratio), f"{lr:g} × √({fraction}) (square-root scaling)"),
        (True, lr, "as configured; never changed silently"),
    )
    if scaling != "none" or ratio <= 1:
        return decision, []
    text = (
        f"The global batch is {global_batch}, {ratio:g} × {base_batch}. The learning rate stays {lr:g}; "
        f"linear scaling would set {lr * ratio:g} (--lr-scaling linear), with warm-up."
    )
    return decision, [Note("lr_not_scaled", text)]


def resolve_schedule(
    config: SchedulerConfig, *, lr: float, total_steps: int, steps_per_epoch: int, scale: float = 1.0, offset: int = 0
) -> tuple[Schedule, list[Decision]]:
    """Decide the schedule and its warm-up.

    Args:
        lr: the peak, after scaling by the batch with the factor ``scale``.
        total_steps: optimizer steps of the run.
        offset: steps by which a resume with another global batch moves the origin.
    """
    epochs = config.warmup_epochs
    epoch_length = f"of {steps_per_epoch} steps"
    default_epochs = WARMUP_EPOCHS * steps_per_epoch
    tenth = total_steps // 10
    epochs_text = "1 epoch" if epochs == 1 else f"{epochs or 0:g} epochs"
    rise = f"onecycle rises for {ONE_CYCLE_RISE:.0%} of the run"
    default = f"{WARMUP_EPOCHS} epochs {epoch_length}"
    decision = decide(
        "warmup",
        (config.warmup_steps is not None, config.warmup_steps, "as configured"),
        (epochs is not None, round((epochs or 0) * steps_per_epoch), f"as configured: {epochs_text} {epoch_length}"),
        (config.name == "onecycle", round(ONE_CYCLE_RISE * total_steps), rise),
        (default_epochs <= tenth, default_epochs, f"default: {default}"),
        (True, tenth, f"default: a tenth of the run's {many(total_steps, 'step')}, since {default} are more"),
    )
    warmup_steps = cast(int, decision.value)
    if warmup_steps > total_steps:
        warmup_steps = total_steps
        decision = replace(decision, reason=f"{decision.reason}; limited to the {total_steps} steps of the run")
    sizes = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch, "warmup_steps": warmup_steps}
    rates = {"lr": lr, "scale": scale, "offset": offset}
    schedule = Schedule.model_validate(config.model_dump() | sizes | rates)
    ends = {
        "wsd": f", constant, then down to {config.min_lr:g} in the last {config.decay_share:.0%}",
        "plateau": f", times {config.gamma:g} after more than {config.patience} evaluations without improvement",
    }
    reason = f"as configured, over {total_steps} optimizer steps{ends.get(config.name, '')}"
    return schedule, [
        Decision("schedule", "schedule", config.name, reason),
        replace(decision, value=warmup_steps, shown=many(warmup_steps, "step")),
    ]
