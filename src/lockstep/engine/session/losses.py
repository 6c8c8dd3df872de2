"""Checks of what a loop passes to ``backward``: a sum of losses, and how many items it sums."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.engine.strategies.losses import is_mean
from lockstep.errors import TaskError


def checked_loss(total: Any, count: Any, weight: Any, samples: int, *, checks: bool) -> tuple[Tensor, Tensor | float]:
    """Total and count of a backward call.

    Args:
        samples: of this rank's batch.
        checks: whether to look at the value and its graph: for a mean in place of a sum, or one that weighs nothing.

    Raises:
        TaskError: see :meth:`lockstep.Session.backward`.
    """
    if not isinstance(total, Tensor) or total.dim() or not total.requires_grad:
        why = f"it is a {type(total).__name__}"
        if isinstance(total, Tensor):
            why = f"its shape is {tuple(total.shape)}" if total.dim() else "nothing in it requires a gradient"
        raise TaskError(
            "backward() needs a sum of losses, a tensor of shape () with a gradient",
            why=why,
            fix="session.backward(F.cross_entropy(output, target, reduction='sum'), count=len(target))",
        )
    if (count is None) == (weight is None):
        raise TaskError(
            "backward() needs either count or weight",
            why="gradients are divided by the items of all ranks and micro-batches, so that none counts more",
            fix="count=len(batch) beside a sum of losses; weight=len(batch) beside a mean",
        )
    items = _number(weight if count is None else count)
    if count is None:
        if checks and not items and bool(total.detach().abs() > 0):
            raise TaskError(
                "backward() was given weight=0",
                why="a mean is multiplied by its weight, so this one would have no gradient",
                fix="add the mean to the first one before backward(), or call session.backward(mean * n, count=0) for "
                "a second mean of the same n samples",
            )
        return total * items, items
    if checks:
        _refuse_mean(total, float(items), samples)
    return total, items


def _number(value: Any) -> Any:
    """A number, or a tensor of shape ()."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise TaskError(
                "the count of backward() is not one number",
                why=f"its shape is {tuple(value.shape)}",
                fix="count=mask.sum(), for example",
            )
        return value.detach().reshape(())
    return float(value)


def _refuse_mean(total: Tensor, count: float, samples: int) -> None:
    if is_mean(total, count):
        raise TaskError(
            f"the loss is a mean, and its count is {count:g}",
            why=f"a sum is divided by its count, so the gradient would be 1/{count:g} of that of the mean",
            fix="use reduction='sum'; or weight= in place of count=, if it is a mean by nature",
        )
    if count == 1 and samples > 1 and is_mean(total, samples):
        raise TaskError(
            f"the loss is a mean of {samples} samples, and its count is 1",
            why="batches of different sizes would weigh the same: the last one of an epoch, and the parts of ranks",
            fix="count the samples: reduction='sum' with count=len(batch), or weight=len(batch) beside the mean",
        )
