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
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes

from lockstep.data.loader import Window
from lockstep.engine.strategy import Flags, RanksStrategy, Reduced, Replica
from lockstep.engine.wire import wait

#: DistributedDataParallel's first bucket (torch's ``_DEFAULT_FIRST_BUCKET_BYTES``).
FIRST_BUCKET_BYTES = 2**20
#: A sum over up to 4,096 ranks of numbers below this stays below 2²⁴, and so is exact in float32.
_DIGIT = 2.0**12


def fits(model: nn.Module, device: torch.device) -> bool:
    """Whether :class:`FlatStrategy` can train ``model``, and has nothing to lose by it.

    Its gradients are row-major. Beside weights of another layout (``channels_last``) a fused optimizer, which walks
    both through memory, would mix up their elements.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not all(p.is_contiguous() for p in parameters):
        return False
    dtypes = {p.dtype for p in parameters}
    size = sum(p.numel() * p.element_size() for p in parameters)
    return device.type == "cpu" and dtypes in ({torch.float32}, {torch.float64}) and size <= FIRST_BUCKET_BYTES


class FlatStrategy(RanksStrategy):
    """One process a rank, and one all-reduce a step. All ranks start from rank 0's weights, as under DDP."""

    def __init__(self, replica: Replica, *, collective_forward: bool) -> None:
        super().__init__(replica, collective_forward=collective_forward)
        group = _get_default_group()
        _verify_param_shape_across_processes(group, list(self._parameters))
        _sync_module_states(replica.module, group, 250 * 2**20, 0, [])  # 250 MB at a time, as DDP does
        sizes = [p.numel() for p in self._parameters]
        length = len(pack(0.0, 0.0, Flags()))
        self._flat = torch.zeros(sum(sizes) + length, dtype=self._parameters[0].dtype)
        *pieces, self._numbers = self._flat.split([*sizes, length])
        self._reduced = [piece.view_as(p) for piece, p in zip(pieces, self._parameters, strict=True)]

    def gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        self._clear()
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
            self._samples_since_merge += request.size
        return self._reduce(pack(total, count, flags), ran=ran)

    def _reduce(self, numbers: Sequence[float], *, ran: bool) -> Reduced:
        if ran:
            torch._foreach_copy_(self._reduced, self._gradients())
        else:
            self._flat.zero_()
        self._numbers.copy_(torch.tensor(numbers, dtype=self._flat.dtype))
        wait(dist.all_reduce(self._flat, async_op=True))
        for parameter, gradient in zip(self._parameters, self._reduced, strict=True):
            parameter.grad = gradient
        total, count, flags = unpack(self._numbers.tolist())
        return Reduced(torch.tensor(total, dtype=torch.float64), count, 1.0, flags)

    def _gradients(self) -> list[Tensor]:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if len(gradients) < len(self._parameters):
            # In DDP's words, for which there is an explanation (lockstep.launch.causes); it finds out a step later.
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration: parameters took no part in the loss"
            )
        return gradients


def pack(total: float, count: float, flags: Flags) -> list[float]:
    """Numbers of a rank, for sums in float32: a count of whole items below 2³⁶ comes through exactly."""
    rest, low = divmod(count, _DIGIT)
    high, middle = divmod(rest, _DIGIT)
    return [total, high, middle, low, *flags]


def unpack(sums: Sequence[float]) -> tuple[float, float, Flags]:
    """The sums of what :func:`pack` packed: total, count, flags."""
    total, high, middle, low, *flags = sums
    return total, (high * _DIGIT + middle) * _DIGIT + low, Flags(*flags)
