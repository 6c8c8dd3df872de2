"""``reproducibility: exact``: the same weights bit for bit on every world size that divides the lanes.

Each lane of a step is computed alone: its own forward and backward, its own dropout seed, its own
BatchNorm statistics from the same starting point. What lanes leave behind (gradients, loss and count,
running statistics) is summed along one fixed tree (:mod:`lockstep.engine.tree`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.data.loader import Window
from lockstep.engine.batchnorm import running_statistics, tracked_batches
from lockstep.engine.buffers import Buffers
from lockstep.engine.strategy import (
    FLAG_INTERVAL,
    Flags,
    Reduced,
    Replica,
    SeededDraws,
    SingleStrategy,
    check_change,
)
from lockstep.engine.tree import Leaf, TreeAllReduce, TreeSum

#: In the numbers of a leaf, ``[loss, count, flags…, used…, samples]``: how many lanes used each parameter.
_USED = 2 + len(Flags._fields)


class ExactStrategy(SingleStrategy):
    """One or more ranks; a window's requests are this rank's lanes, empty ones included."""

    def __init__(self, replica: Replica, *, world_size: int) -> None:
        super().__init__(replica)
        module = replica.module
        self._world_size = world_size
        self.draws = SeededDraws(replica.seed, [replica.device], everything=True)
        self._statistics = running_statistics(module)
        self._tracked = tracked_batches(module)
        self._all_reduce = TreeAllReduce(replica.rank, world_size)
        self._buffers = Buffers(module)

    def gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        before = [buffer.clone() for buffer in self._statistics]
        tracked = [buffer.clone() for buffer in self._tracked]
        self._begin()
        self._all_used = False
        tree = TreeSum()
        for request in window.requests:
            batch = next(batches)
            if request.size == 0:
                tree.push(None)
                continue
            tree.push(self._lane(batch, step, request.part, request.size))
            self._restore(before, tracked)
        total = tree.result() or self._nothing()
        sums = total[-1]
        sums[2:_USED] += torch.tensor(flags, dtype=torch.float64, device=sums.device)
        self._all_reduce(total)
        self._take(total, tracked)
        read = self._world_size > 1 and (self._device.type == "cpu" or step % FLAG_INTERVAL == 0)
        agreed = flags if self._world_size == 1 else None
        if read:
            agreed = check_change(Flags(*sums[2:_USED].tolist()), self._world_size)
        return Reduced(sums[0], sums[1], 1.0, agreed)

    def synchronise_buffers(self) -> None:
        """Statistics agree after every step; any other buffer that changed is refused, declared or not."""
        self._buffers.refuse_changed()

    def _adapt(self) -> None:
        if self._world_size > 1:
            nothing = self._nothing()
            nothing[-1][2:_USED] = torch.tensor(Flags(changed=1.0), dtype=torch.float64)
            self._all_reduce(nothing)
            check_change(Flags(*nothing[-1][2:_USED].tolist()), self._world_size, announced=True)
        super()._adapt()

    def _lane(self, batch: Any, step: int, lane: int, samples: int) -> Leaf:
        """Gradients, statistics times samples, and ``[loss, count, flags…, used…, samples]``; the tree owns them."""
        self._clear()
        total, count = self._forward_pass(batch, step, lane)
        self._backward(total)
        used = [p.grad is not None for p in self._trained]
        self._all_used = self._all_used or all(used)
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._trained]
        self._clear()
        statistics = [buffer.double() * samples for buffer in self._statistics]
        sums = torch.zeros(_USED + len(used) + 1, dtype=torch.float64, device=self._device)
        sums[0], sums[1], sums[-1] = total.detach(), count, samples
        sums[_USED:-1] = torch.tensor(used)
        return [*gradients, *statistics, sums]

    def _restore(self, statistics: list[Tensor], tracked: list[Tensor]) -> None:
        if statistics:
            torch._foreach_copy_(self._statistics, statistics)
        for buffer, value in zip(self._tracked, tracked, strict=True):
            buffer.copy_(value)

    def _nothing(self) -> Leaf:
        sums = torch.zeros(_USED + len(self._trained) + 1, dtype=torch.float64, device=self._device)
        return [
            *(torch.zeros_like(p) for p in self._trained),
            *(torch.zeros_like(buffer, dtype=torch.float64) for buffer in self._statistics),
            sums,
        ]

    @torch.no_grad()
    def _take(self, total: Leaf, tracked: list[Tensor]) -> None:
        """Put the sums where they belong: gradients, and running statistics as the mean over samples."""
        number = len(self._trained)
        # A parameter that no lane used has no gradient, as in one process: an optimizer leaves it alone.
        used = [1.0] * number if self._all_used else total[-1][_USED:-1].tolist()
        for parameter, gradient, lanes in zip(self._trained, total[:number], used, strict=True):
            parameter.grad = gradient if lanes else None
        samples = total[-1][-1]
        for buffer, value in zip(self._statistics, total[number:-1], strict=True):
            buffer.copy_(value / samples)
        for buffer, value in zip(self._tracked, tracked, strict=True):
            buffer.copy_(value + 1)
