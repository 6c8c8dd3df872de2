"""What strategies with several ranks have in common, besides how gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.data.requests import Window
from lockstep.engine.distributed.buffers import Buffers
from lockstep.engine.distributed.staging import wait
from lockstep.engine.distributed.sync_batchnorm import ghost
from lockstep.engine.strategies.base import (
    Flags,
    Reduced,
    Replica,
)
from lockstep.engine.strategies.single import SingleStrategy


class RanksStrategy(SingleStrategy):
    """One process a rank: what there is to do besides reducing gradients."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._buffers = Buffers(replica.module, replica.device, "ranks")

    def gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        self._begin()
        reduced = self._reduced_gradients(window, batches, step, flags)
        self._buffers.end(window)
        return reduced

    def _reduced_gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        raise NotImplementedError

    def _leave_out(self, used: Sequence[bool]) -> None:
        """Remove zeros that were filled in for parameters without a gradient on any rank. Collective.

        An optimizer leaves parameters without a gradient alone; it would decay those whose gradient is zero.

        Args:
            used: whether each trained parameter has a gradient of this rank.
        """
        anywhere = torch.tensor(used, dtype=torch.float32, device=self._device)
        wait(dist.all_reduce(anywhere, async_op=True))
        if not all(used):
            for parameter, number in zip(self._trained, anywhere.tolist(), strict=True):
                parameter.grad = parameter.grad if number else None

    def _ghost(self, batch: Any) -> None:
        """Join the collective forward of ranks that have samples; leave no trace in gradients and buffers."""
        kept = [parameter.grad for parameter in self._parameters]
        self._clear()
        with ghost(self.module), self._buffers.untouched():
            total, _ = self._forward_pass(batch, 0, 0)
            self._backward(total)
        for parameter, gradient in zip(self._parameters, kept, strict=True):
            parameter.grad = gradient
