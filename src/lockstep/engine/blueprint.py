"""A task's model without its memory, from a copy of the task."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.engine.generators import generators_kept
from lockstep.engine.task import Task
from lockstep.engine.trained import build_model
from lockstep.errors import TaskError, UnsupportedError


def blueprint(task: Task) -> nn.Module:
    """Make the model without its memory where possible: many models can be built on the meta device."""
    return on_meta(trial_of(task))


def trial_of(task: Task) -> Task:
    """Copy ``task`` for a trial of its ``model()``: layers that it keeps in attributes would stay without memory.

    Containers are copied too, since a layer may be kept in one; their contents are shared.
    """
    trial = copy.copy(task)
    for name, value in vars(task).items():
        if type(value) in (list, dict, set):
            setattr(trial, name, copy.copy(value))
    return trial


def on_meta(task: Task) -> nn.Module:
    before = dict(vars(trial_of(task)))
    model = None
    with generators_kept():
        with contextlib.suppress(Exception), torch.device("meta"):  # it may need values; if not, it fails again
            model = build_model(task)
        if model is None:  # only now: the first try's files and locks are closed with its frames
            vars(task).clear()
            vars(task).update(before)
            model = build_model(task)
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UnsupportedError(
            f"the parameter {lazy[0]} of a lazy module has no shape yet",
            fix="call the model once with a small batch in the task's model(), or name the number of input features",
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise TaskError("the model has no trainable parameters", fix="leave requires_grad on for some parameters")
    return model
