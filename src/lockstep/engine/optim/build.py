"""The update of a run: the task's optimizer and scheduler, or those that the run configures."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep._compat.torch import compiler_not_imported
from lockstep.config import RunConfig
from lockstep.engine.optim.groups import check_optimizer, check_sparse, untrained
from lockstep.engine.optim.precision import Precision
from lockstep.engine.optim.step import Update, build_optimizer, scheduler_of
from lockstep.engine.strategies.partition import Divided
from lockstep.engine.task import Scheduler, Task
from lockstep.engine.trained import bare
from lockstep.errors import TaskError
from lockstep.planning import Plan


def build_update(
    task: Task,
    model: nn.Module,
    config: RunConfig,
    plan: Plan,
    device: torch.device,
    divided: Divided | None,
    *,
    validates: bool,
) -> Update:
    """The update of ``model``, which is on its device.

    Raises:
        TaskError, UnsupportedError: the task's optimizer cannot train the model, or its scheduler needs evaluations
            and the run has none (``validates``).
    """
    optimizer, scheduler = _optimizer(task, model, config, plan)
    if scheduler is not None and scheduler.interval == "metric" and not validates:
        raise TaskError(
            "the task's scheduler steps by a metric, and there is no validation data",
            why="the monitored metric is computed at evaluations",
            fix="return validation data from datasets(), or a scheduler that steps by step or epoch",
        )
    if divided is not None:
        divided.adopt(optimizer)
    precision = Precision(plan.placement["precision"], device, plan.pre_scale)
    max_norm = config.training.max_grad_norm
    return Update(model, optimizer, plan.schedule, precision, max_norm, divided, scheduler)


def _optimizer(task: Task, model: nn.Module, config: RunConfig, plan: Plan) -> tuple[Optimizer, Scheduler | None]:
    with compiler_not_imported():
        own = task.optimizer(bare(model))
        optimizer = own or build_optimizer(config.optimizer, model, plan.schedule.base_lr)
    check_optimizer(optimizer, model)
    check_sparse(model, reduced=not plan.strategy.one_process or plan.reproducibility == "exact")
    if type(task).scheduler is not Task.scheduler:
        for group in optimizer.param_groups:
            group["lr"] *= plan.schedule.scale
    return optimizer, scheduler_of(task, optimizer)


def untrained_note(update: Update, model: nn.Module, max_norm: float | None) -> str | None:
    """A note where parameters of ``model`` are in no group of the optimizer."""
    names = untrained(update.optimizer, model)
    if not names:
        return None
    some = ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
    clipped = "" if max_norm is None else "; their gradients count in the norm that training.max_grad_norm limits"
    return f"{len(names)} parameter(s) are in no group of the optimizer and not trained: {some}{clipped}"
