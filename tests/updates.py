"""Updates of a model without a task."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.engine.optim.precision import Precision
from lockstep.engine.optim.rates import Rates
from lockstep.engine.optim.step import Update
from lockstep.planning import Schedule


def update_for_model(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Schedule | None,
    precision: Precision,
    max_norm: float | None,
    divided: Any = None,
    **rates: Any,
) -> Update:
    """The update of all parameters of ``model``; ``rates``: further arguments of :class:`.Rates`."""
    named = dict(model.named_parameters())
    return Update(named, optimizer, Rates(optimizer, schedule, named, **rates), precision, max_norm, divided)
