"""How long a run trains, and its learning rate as a pure function of the optimizer step.

Every schedule begins with a linear warm-up whose first step already runs at ``lr / warmup_steps``, not at zero (Goyal
et al. 2017, https://arxiv.org/abs/1706.02677, section 2.2), and never falls below ``min_lr``. Since a resume holds the
global batch, the same step has seen the same number of samples on any devices.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple, cast

from lockstep.config import RunConfig, SchedulerConfig
from lockstep.config.sections import ScheduleName
from lockstep.errors import many
from lockstep.events import Note
from lockstep.planning.batch import BatchPlan
from lockstep.planning.decision import Decision, Frozen, decide

#: Of ``onecycle``: what the rate is divided by at the start.
ONE_CYCLE_START = 25.0


class Schedule(Frozen):
    """``at(step)`` gives the learning rate of the step that follows ``step`` finished ones.

    ``lr`` is the highest one, in which ``scale`` is what scaling by the batch multiplied it by. ``offset`` moves the
    origin when a resume changes the global batch (``--rescale-batch``), so that the schedule continues at the same
    share of the data.
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
        """The highest rate before scaling: what an optimizer is made with."""
        return self.lr / self.scale

    def at(self, step: int) -> float:
        step += self.offset
        floor = min(self.min_lr, self.lr)  # a floor above the peak is none: no rate is raised to it
        if self.name == "onecycle":
            return self._one_cycle(step, floor)
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return max(floor, self._after_warmup(step, floor))

    def _one_cycle(self, step: int, floor: float) -> float:
        """From a 25th of the rate up to it and down to the floor, both as a cosine; as torch's ``OneCycleLR``.

        Smith and Topin 2018, https://arxiv.org/abs/1708.07120; momentum stays as it is.
        """
        top = max(1, self.warmup_steps) - 1
        if step < top:
            return _cosine(self.lr / ONE_CYCLE_START, self.lr, step / top)
        return _cosine(self.lr, floor, min(1.0, (step - top) / max(1, self.total_steps - 1 - top)))

    def _after_warmup(self, step: int, floor: float) -> float:
        done = step - self.warmup_steps
        share = min(1.0, done / max(1, self.total_steps - self.warmup_steps))
        epoch = step / self.steps_per_epoch
        if self.name == "cosine":  # Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts
            return _cosine(self.lr, floor, share)
        if self.name == "poly":
            return float(floor + (self.lr - floor) * (1 - share) ** self.power)
        if self.name == "wsd":  # Hu et al. 2024, https://arxiv.org/abs/2404.06395, with a linear decay
            left = (self.total_steps - step) / (self.decay_share * self.total_steps)
            return floor + (self.lr - floor) * max(0.0, min(1.0, left))
        if self.name == "step":
            return float(self.lr * self.gamma ** math.floor(epoch / self.step_epochs))
        if self.name == "multistep":
            return float(self.lr * self.gamma ** sum(epoch >= milestone for milestone in self.milestones))
        if self.name == "exponential":
            return float(self.lr * self.decay ** (done / self.decay_steps))
        return self.lr


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))


#: Default length of the warm-up, in epochs; and of ``onecycle`` the share of the run in which the rate rises.
WARMUP_EPOCHS, ONE_CYCLE_RISE = 2, 0.3


class Course(NamedTuple):
    """How long a run trains and at which learning rate, with the decisions and the notes on them."""

    epochs: int
    schedule: Schedule
    decisions: tuple[Decision, ...]
    notes: tuple[Note, ...]


def resolve_course(
    config: RunConfig,
    batch: BatchPlan,
    *,
    done: tuple[int, int, int] | None = None,
    own_lr: float | None = None,
    own_schedule: bool = False,
) -> Course:
    """Epochs, optimizer steps and schedule of a run, from what an earlier attempt has left to do.

    Args:
        done: steps, epochs and samples of the running epoch that earlier attempts have done; ``None`` without any.
        own_lr, own_schedule: of the task's own optimizer; whether the task makes a scheduler.
    """
    base_lr = config.optimizer.lr if own_lr is None else own_lr
    base_batch = config.optimizer.base_batch_size or config.training.batch_size
    scaling = config.optimizer.lr_scaling
    rate, notes = scale_lr(base_lr, scaling, global_batch=batch.global_batch, base_batch=base_batch)
    lr = cast(float, rate.value)
    if own_lr is not None:
        own = "the task's own optimizer (its first parameter group)"
        rate = replace(rate, reason=own if lr == base_lr else f"{own}: {rate.reason}")
    epochs, total, offset, reason = _length(config, batch, done)
    sizes = {"total_steps": total + offset, "steps_per_epoch": batch.steps_per_epoch}
    schedule, scheduled = resolve_schedule(config.scheduler, lr=lr, scale=lr / base_lr, offset=offset, **sizes)
    if own_schedule:
        scheduled = [Decision("schedule", "schedule", "task", "the task's scheduler() sets the learning rates")]
    elif not config.debug.fast_dev_run and 0 < schedule.total_steps <= schedule.warmup_steps:
        setting = "--warmup-epochs 0" if config.scheduler.warmup_steps is None else "--set scheduler.warmup_steps=0"
        text = (
            f"Warm-up takes all {schedule.total_steps} steps: the learning rate grows to {schedule.lr:g} at the "
            f"last one, and the schedule never begins. Train longer, or set {setting}."
        )
        notes.append(Note("warmup_unfinished", text))
    return Course(epochs, schedule, (Decision("steps", "steps", total, reason), rate, *scheduled), tuple(notes))


def _length(config: RunConfig, batch: BatchPlan, done: tuple[int, int, int] | None) -> tuple[int, int, int, str]:
    """Epochs, total optimizer steps, the schedule's offset, and the reason."""
    t = config.training
    if config.debug.fast_dev_run:
        return 1, 1, 0, "fast_dev_run: one step"
    per_epoch, offset = batch.steps_per_epoch, 0
    total = t.epochs * per_epoch
    if done is None and config.debug.start_position:
        done = 0, 0, config.debug.start_position
    if done:  # an earlier resume may have changed the global batch, so what is left is counted from here
        step, epoch, position = done
        total = step + batch.steps_left(position) + (t.epochs - epoch - 1) * per_epoch
        offset = t.epochs * per_epoch - total
    reason = f"{t.epochs} epoch{'s' * (t.epochs != 1)} × {per_epoch} step{'s' * (per_epoch != 1)}"
    if t.max_steps is not None and t.max_steps < total:
        epochs = t.epochs if done else -(-t.max_steps // per_epoch)
        return epochs, t.max_steps, offset, f"max_steps, before {reason} are over"
    return t.epochs, total, offset, reason


def scale_lr(
    lr: float, scaling: Literal["none", "linear", "sqrt"], *, global_batch: int, base_batch: int
) -> tuple[Decision, list[Note]]:
    """The peak learning rate, and a note where the user should consider scaling it.

    ``lr`` was tuned for ``base_batch`` samples a step. ``linear``: lr × global / base (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677; for SGD). ``sqrt``: lr × √(global / base) (Krizhevsky 2014,
    https://arxiv.org/abs/1404.5997; for Adam see Malladi et al. 2022, https://arxiv.org/abs/2205.10287).
    """
    ratio, by = global_batch / base_batch, f"{global_batch}/{base_batch}"
    rate = decide(
        "lr",
        (scaling == "linear", lr * ratio, f"{lr:g} × {by} (linear scaling)"),
        (scaling == "sqrt", lr * math.sqrt(ratio), f"{lr:g} × √({by}) (square-root scaling)"),
        (True, lr, "as configured; never changed silently"),
    )
    if scaling != "none" or ratio <= 1:
        return rate, []
    text = (
        f"The global batch is {global_batch}, {ratio:g} × {base_batch}. The learning rate stays {lr:g}; "
        f"linear scaling would set {lr * ratio:g} (--lr-scaling linear), with warm-up."
    )
    return rate, [Note("lr_not_scaled", text)]


def resolve_schedule(
    config: SchedulerConfig, *, lr: float, total_steps: int, steps_per_epoch: int, scale: float = 1.0, offset: int = 0
) -> tuple[Schedule, list[Decision]]:
    given, per_epoch = config.warmup_epochs, f"of {steps_per_epoch} steps"
    usual = min(WARMUP_EPOCHS * steps_per_epoch, total_steps // 10)
    rise = f"onecycle rises for {ONE_CYCLE_RISE:.0%} of the run"
    wanted = decide(
        "warmup",
        (config.warmup_steps is not None, config.warmup_steps, "as configured"),
        (given == 1, steps_per_epoch, f"as configured: 1 epoch {per_epoch}"),
        (given is not None, round((given or 0) * steps_per_epoch), f"as configured: {given or 0:g} epochs {per_epoch}"),
        (config.name == "onecycle", round(ONE_CYCLE_RISE * total_steps), rise),
        (True, usual, f"{WARMUP_EPOCHS} epochs {per_epoch}, at most a tenth of the run"),
    )
    warmup, reason = cast(int, wanted.value), wanted.reason
    if warmup > total_steps:
        warmup, reason = total_steps, f"{reason}; limited to the {total_steps} steps of the run"
    sizes = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch, "warmup_steps": warmup}
    schedule = Schedule(**{**config.model_dump(), **sizes}, lr=lr, scale=scale, offset=offset)
    ends = {
        "wsd": f", constant, then down to {config.min_lr:g} in the last {config.decay_share:.0%}",
        "plateau": f", times {config.gamma:g} after more than {config.patience} evaluations without improvement",
    }
    over = f"as configured, over {total_steps} optimizer steps{ends.get(config.name, '')}"
    return schedule, [
        Decision("schedule", "schedule", config.name, over),
        replace(wanted, value=warmup, reason=reason, shown=many(warmup, "step")),
    ]
