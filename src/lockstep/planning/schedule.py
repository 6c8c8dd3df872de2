"""Learning rate as a pure function of the optimizer step.

Every schedule begins with a linear warm-up whose first step already runs at ``lr / warmup_steps``, not
at zero (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 2.2), and never falls below ``min_lr``.
Steps are those of the plan. Since a resume holds the global batch, the same step has seen the same
number of samples on any devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from lockstep.config import SchedulerConfig
from lockstep.events import Note
from lockstep.planning.decision import Decision, Frozen

#: Default length of the warm-up, in epochs.
WARMUP_EPOCHS = 2
#: Of ``onecycle``: the share of the run in which the rate rises, and what it is divided by at the start.
ONE_CYCLE_RISE, ONE_CYCLE_START = 0.3, 25.0


class Schedule(Frozen):
    """``at(step)`` gives the learning rate of the step that follows ``step`` finished ones.

    ``lr`` is the highest one, in which ``scale`` is what scaling by the batch multiplied it by.

    ``offset`` moves the origin when a resume changes the global batch (``--rescale-batch``), so that
    the schedule continues at the same share of the data.
    """

    name: Literal["cosine", "step", "multistep", "poly", "exponential", "constant", "wsd", "onecycle", "plateau"]
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
        if self.name == "onecycle":
            return self._one_cycle(step)
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return max(self._floor, self._after_warmup(step))

    def _one_cycle(self, step: int) -> float:
        """From a 25th of the rate up to it and down to the floor, both as a cosine; as torch's ``OneCycleLR``.

        Smith and Topin 2018, https://arxiv.org/abs/1708.07120; momentum stays as it is.
        """
        top = max(1, self.warmup_steps) - 1
        start, end = (self.lr / ONE_CYCLE_START, self.lr) if step < top else (self.lr, self._floor)
        share = step / top if step < top else min(1.0, (step - top) / max(1, self.total_steps - 1 - top))
        return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))

    @property
    def _floor(self) -> float:
        """A floor above the peak is none: no rate is raised to it."""
        return min(self.min_lr, self.lr)

    def _after_warmup(self, step: int) -> float:
        done = step - self.warmup_steps
        share = min(1.0, done / max(1, self.total_steps - self.warmup_steps))
        epoch = step / self.steps_per_epoch
        if self.name == "cosine":  # Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts
            return self._floor + (self.lr - self._floor) * 0.5 * (1 + math.cos(math.pi * share))
        if self.name == "poly":
            return float(self._floor + (self.lr - self._floor) * (1 - share) ** self.power)
        if self.name == "wsd":  # Hu et al. 2024, https://arxiv.org/abs/2404.06395, with a linear decay
            left = (self.total_steps - step) / (self.decay_share * self.total_steps)
            return self._floor + (self.lr - self._floor) * max(0.0, min(1.0, left))
        if self.name == "step":
            return float(self.lr * self.gamma ** math.floor(epoch / self.step_epochs))
        if self.name == "multistep":
            return float(self.lr * self.gamma ** sum(epoch >= milestone for milestone in self.milestones))
        if self.name == "exponential":
            return float(self.lr * self.decay ** (done / self.decay_steps))
        return self.lr


def resolve_schedule(
    config: SchedulerConfig, *, lr: float, total_steps: int, steps_per_epoch: int, scale: float = 1.0, offset: int = 0
) -> tuple[Schedule, list[Decision]]:
    """The schedule of a run, and the decisions about it and its warm-up."""
    if config.warmup_steps is not None:
        warmup, reason = config.warmup_steps, "as configured"
    elif config.warmup_epochs is None and config.name == "onecycle":
        warmup, reason = round(ONE_CYCLE_RISE * total_steps), f"onecycle rises for {ONE_CYCLE_RISE:.0%} of the run"
    elif config.warmup_epochs is None:
        warmup = min(round(WARMUP_EPOCHS * steps_per_epoch), total_steps // 10)
        reason = f"{WARMUP_EPOCHS} epochs of {steps_per_epoch} steps, at most a tenth of the run"
    else:
        warmup = round(config.warmup_epochs * steps_per_epoch)
        epochs = f"{config.warmup_epochs:g} epoch{'s' * (config.warmup_epochs != 1)}"
        reason = f"as configured: {epochs} of {steps_per_epoch} steps"
    if warmup > total_steps:
        warmup, reason = total_steps, f"{reason}; limited to the {total_steps} steps of the run"
    sizes = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch, "warmup_steps": warmup}
    schedule = Schedule(**{**config.model_dump(), **sizes}, lr=lr, scale=scale, offset=offset)
    reason_of = {
        "wsd": f", constant, then down to {config.min_lr:g} in the last {config.decay_share:.0%}",
        "plateau": f", times {config.gamma:g} after more than {config.patience} evaluations without improvement",
    }
    over = f"as configured, over {total_steps} optimizer steps{reason_of.get(config.name, '')}"
    return schedule, [
        Decision("schedule", "schedule", config.name, over),
        Decision("warmup", "warm-up", warmup, reason, f"{warmup} step" + "s" * (warmup != 1)),
    ]


def warmup_notes(schedule: Schedule, config: SchedulerConfig) -> Iterator[Note]:
    """A note for a run that ends before its warm-up does."""
    if not 0 < schedule.total_steps <= schedule.warmup_steps:
        return
    setting = "--warmup-epochs 0" if config.warmup_steps is None else "--set scheduler.warmup_steps=0"
    yield Note(
        "warmup_unfinished",
        f"Warm-up takes all {schedule.total_steps} steps: the learning rate grows to {schedule.lr:g} at the "
        f"last one, and the schedule never begins. Train longer, or set {setting}.",
    )
