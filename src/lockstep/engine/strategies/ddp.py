"""``strategy: ddp``: one process for each device; torch's DistributedDataParallel averages the gradients.

For small models on CPUs, gradients, count, loss and flags of a step travel in one all-reduce instead
(:class:`FlatStrategy`): such a model has no backward pass to hide communication behind, and pays for the reducer and
for a second all-reduce that carries the count.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep._compat.torch import broadcast_module, check_shapes
from lockstep.config import DistributedConfig, RunConfig
from lockstep.data.requests import BatchRequest, Window
from lockstep.engine.strategies.base import Asked, RanksStrategy, Replica, Strategy
from lockstep.engine.strategies.reducers import Flags, GradientBuckets, Reduced, Reducer, step_sums
from lockstep.planning import Plan

#: torch 2.13 renamed the argument.
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _RENAMED else "broadcast_buffers"


def build(replica: Replica, config: RunConfig, plan: Plan) -> Strategy:
    """Build the strategy of one rank, as the plan chose: gradients in one message, or in DDP's buckets. Collective."""
    if plan.one_message:
        return FlatStrategy(replica)
    return DdpStrategy(replica, config.distributed)


def joint_bytes(model: nn.Module) -> int:
    """Return the size of the gradients of ``model``, if shapes and types allow one message for all; else 0.

    They are row-major. With weights of another layout (``channels_last``) a fused optimizer, which walks both through
    memory, would mix up their elements. Frozen parameters must have them too, as they may be unfrozen later.
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
        broadcast_module(replica.module)

    def _make_reducer(self) -> Reducer:
        check_shapes(list(self._trained))
        return GradientBuckets(self._trained, self._device)


class DdpStrategy(RanksStrategy):
    """One process a rank; torch's DistributedDataParallel overlaps the reduction with the last backward.

    The count (and the flags) are reduced beside the backward. A window in which some rank has fewer
    micro-batches goes past DDP and is reduced by hand after the backward, on every rank alike.
    """

    def __init__(self, replica: Replica, config: DistributedConfig) -> None:
        super().__init__(replica)
        self._config = config
        check_shapes(list(self._trained))
        broadcast_module(replica.module)
        self._wrap()
        self._by_hand = False

    def _make_reducer(self) -> Reducer:
        return step_sums(self._device, float(dist.get_world_size()))

    def _wrap(self) -> None:
        self._ddp = DistributedDataParallel(
            Asked(self._model, self.module),
            bucket_cap_mb=self._config.bucket_cap_mb,
            find_unused_parameters=self._config.find_unused_parameters,
            gradient_as_bucket_view=True,
            init_sync=False,
            **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
        )

    def _adapt(self) -> None:
        super()._adapt()
        del self._ddp  # and the hooks that it has on parameters
        gc.collect()
        self._wrap()

    def _reduced_gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        self._by_hand = window.irregular
        if not window.irregular:
            return super()._reduced_gradients(window, batches, step, flags)
        reducer = self._reducer
        self._reducer = GradientBuckets(self._trained, self._device)
        try:
            return super()._reduced_gradients(window, batches, step, flags)
        finally:
            self._reducer = reducer

    def _micro_batch(self, request: BatchRequest, batch: Any, step: int, index: int, *, is_last: bool) -> None:
        # What no_sync() does, without a context manager per micro-batch.
        self._ddp.require_backward_grad_sync = is_last
        super()._micro_batch(request, batch, step, index, is_last=is_last)

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        if self._by_hand:
            # DDP's forward may itself be collective: once, after its first reduction, it rebuilds its buckets.
            return super()._loss(batch)
        loss: tuple[Tensor, Tensor | int] = self._ddp(self._ask, batch)
        return loss
