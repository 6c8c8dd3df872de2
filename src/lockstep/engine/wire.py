"""Small tensors between ranks, whatever device they lie on and whatever backend the group has.

gloo moves host memory only (for some collectives), so with a gloo group a tensor on a GPU is staged
through the host. Without a process group, one process is a group of one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""``None``: the default group, or one process when there is none."""


def world_size(group: Group) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def wire_device(device: torch.device, group: Group) -> torch.device:
    """Where tensors of ``device`` must lie to travel over ``group``."""
    return torch.device("cpu") if dist.get_backend(group) == dist.Backend.GLOO else device


def all_gather_rows(row: Tensor, group: Group) -> Tensor:
    """Every rank's ``row``, by rank: [n] → [ranks, n]."""
    ranks = world_size(group)
    if ranks == 1:
        return row.unsqueeze(0)
    sent = row.to(wire_device(row.device, group))
    rows = sent.new_empty(ranks, sent.numel())
    dist.all_gather(list(rows.unbind()), sent, group=group)
    return rows.to(row.device)


def all_reduce(tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The reduction of every rank's ``tensor``; it may or may not be ``tensor`` itself."""
    if world_size(group) == 1:
        return tensor
    sent = tensor.to(wire_device(tensor.device, group))
    dist.all_reduce(sent, op=op, group=group)
    return sent.to(tensor.device)
