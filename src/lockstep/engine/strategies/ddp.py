"""``strategy: ddp``: one process for each device; torch's DistributedDataParallel averages the gradients.

For small models on CPUs, gradients, count, loss and flags of a step travel in one all-reduce instead
(:class:`FlatStrategy`): such a model has no backward pass to hide communication behind, and pays for the reducer and
for a second all-reduce that carries the count. Its buckets (:class:`GradientBuckets`) serve sessions, too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from itertools import repeat
from operator import is_not
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep._compat.torch import broadcast_module, check_shapes, foreach_copy_
from lockstep.config import RunConfig
from lockstep.data.requests import Window
from lockstep.engine.distributed.staging import AdaptiveSpin, Group, all_reduce, wait, wire_device
from lockstep.engine.strategies.base import (
    Asked,
    Flags,
    RanksStrategy,
    Reduced,
    Replica,
    StepSums,
    Strategy,
    check_change,
)
from lockstep.planning import Plan

#: Bytes of a bucket; the first one is smaller, so that it can be sent early (both as in DistributedDataParallel).
BUCKET_BYTES, FIRST_BYTES = 25 << 20, 1 << 20
#: A sum over up to 4,096 ranks of numbers below this stays below 2²⁴, and so is exact in float32.
_DIGIT = 2.0**12
#: Types that can carry the numbers of a step.
_EXACT_TYPES = (torch.float32, torch.float64)
#: torch 2.13 renamed the argument.
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _RENAMED else "broadcast_buffers"


def build(replica: Replica, config: RunConfig, plan: Plan) -> Strategy:
    """The strategy of one rank, as the plan chose: gradients in one message, or in DDP's buckets. Collective."""
    if plan.one_message:
        return FlatStrategy(replica)
    unused, cap_mb = config.distributed.find_unused_parameters, config.distributed.bucket_cap_mb
    return DdpStrategy(replica, find_unused_parameters=unused, bucket_cap_mb=cap_mb)


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
        check_change(flags, dist.get_world_size(), announced=True)
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
        check_change(flags, dist.get_world_size())
        return Reduced(torch.tensor(total, dtype=torch.float64), count, 1.0, flags)

    def _all_reduce(self, numbers: Sequence[float], *, ran: bool) -> tuple[float, float, Flags]:
        """Sums over ranks: of gradients, where they belong, and of ``numbers``; ``ran``: there are gradients here."""
        used = [p.grad is not None for p in self._trained]
        self._buckets.launch([*numbers, float(ran and not all(used))])
        *sums, unused = self._buckets.wait().tolist()
        if unused:
            self._buckets.leave_out(used)
        return unpack(sums)


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
            _SYNC_BUFFERS: False,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": True,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._sums = StepSums(replica.device)
        check_shapes(list(self._trained))
        broadcast_module(replica.module)
        self._wrap()
        self._by_hand = False

    def _wrap(self) -> None:
        self._ddp = DistributedDataParallel(Asked(self._model, self.module), init_sync=False, **self._settings)

    def _adapt(self) -> None:
        self._sums.announce_change()
        super()._adapt()
        del self._ddp  # and the hooks that it has on parameters
        gc.collect()
        self._wrap()

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
            used = [p.grad is not None for p in self._trained]
            buckets = GradientBuckets(self._trained, self._device)
            buckets.launch()
            buckets.wait()
            buckets.leave_out(used)
            self._sums.send()
        return self._sums.reduced(step, 1.0 if window.irregular else float(dist.get_world_size()))

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        if self._by_hand:
            # DDP's forward may itself be collective: once, after its first reduction, it rebuilds its buckets.
            return super()._loss(batch)
        loss: tuple[Tensor, Tensor | int] = self._ddp(self._ask, batch)
        return loss


class GradientBuckets:
    """Gradient sums over the ranks of ``group`` without a wrapper around the model, of one optimizer's parameters.

    As DistributedDataParallel (Li et al. 2020, https://arxiv.org/abs/2006.15704) sends a bucket while the backward
    pass computes the next one, in a fixed order. The last bucket carries the numbers of the step in its tail.

    Args:
        parameters: the same on all ranks, in the same order.
        numbers: how many numbers travel with the gradients.
        cap_bytes: of a bucket; 0: one for all gradients of a type.
        look: called now and then while gloo waits; raises when another rank will not come.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        group: Group = None,
        *,
        numbers: int = 0,
        cap_bytes: int = 0,
        look: Callable[[], None] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._group, self._look, self._spin = group, look, AdaptiveSpin()
        self._staged = wire_device(device, group) != device
        *split, last = _split(self.parameters, cap_bytes, extra=bool(numbers))
        self._buckets = [*(_Bucket(part, device, 0) for part in split), _Bucket(last, device, numbers)]
        self._tail = self._buckets[-1].tail
        self._of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._launched, self.is_armed = 0, False
        #: Whether hooks are of use.
        self.overlaps = len(self._buckets) > 1

    @property
    def is_launched(self) -> bool:
        return self._launched == len(self._buckets)

    def arm(self) -> None:
        """The backward pass that follows is the last one of a step."""
        self.is_armed = True
        for bucket in self._buckets:
            bucket.waiting = {id(p) for p in bucket.parameters}

    def ready(self, parameter: Tensor) -> None:
        """The gradient of ``parameter`` is complete: called by its hook."""
        if not self.is_armed:
            return
        self._of[id(parameter)].waiting.discard(id(parameter))
        while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].waiting:
            self._launch(self._buckets[self._launched])

    def launch(self, numbers: Sequence[float | Tensor] = ()) -> None:
        """Send all that has not been sent, and ``numbers`` with it."""
        self.is_armed = False
        unread = {}
        if self._tail.device.type != "cpu":  # where reading a tensor would wait
            unread = {place: number for place, number in enumerate(numbers) if isinstance(number, Tensor)}
        known = [0.0 if place in unread else number for place, number in enumerate(numbers)] if unread else numbers
        sent = torch.tensor(known, dtype=self._tail.dtype)
        # From other memory than page-locked, the host would wait for all that the GPU has to do.
        self._tail.copy_(sent.pin_memory() if self._tail.is_cuda else sent, non_blocking=True)
        for place, number in unread.items():
            self._tail[place].copy_(number)
        while not self.is_launched:
            self._launch(self._buckets[self._launched])

    @torch.no_grad()  # gradients may have a graph (create_graph)
    def _launch(self, bucket: _Bucket) -> None:
        gradients = [p.grad for p in bucket.parameters]
        if all(map(is_not, gradients, repeat(None))):
            foreach_copy_(bucket.pieces, gradients)
        else:
            for piece, gradient in zip(bucket.pieces, gradients, strict=True):
                piece.zero_() if gradient is None else piece.copy_(gradient)
        bucket.sent = bucket.flat.cpu() if self._staged else bucket.flat
        bucket.work = dist.all_reduce(bucket.sent, group=self._group, async_op=True)
        self._launched += 1

    def wait(self) -> Tensor:
        """Wait for the sums, put them into ``p.grad``, and return those of the numbers."""
        self.discard()
        for bucket in self._buckets:
            for parameter, piece in zip(bucket.parameters, bucket.pieces, strict=True):
                parameter.grad = piece
        return self._tail

    def discard(self) -> None:
        """Wait for what is on its way, if anything is, and leave the gradients as they are."""
        if not self.is_launched:
            return
        for bucket in self._buckets:
            wait(bucket.work, self._group, self._look, self._spin)
            if self._staged:
                bucket.flat.copy_(bucket.sent)
        self._launched = 0

    def leave_out(self, used: Sequence[bool]) -> None:
        """Remove zeros that were sent for parameters without a gradient on any rank; ``used``: on this one. Collective.

        An optimizer leaves parameters without a gradient alone; it would decay those whose gradient is zero.
        """
        anywhere = all_reduce(torch.tensor(used, dtype=torch.float32, device=self._tail.device), self._group)
        for parameter, number in zip(self.parameters, anywhere.tolist(), strict=True):
            parameter.grad = parameter.grad if number else None


class _Bucket:
    """Parameters whose gradients travel together, and where they lie in ``flat``; ``tail``: for numbers."""

    def __init__(self, parameters: list[nn.Parameter], device: torch.device, numbers: int) -> None:
        sizes = [p.numel() for p in parameters]
        dtype, device = (parameters[0].dtype, parameters[0].device) if parameters else (torch.float64, device)
        self.parameters, self.waiting = parameters, set[int]()
        self.flat = torch.zeros(sum(sizes) + numbers, dtype=dtype, device=device)
        *pieces, tail = self.flat.split([*sizes, numbers])
        self.tail: Tensor = tail
        self.pieces = [_like(piece, p) for piece, p in zip(pieces, parameters, strict=True)]
        self.sent = self.flat
        self.work: dist.Work | None = None


def _like(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """``piece`` in the shape and memory layout of ``parameter``: a fused optimizer walks both through memory."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim())
    if not parameter.is_contiguous() and layout is not None and parameter.is_contiguous(memory_format=layout):
        return piece.as_strided(parameter.shape, parameter.stride())
    return piece.view(parameter.shape)


def _split(parameters: Sequence[nn.Parameter], cap_bytes: int, *, extra: bool) -> list[list[nn.Parameter]]:
    """Buckets in about the order in which a backward pass completes gradients; each has one type and device.

    ``extra``: numbers travel with the last bucket, so it has a type that can carry them, or is empty.
    """
    parts: list[list[nn.Parameter]] = []
    open_parts: dict[Any, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        key = parameter.dtype, parameter.device
        part, size = open_parts.get(key, ([], 0))
        if not part:
            parts.append(part)
        part.append(parameter)
        size += parameter.numel() * parameter.element_size()
        limit = min(FIRST_BYTES, cap_bytes) if parts[0] is part else cap_bytes
        full = bool(cap_bytes) and size >= limit
        open_parts[key] = ([], 0) if full else (part, size)
    parts.sort(key=lambda part: part[0].dtype in _EXACT_TYPES)
    return [*parts, []] if not parts or (extra and parts[-1][0].dtype not in _EXACT_TYPES) else parts
