"""Inputs of a model, with which its program is exported."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep._compat.torch import tree_map
from lockstep.config import RunConfig
from lockstep.data.requests import fetch
from lockstep.engine.reopened import as_restored
from lockstep.engine.task import Task
from lockstep.engine.training_data import open_data
from lockstep.errors import DataError

#: Positional and named arguments of ``forward()``.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def watched_inputs(task: Task, model: nn.Module, config: RunConfig) -> Inputs:
    """Record the inputs that a restored task passes to ``model.forward()`` for a small batch.

    Raises:
        DataError: the task's evaluation does not call the model itself.
    """
    datasets = as_restored(task, config, open_data(task, config))
    batch = fetch(datasets.train, task.collate, 0, 0, np.arange(min(2, len(datasets.train)), dtype=np.int64))
    calls: list[Inputs] = []
    handle = model.register_forward_pre_hook(lambda _, *inputs: calls.append(inputs), with_kwargs=True)
    try:
        with torch.inference_mode():
            task.evaluate(model, batch)
            if not calls:  # it may have no evaluate()
                task.loss(model, batch)
    finally:
        handle.remove()
    if not calls:
        raise DataError(
            "neither evaluate() nor loss() of the task calls the model itself, so there is no program to export",
            fix="export the weights alone (--no-program)",
        )
    # Tensors made in inference mode cannot be traced.
    args, kwargs = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, calls[0])
    return args, kwargs
