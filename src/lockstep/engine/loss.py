"""Losses of tasks and of sessions: a loss is a sum and a count, and a mean is recognized by its graph."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lockstep._compat.torch import saved
from lockstep.engine.task import Loss, Task
from lockstep.errors import TaskError

_Kind = Literal["mean", "sum", "unknown"]
#: Operations that leave a mean a mean, and a sum a sum. Their names end in ``Backward`` and a number.
_KEEP = frozenset({"ToCopy", "Neg", "Rsub", "Alias", "Clone", "View", "ReshapeAlias", "UnsafeView", "Squeeze"})
_REDUCTIONS: dict[int, _Kind] = {1: "mean", 2: "sum"}
#: A deeper chain of additions is a loop over samples.
_DEPTH = 100


class Term(NamedTuple):
    """A term of a loss: how it was reduced, and what its sum was divided by; ``None``: by nothing, or unknown.

    ``is_weighed``: divided by a sum of weights, or by a number that the loss computed.
    """

    kind: _Kind
    items: Tensor | float | None = None
    is_weighed: bool = False


def is_mean(total: Tensor, count: float) -> bool:
    """Return whether the graph of ``total`` shows a mean over the ``count`` items that it should sum."""
    if count <= 1:
        return False
    kinds = [term.kind for term in terms_of(total, count)]
    # A sum over items of each one's mean has as many terms as items.
    return len(kinds) < count and "mean" in kinds and "sum" not in kinds


def terms_of(total: Tensor, count: float) -> list[Term]:
    """Return the terms of ``total``, a loss of ``count`` items, from its graph; only those with a gradient matter."""
    return [] if total.grad_fn is None else _terms(total.grad_fn, count)


def _terms(node: Any, count: float, depth: int = 0) -> list[Term]:
    """Return the terms of the sum that ``node`` computes."""
    name = node.name().partition("Backward")[0]
    inputs = [before for before, _ in node.next_functions if before is not None]
    if depth > _DEPTH:
        return [Term("sum")]
    reduction = saved(node, "reduction")
    if reduction is not None:
        kind = _REDUCTIONS.get(reduction, "unknown")
        return [Term(kind, *(_divisor(node) if kind == "mean" else ()))]
    if name in ("Add", "Sub"):
        return [term for operand in inputs for term in _terms(operand, count, depth + 1)]
    if name == "Mean":
        reduced = saved(inputs[0], "dim") if inputs[0].name().startswith(("Sum", "Mean")) else None
        if isinstance(reduced, tuple) and 0 in reduced:  # over columns, of sums or means over rows
            return [Term("unknown")]
        items = math.prod(saved(node, "self_sym_sizes"))
        return [Term("mean" if items >= count else "unknown", items)]
    if name == "Sum":  # over columns, of means over rows, or over rows
        return [Term("unknown" if inputs[0].name().startswith("Mean") else "sum")]
    if len(inputs) != 1 or name not in ("Mul", "Div", *_KEEP):
        return [Term("unknown")]
    terms = _terms(inputs[0], count, depth + 1)
    if name in _KEEP:
        return terms
    factor = _constant(node)
    if name == "Div" and factor is not None and [term.kind for term in terms] == ["sum"]:
        return [Term("mean" if factor == count else "unknown", float(factor), is_weighed=True)]
    if name == "Div" and factor is not None and isinstance(saved(node, "other"), Tensor) and terms == [Term("unknown")]:
        return [Term("unknown", factor, is_weighed=True)]
    shrinks = factor is not None and (abs(factor) <= 1 if name == "Mul" else abs(factor) >= 1)
    if shrinks and all(term.kind != "sum" for term in terms):
        return terms
    return [term._replace(kind="unknown") for term in terms]


def _divisor(node: Any) -> tuple[Tensor | float | None, bool]:
    """Return the divisor of a loss of torch with ``reduction="mean"``, and whether it is a sum of weights."""
    values = saved(node, "self")
    target = saved(node, "target")
    ignored = saved(node, "ignore_index")
    if ignored is None:
        return (values.numel() if isinstance(values, Tensor) else None), False
    counted = target != (ignored + 2**63) % 2**64 - 2**63  # kept as a number without a sign
    weight = saved(node, "weight")
    # In single precision: the sum that torch has saved is of the type of the values.
    return (counted.sum() if weight is None else weight.float()[target[counted]].sum()), True


def _constant(node: Any) -> float | None:
    """Return the number that ``node`` multiplies with, or divides by."""
    for value in (saved(node, "other"), saved(node, "self")):
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            return float(value)
    return None


def check_loss(loss: Any) -> Loss:
    """Convert the value of ``Task.loss()`` to a :class:`Loss` with a scalar total. Raises :class:`TaskError`."""
    fix = "return Loss(total, count): F.cross_entropy(…, reduction='sum') and the number of items"
    if not isinstance(loss, tuple) or len(loss) != 2:
        raise TaskError(f"loss() returned a {type(loss).__name__}, not a lockstep.Loss(total, count)", fix=fix)
    total, count = loss
    if not isinstance(total, Tensor):
        reason = f"it is a {type(total).__name__}"
        if isinstance(total, int | float):
            reason += ", which has no gradient, as after .item()"
            fix = "return the tensor itself as the total"
        raise TaskError("the task's loss total is not a tensor", why=reason, fix=fix)
    _check_count(count, "the task's loss count", fix)
    return Loss(summed(total) if total.dim() else total, count)


def _check_count(count: Any, source: str, fix: str) -> None:
    """Raise :class:`TaskError` unless ``count``, which ``source`` is, has one element."""
    if isinstance(count, Tensor) and count.numel() != 1:
        raise TaskError(f"{source} is not one number", why=f"its shape is {tuple(count.shape)}", fix=fix)


def summed(values: Tensor) -> Tensor:
    """Sum one value per item in single precision at least: sums in half precision soon leave its range."""
    return (values.float() if values.itemsize < 4 else values).sum()


def refuse_mean(total: Tensor, count: float, fix: str) -> None:
    """Raise :class:`TaskError` where ``total`` is a mean over ``count`` items, or the count is negative."""
    if not count >= 0:
        raise TaskError(
            f"the count of the loss is {count:g}",
            why="the gradient is divided by it, so it must be the number of items, or the sum of weights from 0 up",
            fix="give a count of at least 0",
        )
    if is_mean(total, count):
        raise TaskError(
            f"the total of the loss is a mean, and its count is {count:g}",
            why=f"the total is divided by its count, so gradients would be {count:g} times too small",
            fix=fix,
        )


_FIX_OF_MEAN = (
    "use reduction='sum', or multiply: Loss(mean * count, count); a mean of equal weight for each micro-batch is "
    "Loss(mean, 1)"
)


class CheckedLoss:
    """A task's loss, checked on the first batch; a count may have the shape (1,). ``mode``: of ``torch.compile``."""

    def __init__(self, task: Task, mode: str | None = None) -> None:
        self._loss = task.loss if mode is None else torch.compile(task.loss, mode=mode)
        self._is_checked = False

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        loss = self._loss(model, batch)
        if not self._is_checked:
            checked = check_loss(loss)
            refuse_mean(checked.total, float(checked.count), _FIX_OF_MEAN)
            self._is_checked = True
        total, count = loss
        if total.dim():
            total = summed(total)
        if isinstance(count, Tensor) and count.dim():
            count = count.reshape(())
        return Loss(total, count)


def without_count(total: Tensor, count: Tensor | int) -> tuple[Tensor, Tensor | int]:
    """Return a loss of 0 for 0 items, with gradients of 0, for a batch that replaces one without readable samples."""
    total = total.where(torch.zeros_like(total, dtype=torch.bool), torch.zeros_like(total))
    return total, torch.zeros_like(count) if isinstance(count, Tensor) else 0


def checked_sum(total: Any, count: Any, weight: Any, samples: int | None) -> tuple[Tensor, Any]:
    """Return the sum and the count of a backward call of :class:`lockstep.Session`.

    Args:
        samples: of this rank's batch, to look for a mean in place of a sum in the graph; ``None``: do not look.

    Raises:
        TaskError: anything but a sum of losses with a count, or a mean with a weight.
    """
    if not isinstance(total, Tensor) or total.dim() or not total.requires_grad:
        reason = f"it is a {type(total).__name__}"
        if isinstance(total, Tensor):
            reason = f"its shape is {tuple(total.shape)}" if total.dim() else "nothing in it requires a gradient"
        raise TaskError(
            "backward() needs a sum of losses, a tensor of shape () with a gradient",
            why=reason,
            fix="session.backward(F.cross_entropy(output, target, reduction='sum'), count=len(target))",
        )
    if (count is None) == (weight is None):
        raise TaskError(
            "backward() needs either count or weight",
            why="gradients are divided by the items of all ranks and micro-batches, so that none counts more",
            fix="count=len(batch) beside a sum of losses; weight=len(batch) beside a mean",
        )
    items = weight if count is None else count
    _check_count(items, "the count of backward()", "count=mask.sum(), for example")
    total = total.float() if total.itemsize < 4 else total  # before a mean is multiplied
    items = items.detach().reshape(()) if isinstance(items, Tensor) else float(items)
    if samples is not None:
        _check_denominator(total, float(items), samples, is_sum=weight is None)
    return (total, items) if weight is None else (total * items, items)


def _check_denominator(total: Tensor, items: float, samples: int, *, is_sum: bool) -> None:
    """Raise :class:`TaskError` where the graph of ``total`` shows a mean beside a count, or a mean has no weight."""
    if not is_sum and not items and bool(total.detach().abs() > 0):
        raise TaskError(
            "backward() was given weight=0",
            why="a mean is multiplied by its weight, so this one would have no gradient",
            fix="add the mean to the first one before backward(), or call session.backward(mean * n, count=0) for "
            "a second mean of the same n samples",
        )
    if is_sum:
        fix = "use reduction='sum'; or weight= in place of count=, if it is a mean by nature"
        refuse_mean(total, items, fix)
    if is_sum and items == 1 and is_mean(total, samples):
        raise TaskError(
            f"the loss is a mean of {samples} samples, and its count is 1",
            why="batches of different sizes would weigh the same: the last one of an epoch, and the parts of ranks",
            fix="count the samples: reduction='sum' with count=len(batch), or weight=len(batch) beside the mean",
        )
