"""``strategy: ddp``: one process for each device; torch's DistributedDataParallel averages the gradients.

For small models on CPUs, gradients, count, loss and flags of a step travel in one all-reduce instead
(:class:`FlatStrategy`). DistributedDataParallel hides communication behind the backward, bucket by bucket. A model
whose gradients fill no more than its first bucket has nothing to hide it behind, and pays for the reducer and for a
second all-reduce that carries the count.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep._compat.torch import broadcast_module, check_shapes
from lockstep.config import RunConfig
from lockstep.data.requests import Window
from lockstep.engine.strategies.base import Flags, RanksStrategy, Reduced, Replica, StepSums, Strategy, check_change
from lockstep.engine.strategies.buckets import GradientBuckets
from lockstep.engine.strategies.losses import CheckedLoss
from lockstep.planning import Plan

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
        self._lay_out()
        broadcast_module(replica.module)

    def _lay_out(self) -> None:
        check_shapes(list(self._trained))
        numbers = len(pack(0.0, 0.0, Flags())) + 1  # and the number of ranks with unused parameters
        self._buckets = GradientBuckets(self._trained, self._device, numbers=numbers)

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
        total, count, flags = self._all_reduce(pack(total, count, flags), ran=ran)
        check_change(flags, self._world_size)
        return Reduced(torch.tensor(total, dtype=torch.float64), count, 1.0, flags)

    def _all_reduce(self, numbers: Sequence[float], *, ran: bool) -> tuple[float, float, Flags]:
        """Sums over ranks: of gradients, where they belong, and of ``numbers``; ``ran``: there are gradients here."""
        used = [p.grad is not None for p in self._trained]
        self._buckets.launch([*numbers, float(ran and not all(used))])
        *sums, unused = self._buckets.wait().tolist()
        if unused:
            self._buckets.leave_out(used)
        return unpack(sums)


def pack(total: Any, count: Any, flags: Flags) -> list[Any]:
    """Numbers of a rank, for sums in float32: a count of whole items below 2³⁶ comes through exactly.

    ``total`` and ``count`` may be tensors in float64, which are not read.
    """
    rest, low = count // _DIGIT, count % _DIGIT
    return [total, rest // _DIGIT, rest % _DIGIT, low, *flags]


def unpack(sums: Iterable[Any]) -> tuple[Any, Any, Flags]:
    """The sums of what :func:`pack` packed: total, count, flags."""
    total, high, middle, low, *flags = sums
    return total, (high * _DIGIT + middle) * _DIGIT + low, Flags(*flags)


#: torch 2.13 renamed the argument.
_NO_BUFFER_BROADCAST: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


def build(replica: Replica, config: RunConfig, plan: Plan) -> Strategy:
    """The strategy of one rank, as the plan chose: gradients in one message, or in DDP's buckets. Collective."""
    if plan.one_message:
        return FlatStrategy(replica)
    unused, cap_mb = config.distributed.find_unused_parameters, config.distributed.bucket_cap_mb
    return DdpStrategy(replica, find_unused_parameters=unused, bucket_cap_mb=cap_mb)


class LossModule(nn.Module):
    """A task's loss as a module, so that a wrapper around it sees every method of the model that the task calls.

    Args:
        trained: has all parameters, those of modules beside ``model`` among them.
    """

    def __init__(self, loss: CheckedLoss, model: nn.Module, trained: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trained = trained
        self._loss = loss

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        total, count = self._loss(self.model, batch)
        return total, count


class DdpStrategy(RanksStrategy):
    """One process a rank; torch's DistributedDataParallel overlaps the reduction with the last backward.

    The count (and the flags) are reduced beside the backward. A window in which some rank has fewer
    micro-batches goes past DDP and is reduced by hand after the backward, on every rank alike.
    """

    def __init__(
        self, replica: Replica, *, find_unused_parameters: bool = False, bucket_cap_mb: float | None = None
    ) -> None:
        super().__init__(replica)
        self._settings: dict[str, Any] = {
            **_NO_BUFFER_BROADCAST,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": True,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._ddp = DistributedDataParallel(self._loss_module(), **self._settings)
        self._sums = StepSums(replica.device)
        self._by_hand = False

    def _reduced_gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        self._sums.begin(flags)
        self._by_hand = window.irregular
        for place, request in enumerate(window.requests):
            last = place == len(window.requests) - 1 and not window.irregular
            batch = next(batches)
            if request.ghost:
                self._ghost(batch)
                continue
            # What no_sync() does, without a context manager per micro-batch.
            self._ddp.require_backward_grad_sync = last
            total, count = self._forward_pass(batch, step, self._rank + (place << 16))
            self._sums.add(total, count)
            if last:
                self._sums.send()
            self._backward(total)
            self._keep_gradients(more=place + 1 < len(window.requests))
        if window.irregular:
            self._reduce_by_hand()
            self._sums.send()
        return self._sums.reduced(step, 1.0 if window.irregular else float(self._world_size))

    def _loss_module(self) -> LossModule:
        return LossModule(self._ask, self._model, self.module)

    def _adapt(self) -> None:
        self._sums.announce_change()
        super()._adapt()
        del self._ddp  # and the hooks that it has on parameters
        gc.collect()
        self._ddp = DistributedDataParallel(self._loss_module(), **self._settings, init_sync=False)

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        if self._by_hand:
            # DDP's forward may itself be collective: once, after its first reduction, it rebuilds its buckets.
            return super()._loss(batch)
        loss: tuple[Tensor, Tensor | int] = self._ddp(batch)
        return loss

    def _reduce_by_hand(self) -> None:
        used = [p.grad is not None for p in self._trained]
        buckets = GradientBuckets(self._trained, self._device)
        buckets.launch()
        buckets.wait()
        buckets.leave_out(used)
