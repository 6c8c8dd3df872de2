"""``strategy: ddp``: one process for each device; torch's DistributedDataParallel averages the gradients."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep._compat.torch import foreach_copy_
from lockstep.config import RunConfig
from lockstep.data.requests import Window
from lockstep.engine.distributed.staging import wait
from lockstep.engine.strategies.base import (
    FLAG_INTERVAL,
    CheckedLoss,
    Flags,
    Reduced,
    Replica,
    Strategy,
    check_change,
)
from lockstep.engine.strategies.single import RanksStrategy
from lockstep.engine.strategies.small_ddp import FlatStrategy
from lockstep.engine.task import Task
from lockstep.planning import Plan

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
    settings = config.distributed
    return DdpStrategy(
        replica,
        world_size=plan.world_size,
        find_unused_parameters=settings.find_unused_parameters,
        bucket_cap_mb=settings.bucket_cap_mb,
    )


class LossModule(nn.Module):
    """``task.loss`` as a module, so that a wrapper around it sees every method of the model that the task calls.

    Args:
        trained: has all parameters, those of modules beside ``model`` among them.
    """

    def __init__(self, task: Task, model: nn.Module, trained: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trained = trained
        self._loss = CheckedLoss(task)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        total, count = self._loss(self.model, batch)
        return total, count


class DdpStrategy(RanksStrategy):
    """One process a rank; torch's DistributedDataParallel overlaps the reduction with the last backward.

    The count (and the flags) are reduced beside the backward. A window in which some rank has fewer
    micro-batches goes past DDP and is reduced by hand after the backward, on every rank alike.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        world_size: int,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__(replica)
        self._settings: dict[str, Any] = {
            **_NO_BUFFER_BROADCAST,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": True,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._ddp = DistributedDataParallel(self._loss_module(), **self._settings)
        self._world_size = world_size
        self._sums = torch.zeros(2 + len(Flags._fields), dtype=torch.float64, device=replica.device)
        self._by_hand = False

    def _reduced_gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        self._sums.zero_()
        if any(flags):
            self._sums[2:] = torch.tensor(flags, dtype=torch.float64)
        work: dist.Work | None = None
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
            self._sums[0] += total.detach()
            self._sums[1] += count
            if last:
                work = dist.all_reduce(self._sums, async_op=True)
            self._backward(total)
            self._keep_gradients(more=place + 1 < len(window.requests))
        if window.irregular:
            self._reduce_by_hand()
            work = dist.all_reduce(self._sums, async_op=True)
        wait(work)
        divisor = 1.0 if window.irregular else float(self._world_size)
        return Reduced(self._sums[0].clone(), self._sums[1].clone(), divisor, self._read_flags(step))

    def _loss_module(self) -> LossModule:
        return LossModule(self._task, self._model, self.module)

    def _adapt(self) -> None:
        self._sums.zero_()
        self._sums[2:] = torch.tensor(Flags(changed=1.0), dtype=torch.float64)
        wait(dist.all_reduce(self._sums, async_op=True))
        check_change(Flags(*self._sums[2:].tolist()), self._world_size, announced=True)
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

    def _read_flags(self, step: int) -> Flags | None:
        if self._device.type != "cpu" and step % FLAG_INTERVAL:
            return None
        return check_change(Flags(*self._sums[2:].tolist()), self._world_size)

    def _reduce_by_hand(self) -> None:
        parameters = self._trained
        used = [p.grad is not None for p in parameters]
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for dtype in {p.dtype for p in parameters}:
            gradients = [p.grad for p in parameters if p.dtype == dtype and p.grad is not None]
            flat = torch.cat([g.reshape(-1) for g in gradients])
            wait(dist.all_reduce(flat, async_op=True))
            pieces = flat.split([g.numel() for g in gradients])
            foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True)])
        self._leave_out(used)
