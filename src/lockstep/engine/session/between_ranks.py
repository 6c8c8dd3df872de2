"""Tensors of all ranks with a gradient: for losses over the whole batch, as in contrastive learning."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.data.arrays import as_bytes
from lockstep.engine.distributed.staging import all_gather_rows, all_reduce
from lockstep.errors import CollectiveError


def gather_rows(tensor: Tensor, *, counts: bool) -> Tensor:
    """Concatenate the rows of all ranks in rank order: [n_r, ...] → [Σ n_r, ...]. Collective, as is its backward.

    The gradient of a rank's rows is the sum over the losses of all ranks.

    Args:
        counts: whether this rank's rows are among them; a rank without samples gives none.
    """
    if tensor.dim() == 0:
        raise CollectiveError("gather() was given a number", fix="give it rows: tensor.unsqueeze(0), or all_reduce()")
    return cast(Tensor, cast(Any, _Gather.apply)(tensor, counts))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: bool) -> Tensor:
        local = tensor.detach()[: None if counts else 0].contiguous()
        sizes, rows = _gathered(local)
        rank = dist.get_rank()
        ctx.start = sum(sizes[:rank])
        ctx.size = sizes[rank]
        ctx.shape = tensor.shape
        return torch.cat(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = all_reduce(gradient.contiguous().clone(), None)
        local = gradient.new_zeros(ctx.shape)
        local[: ctx.size] = total[ctx.start : ctx.start + ctx.size]
        return local, None


def _gathered(rows: Tensor) -> tuple[list[int], list[Tensor]]:
    """Return the number of rows of each rank, and the rows. Collective."""
    sizes = all_gather_rows(torch.tensor([len(rows)], device=rows.device), None).flatten().tolist()
    if not max(sizes):
        return sizes, [rows for _ in sizes]
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    received = all_gather_rows(as_bytes(padded), None)
    parts = (message.view(rows.dtype).view(padded.shape) for message in received)
    return sizes, [part[:size] for part, size in zip(parts, sizes, strict=True)]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return all_reduce(tensor.detach().clone(), None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return all_reduce(gradient.contiguous().clone(), None)


def reduce_tensor(tensor: Tensor, operation: Literal["sum", "mean", "min", "max"]) -> Tensor:
    """Reduce every rank's ``tensor``; ``sum`` and ``mean`` have a gradient. Collective."""
    if operation in ("sum", "mean"):
        total = cast(Tensor, cast(Any, _Sum.apply)(tensor))
        return total / dist.get_world_size() if operation == "mean" else total
    return all_reduce(tensor.detach().clone(), None, getattr(dist.ReduceOp, operation.upper()))
