"""Learning rate as a pure function of the optimizer step.

Every schedule begins with a linear warm-up whose first step already runs at ``lr / warmup_steps``, not at zero (Goyal
et al. 2017, https://arxiv.org/abs/1706.02677, section 2.2), and never falls below ``min_lr``. Since a resume holds the
global batch, the same step has seen the same number of samples on any devices.
"""

from __future__ import annotations

import math

from lockstep.config.sections import ScheduleName
from lockstep.planning.decision import Frozen

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
