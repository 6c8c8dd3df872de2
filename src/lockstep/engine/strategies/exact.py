"""``reproducibility: exact``: the same weights bit for bit on every world size that divides the lanes.

Each lane of a step is computed alone: its own forward and backward, its own dropout seed, its own
BatchNorm statistics from the same starting point. What lanes leave behind (gradients, loss and count,
running statistics) is summed along one fixed tree (:mod:`lockstep.engine.distributed.tree_reduce`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.data.requests import Window
from lockstep.engine.distributed.buffers import Buffers
from lockstep.engine.distributed.tree_reduce import Leaf, TreeAllReduce, TreeSum
from lockstep.engine.strategies.base import (
    FLAG_INTERVAL,
    Flags,
    Reduced,
    Replica,
    SeededDraws,
    check_change,
)
from lockstep.engine.strategies.single import SingleStrategy

#: In the numbers of a leaf, ``[loss, count, flags…, used…, samples]``: how many lanes used each parameter.
_USED = 2 + len(Flags._fields)


class ExactStrategy(SingleStrategy):
    """One or more ranks; a window's requests are this rank's lanes, empty ones included."""

    def __init__(self, replica: Replica, *, world_size: int) -> None:
        super().__init__(replica)
        self._world_size = world_size
        self.draws = SeededDraws(replica.seed, [replica.device], everything=True)
        self._all_reduce = TreeAllReduce(replica.rank, world_size)
        self._buffers = Buffers(replica.module, replica.device, "exact")
        self._statistics = self._buffers.tensors("mean")
        self._counters = self._buffers.tensors("max", "once")

    def gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        statistics = [buffer.clone() for buffer in self._statistics]
        counters = [buffer.clone() for buffer in self._counters]
        self._begin()
        self._all_used = False
        tree = TreeSum()
        for request in window.requests:
            batch = next(batches)
            if request.size == 0:
                tree.push(None)
                continue
            tree.push(self._lane(batch, step, request.part, request.size))
            self._restore(statistics, counters)
        total = tree.result() or self._nothing()
        sums = total[-1]
        sums[2:_USED] += torch.tensor(flags, dtype=torch.float64, device=sums.device)
        self._all_reduce(total)
        self._take(total)
        if self._buffers.checks_left:
            self._buffers.check()
        read = self._world_size > 1 and (self._device.type == "cpu" or step % FLAG_INTERVAL == 0)
        agreed = flags if self._world_size == 1 else None
        if read:
            agreed = check_change(Flags(*sums[2:_USED].tolist()), self._world_size)
        return Reduced(sums[0], sums[1], 1.0, agreed)

    def _adapt(self) -> None:
        if self._world_size > 1:
            nothing = self._nothing()
            nothing[-1][2:_USED] = torch.tensor(Flags(changed=1.0), dtype=torch.float64)
            self._all_reduce(nothing)
            check_change(Flags(*nothing[-1][2:_USED].tolist()), self._world_size, announced=True)
        super()._adapt()

    def _lane(self, batch: Any, step: int, lane: int, samples: int) -> Leaf:
        """Gradients, statistics times samples, counters of lane 0, numbers (see ``_USED``); the tree owns them."""
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
        counters = [buffer.clone() if lane == 0 else torch.zeros_like(buffer) for buffer in self._counters]
        return [*gradients, *statistics, *counters, sums]

    def _restore(self, statistics: list[Tensor], counters: list[Tensor]) -> None:
        for buffer, value in zip((*self._statistics, *self._counters), (*statistics, *counters), strict=True):
            buffer.copy_(value)

    def _nothing(self) -> Leaf:
        sums = torch.zeros(_USED + len(self._trained) + 1, dtype=torch.float64, device=self._device)
        return [
            *(torch.zeros_like(p) for p in self._trained),
            *(torch.zeros_like(buffer, dtype=torch.float64) for buffer in self._statistics),
            *(torch.zeros_like(buffer) for buffer in self._counters),
            sums,
        ]

    @torch.no_grad()
    def _take(self, total: Leaf) -> None:
        """Put the sums where they belong: gradients, running statistics as the mean over samples, counters."""
        number = len(self._trained)
        # A parameter that no lane used has no gradient, as in one process: an optimizer leaves it alone.
        used = [1.0] * number if self._all_used else total[-1][_USED:-1].tolist()
        for parameter, gradient, lanes in zip(self._trained, total[:number], used, strict=True):
            parameter.grad = gradient if lanes else None
        values = iter(total[number:])
        samples = total[-1][-1]
        for buffer in self._statistics:
            buffer.copy_(next(values) / samples)
        for buffer in self._counters:
            buffer.copy_(next(values))
