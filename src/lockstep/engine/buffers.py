"""Buffers that change in training: merged as declared, or refused with their name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.engine.batchnorm import merge_running_stats
from lockstep.errors import UnsupportedError

#: How a module declares its own buffers: ``buffer_reduction = {"name": "mean"}``.
ATTRIBUTE = "buffer_reduction"
REDUCTIONS = ("mean", "sum", "max", "same")


class Buffers:
    """The buffers of a model that several ranks train.

    BatchNorm's running statistics are merged by count. A module declares any other buffer that changes
    in training in ``buffer_reduction``: ``mean`` (weighted by samples), ``sum`` (of what each rank added
    since the last merge), ``max``, or ``same`` (equal on all ranks by construction).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._declared: dict[str, str] = {}
        self._watched: dict[str, Tensor] = {}
        for path, layer in module.named_modules():
            if isinstance(layer, _BatchNorm):
                continue
            declared = getattr(layer, ATTRIBUTE, {})
            for name, buffer in layer.named_buffers(recurse=False):
                full = f"{path}.{name}" if path else name
                if name in declared:
                    self._declared[full] = _checked(declared[name], full)
                self._watched[full] = buffer.detach().clone()

    def synchronise(self, weight: float, *, merge_batchnorm: bool, group: Any = None) -> None:
        """Make buffers equal on all ranks. Collective; ``weight``: samples of this rank since the last call.

        Raises:
            UnsupportedError: a buffer changed that nobody declared.
        """
        if merge_batchnorm:
            merge_running_stats(self._module, weight, group)
        if not self._watched:
            return
        current = dict(self._module.named_buffers())
        for name, before in self._watched.items():
            kind = self._declared.get(name)
            if kind is not None:
                _reduce(current[name], before, kind, weight, group)
            elif not torch.equal(current[name], before):
                raise UnsupportedError(
                    f"the buffer {name} changed in training and nobody says how ranks agree on it",
                    why="each rank has changed its own copy",
                    fix=f"give its module `buffer_reduction = {{'{name.rpartition('.')[2]}': 'mean'}}` "
                    f"(or {', '.join(REDUCTIONS[1:])})",
                )
            before.copy_(current[name])


def _checked(kind: str, name: str) -> str:
    if kind not in REDUCTIONS:
        raise UnsupportedError(
            f"the buffer {name} cannot be reduced by {kind!r}", fix=f"declare one of {', '.join(REDUCTIONS)}"
        )
    return kind


@torch.no_grad()
def _reduce(buffer: Tensor, before: Tensor, kind: str, weight: float, group: Any) -> None:
    if kind == "max":
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group)
    elif kind == "sum":
        added = buffer - before
        dist.all_reduce(added, group=group)
        buffer.copy_(before + added)
    elif kind == "mean":
        flat = torch.cat(
            (buffer.double().reshape(-1) * weight, torch.tensor([weight], dtype=torch.float64).to(buffer.device))
        )
        dist.all_reduce(flat, group=group)
        if flat[-1] > 0:
            buffer.copy_((flat[:-1] / flat[-1]).view_as(buffer))
