"""Tensors of all ranks with a gradient: for losses over the whole batch, as in contrastive learning."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.engine.distributed.staging import all_gather_rows, wire_device
from lockstep.errors import CollectiveError


def gather_rows(tensor: Tensor, *, counts: bool) -> Tensor:
    """The rows of all ranks, in rank order: [n_r, ...] → [Σ n_r, ...]. Collective, and so is its backward.

    The gradient of a rank's own rows is the sum of what all ranks' losses give them.

    Args:
        counts: whether this rank's rows are among them; a rank without samples gives none.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    if tensor.dim() == 0:
        raise CollectiveError("gather() was given a number", fix="give it rows: tensor.unsqueeze(0), or all_reduce()")
    gathered: Tensor = cast(Any, _Gather.apply)(tensor, counts)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: bool) -> Tensor:
        own = tensor.detach()[: None if counts else 0].contiguous()
        sizes = all_gather_rows(torch.tensor([len(own)]), None).flatten().tolist()
        most, rank = max(sizes), dist.get_rank()
        sent = own.new_zeros(most, *own.shape[1:])
        sent[: len(own)] = own
        rows = all_gather_rows(sent.reshape(-1), None).view(len(sizes), most, *own.shape[1:])
        ctx.start, ctx.size, ctx.shape = sum(sizes[:rank]), sizes[rank], tensor.shape
        return torch.cat([one[:size] for one, size in zip(rows, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = _summed(gradient.contiguous().clone())
        own = gradient.new_zeros(ctx.shape)
        own[: ctx.size] = total[ctx.start : ctx.start + ctx.size]
        return own, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _summed(tensor.detach().clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _summed(gradient.contiguous().clone())


def _summed(tensor: Tensor) -> Tensor:
    sent = tensor.to(wire_device(tensor.device, None))
    dist.all_reduce(sent)
    return sent.to(tensor.device)


def reduce_tensor(tensor: Tensor, operation: Literal["sum", "mean", "min", "max"]) -> Tensor:
    """The reduction of every rank's ``tensor``; ``sum`` and ``mean`` have a gradient. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    if operation in ("sum", "mean"):
        total: Tensor = cast(Any, _Sum.apply)(tensor)
        return total / dist.get_world_size() if operation == "mean" else total
    found = tensor.detach().to(wire_device(tensor.device, None), copy=True)
    dist.all_reduce(found, op=getattr(dist.ReduceOp, operation.upper()))
    return found.to(tensor.device)
