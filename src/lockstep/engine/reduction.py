"""Whether a loss is a mean that should be a sum, by the last operations of its graph."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from lockstep._compat.torch import saved

_Kind = Literal["mean", "sum", "unknown"]
#: Operations that leave a mean a mean, and a sum a sum. Their names end in ``Backward`` and a number.
_KEEP = frozenset({"ToCopy", "Neg", "Rsub", "Alias", "Clone", "View", "ReshapeAlias", "UnsafeView", "Squeeze"})
_REDUCTIONS: dict[int, _Kind] = {1: "mean", 2: "sum"}
#: A deeper chain of additions is a loop over samples.
_DEPTH = 100


def is_mean(total: Tensor, count: float) -> bool:
    """Whether ``total`` averages over the ``count`` items that it should sum; false where that is not clear.

    Nothing is computed: a loss that is evaluated once more may draw random numbers, or count its calls.
    """
    if count <= 1 or total.grad_fn is None:
        return False
    terms = _terms(total.grad_fn, count)
    # A sum over items of each one's mean has as many terms as items.
    return len(terms) < count and "mean" in terms and "sum" not in terms


def _terms(node: Any, count: float, depth: int = 0) -> list[_Kind]:
    """How each term of the sum that ``node`` computes was reduced; terms without a gradient do not matter."""
    name = node.name().partition("Backward")[0]
    inputs = [before for before, _ in node.next_functions if before is not None]
    if depth > _DEPTH:
        return ["sum"]
    reduction = saved(node, "reduction")
    if reduction is not None:
        return [_REDUCTIONS.get(reduction, "unknown")]
    if name in ("Add", "Sub"):
        return [kind for one in inputs for kind in _terms(one, count, depth + 1)]
    if name == "Mean":
        summed = saved(inputs[0], "dim") if inputs[0].name().startswith("Sum") else None
        per_item = isinstance(summed, tuple) and 0 in summed
        over_items = math.prod(saved(node, "self_sym_sizes")) >= count and not per_item
        return ["mean" if over_items else "unknown"]
    if name == "Sum":
        return ["sum"]
    if len(inputs) != 1 or name not in ("Mul", "Div", *_KEEP):
        return ["unknown"]
    kinds = _terms(inputs[0], count, depth + 1)
    if name in _KEEP:
        return kinds
    factor = _constant(node)
    if name == "Div" and factor == count and kinds == ["sum"]:
        return ["mean"]
    shrinks = factor is not None and (abs(factor) <= 1 if name == "Mul" else abs(factor) >= 1)
    return kinds if shrinks and "sum" not in kinds else ["unknown"]


def _constant(node: Any) -> float | None:
    """The number that ``node`` multiplies with, or divides by."""
    for value in (saved(node, "other"), saved(node, "self")):
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            return float(value)
    return None
