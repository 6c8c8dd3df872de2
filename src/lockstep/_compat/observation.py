"""Private names of torch through which `lockstep audit` observes a script: iterators of loaders, graphs of losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep._compat import missing
from lockstep._compat.torch import saved

try:
    from torch.utils.data._utils.fetch import _MapDatasetFetcher as MapFetcher
    from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator
except ImportError as error:
    raise missing("torch", error) from None

__all__ = ["NEXT_INDEX", "RESET", "LoaderIterator", "MapFetcher", "is_shard", "loss_term"]

#: Methods of :class:`LoaderIterator`: the indices of the next batch, and the start of another epoch.
NEXT_INDEX = "_next_index"
RESET = "_reset"

#: Loss functions with a ``reduction``; ``numel`` of the input is their count.
_ELEMENTWISE = ("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_MEAN = 1
_SUM = 2


def is_shard(parameter: Tensor) -> bool:
    """Return whether a parameter is a part of one, of FSDP or tensor parallelism."""
    return hasattr(parameter, "placements") or hasattr(parameter, "_fsdp_flattened")


def loss_term(loss: Tensor) -> tuple[float | None, float, str] | None:
    """Read how a loss was reduced from its graph.

    Returns the constant factor of the reduced loss (``None``: unknown), the number of elements and ``mean`` or ``sum``;
    ``None``: the loss is not one reduction, multiplied or divided by constants.
    """
    return _term(loss.grad_fn, 0)


def _term(node: Any, output: int) -> tuple[float | None, float, str] | None:
    """Read ``output`` of ``node``; see :func:`loss_term`."""
    factor = 1.0
    while node is not None:
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if name in ("Mul", "Div"):
            constant = saved(node, "other")
            branches = [branch for branch in node.next_functions if branch[0] is not None]
            value = constant.item() if isinstance(constant, Tensor) and constant.numel() == 1 else constant
            if len(branches) != 1 or not isinstance(value, int | float) or not value:
                return None
            factor = factor * value if name == "Mul" else factor / value
            node, output = branches[0]
        elif name in ("ToCopy", "Clone", "View", "Squeeze"):
            node, output = node.next_functions[0]
        elif name == "_DDPSink":  # DistributedDataParallel passes the outputs of its module through it
            node, output = node.next_functions[output]
        elif name == "Add":
            return _equal_terms(node)
        else:
            reduced = _reduction(node, name)
            return reduced and (factor, *reduced)
    return None


def _equal_terms(node: Any) -> tuple[float | None, float, str] | None:
    """Read the sum of two losses, each a mean over equally many elements, as label smoothing makes it."""
    terms = [_term(function, output) for function, output in node.next_functions]
    if None in terms or len({term[1:] for term in terms if term}) != 1:
        return None
    assert terms[0] is not None
    return (None, *terms[0][1:]) if terms[0][2] == "mean" else None


def _reduction(node: Any, name: str) -> tuple[float, str] | None:
    if name in ("Mean", "Sum"):
        sizes = saved(node, "self_sym_sizes")
        return (float(torch.Size(sizes).numel()), name.lower()) if sizes is not None else None
    kind = {_MEAN: "mean", _SUM: "sum"}.get(saved(node, "reduction"))
    if kind is None:
        return None
    if name in ("NllLoss", "NllLoss2D", "NllLoss2d"):
        total = saved(node, "total_weight")
        return None if total is None else (float(total), kind)
    values = saved(node, "self")
    return (float(values.numel()), kind) if name in _ELEMENTWISE and values is not None else None
