"""The learning rates of a run: its schedule, or a scheduler of the task or of the loop, and when each steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep._compat.torch import note_step
from lockstep.engine.optim.optimizers import check_belongs
from lockstep.engine.task import Scheduler, Task
from lockstep.errors import TaskError, many
from lockstep.planning import Schedule


class Rates:
    """Sets the learning rates of all groups of an optimizer.

    Args:
        optimizer: made with the rates before scaling.
        schedule: of the run. Without it and ``scheduler`` the caller sets the rates.
        named: parameters that groups may have.
        scheduler: used instead of ``schedule``.
        mode: whether the monitored metric is best at its ``min`` or ``max``, for schedule ``plateau``.

    Attributes:
        lr: of the first group that has a rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule | None,
        named: Mapping[str, nn.Parameter],
        *,
        scheduler: Scheduler | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._scheduler = scheduler
        self._named = named
        #: Of a factor by which the schedule's rate is multiplied.
        self._plateau: ReduceLROnPlateau | None = None
        if schedule is not None and schedule.name == "plateau" and scheduler is None:
            factor = SGD([torch.zeros(1)], lr=1.0)
            lowest = min(1.0, schedule.min_lr / schedule.lr)
            self._plateau = ReduceLROnPlateau(factor, mode, schedule.gamma, schedule.patience, min_lr=lowest)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._groups = len(optimizer.param_groups)
        self._shown = next((n for n, group in enumerate(optimizer.param_groups) if group["initial_lr"]), 0)
        self._check_steps()
        self.set(0)

    def _check_steps(self) -> None:
        if self._scheduler is not None and self._schedule is not None:
            check_steps(self._scheduler, self._schedule)

    def set(self, step: int) -> None:
        """Set the rates of the step that follows ``step`` finished ones."""
        groups = self._optimizer.param_groups
        if len(groups) != self._groups:
            self._adopt_groups()
        if self._scheduler is None and self._schedule is not None:
            lr = self._schedule.at(step)
            lr = lr if self._plateau is None else lr * self._plateau.optimizer.param_groups[0]["lr"]
            for group in groups:
                group["lr"] = lr * (group["initial_lr"] / self._schedule.base_lr)
        self.lr = float(groups[self._shown]["lr"])

    def _adopt_groups(self) -> None:
        """Train groups that a hook has added; their learning rate is one before scaling, as in all groups."""
        check_belongs(self._optimizer, self._named)
        if self._scheduler is not None:
            raise TaskError(
                "a parameter group was added to an optimizer whose scheduler has one rate for each group before",
                fix="make all groups in Task.optimizer(); frozen parameters in them are left alone until unfrozen",
            )
        for group in self._optimizer.param_groups[self._groups :]:
            group.setdefault("initial_lr", group["lr"])
        self._groups = len(self._optimizer.param_groups)

    def advance(self, interval: Literal["step", "epoch", "metric"], *value: float) -> None:
        """Step what steps by ``interval``; ``value``: of the monitored metric, the same on every rank."""
        if interval == "metric" and self._plateau is not None:
            self._plateau.step(*value)
        if self._scheduler is not None and self._scheduler.interval == interval:
            advance(self._scheduler, *value)

    def state_dict(self) -> dict[str, Any]:
        plateau = self._plateau
        plateau_state = None
        if plateau is not None:
            factor = float(plateau.optimizer.param_groups[0]["lr"])
            plateau_state = {"factor": factor, "best": float(plateau.best), "bad": plateau.num_bad_epochs}
        scheduler = None if self._scheduler is None else self._scheduler.scheduler.state_dict()
        return {"scheduler": scheduler, "plateau": plateau_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore ``state``, when the groups are restored; returns whether their rates stay as they are now."""
        scheduler = state.get("scheduler")
        plateau = state.get("plateau")
        if self._plateau is not None and plateau is not None:
            self._plateau.optimizer.param_groups[0]["lr"] = plateau["factor"]
            self._plateau.best = plateau["best"]
            self._plateau.num_bad_epochs = plateau["bad"]
        self._groups = len(self._optimizer.param_groups)
        if scheduler is None or self._scheduler is None:
            return False
        self._scheduler.scheduler.load_state_dict(scheduler)
        self._check_steps()  # its number of steps is that of the checkpoint now
        return True


def scheduler_of(task: Task, optimizer: Optimizer) -> Scheduler | None:
    """Return the task's scheduler of ``optimizer``, if it has one."""
    made = task.scheduler(optimizer)
    if made is None:
        return None
    by_metric = isinstance(made, ReduceLROnPlateau)
    scheduler = made if isinstance(made, Scheduler) else Scheduler(made, "metric" if by_metric else "step")
    kind = type(scheduler.scheduler).__name__
    if not isinstance(scheduler.scheduler, LRScheduler) or scheduler.interval not in ("step", "epoch", "metric"):
        raise TaskError(
            "the task's scheduler() did not return a scheduler",
            why=f"it returned {type(made).__name__}, of {kind} and {scheduler.interval!r}",
            fix="return one of torch.optim.lr_scheduler, or lockstep.Scheduler(one, 'step', 'epoch' or 'metric')",
        )
    if isinstance(scheduler.scheduler, ReduceLROnPlateau) != (scheduler.interval == "metric"):
        raise TaskError(
            f"the task's scheduler() returned a {kind} that steps by {scheduler.interval}",
            why="ReduceLROnPlateau steps by a metric, and no other scheduler does",
            fix="return it without lockstep.Scheduler" if scheduler.interval != "metric" else "use 'step' or 'epoch'",
        )
    note_step(optimizer)
    return scheduler


def check_steps(scheduler: Scheduler, schedule: Schedule) -> None:
    """Raise :class:`TaskError` where a scheduler made for a number of steps, as ``OneCycleLR``, is for too few."""
    limit = getattr(scheduler.scheduler, "total_steps", None)
    epochs = math.ceil(schedule.total_steps / schedule.steps_per_epoch)
    steps = {"step": schedule.total_steps, "epoch": epochs}.get(scheduler.interval, 0)
    if isinstance(limit, int) and steps > limit:
        unit = "optimizer step" if scheduler.interval == "step" else "epoch"
        raise TaskError(
            f"the scheduler {type(scheduler.scheduler).__name__} is made for {many(limit, unit)}, the run has {steps}",
            why="it raises an error when it is stepped more often",
            fix=f"make it in Task.scheduler() with total_steps={steps}, or train for fewer steps (training.max_steps, "
            "training.epochs); a resumed run has the number of its checkpoint",
        )


def advance(scheduler: Scheduler, *value: float) -> None:
    """Step a scheduler. Raises :class:`TaskError` if that fails, as for one that has no steps left."""
    try:
        cast(Any, scheduler.scheduler).step(*value)
    except Exception as error:
        raise TaskError(
            f"the scheduler {type(scheduler.scheduler).__name__} failed in its step {scheduler.scheduler.last_epoch}",
            why=f"{type(error).__name__}: {error}",
            fix=f"make it for all steps of the run; it steps by {scheduler.interval}",
        ) from error
