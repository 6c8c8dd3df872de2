"""Data parallelism for small models on CPUs: gradients, count, loss and flags of a step in one all-reduce.

DistributedDataParallel hides communication behind the backward, bucket by bucket. A model whose gradients fill no
more than its first bucket has nothing to hide it behind, and pays for the reducer and for a second all-reduce
that carries the count. Here both travel in one buffer after the backward, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep._compat.torch import broadcast_module, check_shapes, foreach_copy_
from lockstep.data.requests import Window
from lockstep.engine.distributed.staging import wait
from lockstep.engine.strategies.base import Flags, Reduced, Replica, check_change
from lockstep.engine.strategies.single import RanksStrategy

#: A sum over up to 4,096 ranks of numbers below this stays below 2²⁴, and so is exact in float32.
_DIGIT = 2.0**12


def joint_bytes(model: nn.Module) -> int:
    """Bytes of the gradients of ``model``, shape and type of which let one message carry them; else 0.

    They are row-major. With weights of another layout (``channels_last``) a fused optimizer, which walks both through
    memory, would mix up their elements. Frozen parameters count in what is asked, as they may be unfrozen later.
    """
    parameters = list(model.parameters())
    one_kind = {p.dtype for p in parameters} in ({torch.float32}, {torch.float64})
    if not one_kind or not all(p.is_contiguous() for p in parameters):
        return 0
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)


class FlatStrategy(RanksStrategy):
    """One process a rank, and one all-reduce a step. All ranks start from rank 0's weights, as under DDP."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._world_size = dist.get_world_size()
        self._lay_out()
        broadcast_module(replica.module)

    def _lay_out(self) -> None:
        check_shapes(list(self._trained))
        sizes = [p.numel() for p in self._trained]
        length = len(pack(0.0, 0.0, Flags())) + 1  # and the number of ranks with unused parameters
        self._flat = torch.zeros(sum(sizes) + length, dtype=self._parameters[0].dtype)
        *pieces, self._numbers = self._flat.split([*sizes, length])
        self._reduced = [piece.view_as(p) for piece, p in zip(pieces, self._trained, strict=True)]

    def _adapt(self) -> None:
        flags = self._all_reduce(pack(0.0, 0.0, Flags(changed=1.0)), ran=False)[2]
        check_change(flags, self._world_size, announced=True)
        super()._adapt()
        self._lay_out()

    def _reduced_gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        total, count = 0.0, 0.0
        ran = False
        for place, request in enumerate(window.requests):
            if request.ghost:
                self._ghost(next(batches))
                continue
            ran = True
            loss, number = self._forward_pass(next(batches), step, self._rank + (place << 16))
            self._backward(loss)
            total += loss.item()
            count += float(number)
        return self._reduce(pack(total, count, flags), ran=ran)

    def _reduce(self, numbers: Sequence[float], *, ran: bool) -> Reduced:
        total, count, flags = self._all_reduce(numbers, ran=ran)
        check_change(flags, self._world_size)
        return Reduced(torch.tensor(total, dtype=torch.float64), count, 1.0, flags)

    def _all_reduce(self, numbers: Sequence[float], *, ran: bool) -> tuple[float, float, Flags]:
        """Sums over ranks: of gradients, where they belong, and of ``numbers``; ``ran``: there are gradients here."""
        gradients = [p.grad for p in self._trained if p.grad is not None]
        complete = len(gradients) == len(self._trained)
        used = [] if complete else [p.grad is not None for p in self._trained]
        if complete:
            foreach_copy_(self._reduced, gradients)
        else:
            self._flat.zero_()
            for piece, parameter in zip(self._reduced, self._trained, strict=True):
                if parameter.grad is not None:
                    piece.copy_(parameter.grad)
        self._numbers.copy_(torch.tensor([*numbers, float(ran and not complete)], dtype=self._flat.dtype))
        wait(dist.all_reduce(self._flat, async_op=True))
        for parameter, gradient in zip(self._trained, self._reduced, strict=True):
            parameter.grad = gradient
        *sums, unused = self._numbers.tolist()
        if unused:
            self._leave_out(used or [True] * len(self._trained))
        return unpack(sums)


def pack(total: float, count: float, flags: Flags) -> list[float]:
    """Numbers of a rank, for sums in float32: a count of whole items below 2³⁶ comes through exactly."""
    rest, low = divmod(count, _DIGIT)
    high, middle = divmod(rest, _DIGIT)
    return [total, high, middle, low, *flags]


def unpack(sums: Sequence[float]) -> tuple[float, float, Flags]:
    """The sums of what :func:`pack` packed: total, count, flags."""
    total, high, middle, low, *flags = sums
    return total, (high * _DIGIT + middle) * _DIGIT + low, Flags(*flags)
