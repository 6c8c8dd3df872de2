"""The optimizer that a task would train with, made on trial."""

from __future__ import annotations

import torch
from torch import nn

from lockstep._compat.torch import compiler_not_imported
from lockstep.config import RunConfig
from lockstep.engine.blueprint import blueprint, trial_of
from lockstep.engine.generators import generators_kept
from lockstep.engine.optim.optimizers import build_optimizer, check_optimizer
from lockstep.engine.optim.rates import scheduler_of
from lockstep.engine.task import Task
from lockstep.engine.trained import bare, build_model


def check_configured_optimizer(task: Task, config: RunConfig) -> None:
    """Raise a rank's error if the configured optimizer cannot be made for the task's model."""
    settings = config.optimizer
    if settings.name not in ("adamw", "adam", "sgd") or settings.options:
        with compiler_not_imported():
            build_optimizer(settings, blueprint(task), settings.lr)


def optimizer_facts(task: Task, model: nn.Module, untried: Task) -> tuple[float | None, bool]:
    """Return the learning rate of the task's optimizer, if it makes one, and whether it has a scheduler.

    ``model`` of ``task`` may be without its memory; ``model()`` of ``untried`` has not been called.
    """
    if type(task).optimizer is Task.optimizer and type(task).scheduler is Task.scheduler:
        return None, False
    with generators_kept(), compiler_not_imported():
        try:
            optimizer = task.optimizer(bare(model))
        except Exception:  # it may need values, or a real device; if not, it fails again
            task = trial_of(untried)
            model = build_model(task)
            optimizer = task.optimizer(bare(model))
        if optimizer is None:
            return None, scheduler_of(task, torch.optim.SGD(model.parameters(), lr=1.0)) is not None
        check_optimizer(optimizer, model)
        lr = next((float(group["lr"]) for group in optimizer.param_groups if group["lr"]), None)
        return lr, scheduler_of(task, optimizer) is not None
