"""Buffers that change in training: merged as declared, or refused with their name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.engine.batchnorm import merge_running_stats
from lockstep.engine.wire import Group, all_reduce
from lockstep.errors import UnsupportedError

#: How a module declares its own buffers: ``buffer_reduction = {"name": "mean"}``.
ATTRIBUTE = "buffer_reduction"
REDUCTIONS = ("mean", "sum", "max", "same")


class Buffers:
    """The buffers of a model that several ranks train.

    Running statistics of normalisation layers are merged by count. A module declares any other buffer
    that changes in training in ``buffer_reduction``: ``mean`` (weighted by samples), ``sum`` (of what each
    rank added since the last merge), ``max``, or ``same`` (equal on all ranks by construction, which is
    checked).

    Raises:
        UnsupportedError: a declaration that names no buffer, or no reduction.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._declared: dict[str, str] = {}
        self._before: dict[str, Tensor] = {}
        for path, layer in module.named_modules():
            declared = dict(getattr(layer, ATTRIBUTE, {}))
            if not isinstance(layer, _NormBase):
                for name, buffer in layer.named_buffers(recurse=False):
                    full = f"{path}.{name}" if path else name
                    self._before[full] = buffer.detach().clone()
                    if name in declared:
                        self._declared[full] = _checked(declared.pop(name), full)
            if declared:
                raise UnsupportedError(
                    f"{ATTRIBUTE} of {type(layer).__name__} names {', '.join(declared)}, which it does not have",
                    fix="name buffers of this very module that no other rule merges",
                )

    def synchronise(self, weight: float, *, merge_statistics: bool, group: Group = None) -> None:
        """Make buffers equal on all ranks. Collective; ``weight``: samples of this rank since the last call.

        Raises:
            UnsupportedError: a buffer changed that nobody declared, or ``same`` ones differ.
        """
        if merge_statistics:
            merge_running_stats(self._module, weight, group)
        current = dict(self._module.named_buffers())
        for name, before in self._before.items():
            kind = self._declared.get(name)
            if kind is None:
                _refuse_if_changed(name, before, current[name])
            else:
                _reduce(name, current[name], before, kind, weight, group)
                before.copy_(current[name])

    def refuse_changed(self) -> None:
        """For exact mode, where no order of merging is fixed for them. Raises :class:`UnsupportedError`."""
        current = dict(self._module.named_buffers())
        for name, before in self._before.items():
            _refuse_if_changed(name, before, current[name])


def _checked(kind: str, name: str) -> str:
    if kind not in REDUCTIONS:
        raise UnsupportedError(
            f"the buffer {name} cannot be reduced by {kind!r}", fix=f"declare one of {', '.join(REDUCTIONS)}"
        )
    return kind


def _refuse_if_changed(name: str, before: Tensor, now: Tensor) -> None:
    if not torch.allclose(now, before, rtol=0, atol=0, equal_nan=True):
        raise UnsupportedError(
            f"the buffer {name} changed in training and nobody says how ranks agree on it",
            why="each rank has changed its own copy",
            fix=f"give its module `{ATTRIBUTE} = {{'{name.rpartition('.')[2]}': 'mean'}}` "
            f"(or {', '.join(REDUCTIONS[1:])}); exact mode has no rule for it",
        )


@torch.no_grad()
def _reduce(name: str, buffer: Tensor, before: Tensor, kind: str, weight: float, group: Group) -> None:
    if kind == "sum":
        buffer.copy_(before + all_reduce(buffer - before, group))
    elif kind == "mean":
        # A rank without samples counts nothing: 0 · inf would poison the sum.
        share = buffer.double() * weight if weight else torch.zeros_like(buffer, dtype=torch.float64)
        total = all_reduce(torch.tensor(weight, dtype=torch.float64, device=buffer.device), group)
        merged = all_reduce(share, group)
        if total > 0:
            buffer.copy_(merged / total)
    else:
        highest = all_reduce(buffer.clone(), group, dist.ReduceOp.MAX)
        if kind == "max":
            buffer.copy_(highest)
        elif all_reduce((highest != buffer).any().double(), group) > 0:
            raise UnsupportedError(
                f"the buffer {name} is declared the same on all ranks, and is not",
                fix="declare how it is reduced: mean, sum or max",
            )
