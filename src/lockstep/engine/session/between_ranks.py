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

#: Bytes of a number of rows in a message; a multiple of the size of every type.
_HEAD = 16


def gather_rows(tensor: Tensor, *, counts: bool, capacities: dict[Any, int]) -> Tensor:
    """The rows of all ranks, in rank order: [n_r, ...] → [Σ n_r, ...]. Collective, and so is its backward.

    The gradient of a rank's rows is the sum over the losses of all ranks.

    Args:
        counts: whether this rank's rows are among them; a rank without samples gives none.
        capacities: of a session: the most rows that a rank had, by type and shape of a row.
    """
    if tensor.dim() == 0:
        raise CollectiveError("gather() was given a number", fix="give it rows: tensor.unsqueeze(0), or all_reduce()")
    return cast(Tensor, cast(Any, _Gather.apply)(tensor, counts, capacities))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: bool, capacities: dict[Any, int]) -> Tensor:
        local = tensor.detach()[: None if counts else 0].contiguous()
        sizes, rows = _gathered(local, capacities)
        rank = dist.get_rank()
        ctx.start = sum(sizes[:rank])
        ctx.size = sizes[rank]
        ctx.shape = tensor.shape
        return torch.cat(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = all_reduce(gradient.contiguous().clone(), None)
        local = gradient.new_zeros(ctx.shape)
        local[: ctx.size] = total[ctx.start : ctx.start + ctx.size]
        return local, None, None


def _gathered(rows: Tensor, capacities: dict[Any, int]) -> tuple[list[int], list[Tensor]]:
    """How many rows each rank has, and the rows. Collective: one message, unless a rank has more than any before.

    The numbers of rows travel with as many rows as the largest number so far, which all ranks know.
    """
    key = rows.dtype, rows.shape[1:]
    length = rows.dtype.itemsize * rows.shape[1:].numel()
    while True:
        capacity = capacities.get(key, 0)
        sent = torch.zeros(_HEAD + capacity * length, dtype=torch.uint8, device=rows.device)
        sent[:8].view(torch.int64).fill_(len(rows))
        fits = as_bytes(rows[:capacity])
        sent[_HEAD : _HEAD + len(fits)] = fits
        received = all_gather_rows(sent, None)
        sizes = received[:, :8].contiguous().view(torch.int64).flatten().tolist()
        if max(sizes) <= capacity:
            break
        capacities[key] = max(sizes)
    parts = [message[_HEAD : _HEAD + size * length] for message, size in zip(received, sizes, strict=True)]
    return sizes, [part.view(rows.dtype).view(-1, *rows.shape[1:]) for part in parts]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return all_reduce(tensor.detach().clone(), None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return all_reduce(gradient.contiguous().clone(), None)


def reduce_tensor(tensor: Tensor, operation: Literal["sum", "mean", "min", "max"]) -> Tensor:
    """The reduction of every rank's ``tensor``; ``sum`` and ``mean`` have a gradient. Collective."""
    if operation in ("sum", "mean"):
        total = cast(Tensor, cast(Any, _Sum.apply)(tensor))
        return total / dist.get_world_size() if operation == "mean" else total
    return all_reduce(tensor.detach().clone(), None, getattr(dist.ReduceOp, operation.upper()))
