"""Gradient sums over ranks without a wrapper around the model: buckets, filled by hooks where gradients accumulate.

As DistributedDataParallel (Li et al. 2020, https://arxiv.org/abs/2006.15704) sends a bucket while the backward pass
computes the next one, in a fixed order. The last bucket carries the numbers of the step in its tail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_not
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep._compat.torch import foreach_copy_
from lockstep.engine.distributed.staging import AdaptiveSpin, Group, all_reduce, wait, wire_device

#: Bytes of a bucket; the first one is smaller, so that it can be sent early (both as in DistributedDataParallel).
BUCKET_BYTES, FIRST_BYTES = 25 << 20, 1 << 20


class _Bucket:
    """Parameters whose gradients travel together, and where they lie in ``flat``."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, device: torch.device, tail: int) -> None:
        sizes = [p.numel() for p in parameters]
        self.parameters, self.waiting = parameters, set[int]()
        self.flat = torch.zeros(sum(sizes) + tail, dtype=dtype, device=device)
        *pieces, last = self.flat.split([*sizes, tail])
        self.tail: Tensor = last
        self.pieces = [_like(piece, p) for piece, p in zip(pieces, parameters, strict=True)]
        self.sent = self.flat
        self.work: dist.Work | None = None


def _like(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """``piece`` in the shape and memory layout of ``parameter``: a fused optimizer walks both through memory."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(parameter.dim())
    if not parameter.is_contiguous() and layout is not None and parameter.is_contiguous(memory_format=layout):
        return piece.as_strided(parameter.shape, parameter.stride())
    return piece.view(parameter.shape)


class GradientBuckets:
    """Sums the gradients of one optimizer over the ranks of ``group``.

    Args:
        parameters: the same on all ranks, in the same order.
        device: of this rank.
        group: ``None``: all ranks.
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
        split = _split(self.parameters, cap_bytes)
        own = bool(split) and split[-1][0].dtype in (torch.float32, torch.float64)
        self._buckets = [
            _Bucket(part, part[0].dtype, part[0].device, numbers * (own and number == len(split) - 1))
            for number, part in enumerate(split)
        ]
        if numbers and not own:
            self._buckets.append(_Bucket([], torch.float64, device, numbers))
        self._tail = self._buckets[-1].tail
        self._of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._launched, self._armed = 0, False

    @property
    def overlaps(self) -> bool:
        """Whether hooks are of use: there is more than one bucket."""
        return len(self._buckets) > 1

    @property
    def is_armed(self) -> bool:
        return self._armed

    @property
    def is_launched(self) -> bool:
        return self._launched == len(self._buckets)

    def arm(self) -> None:
        """The backward pass that follows is the last one of a step."""
        self._armed = True
        for bucket in self._buckets:
            bucket.waiting = {id(p) for p in bucket.parameters}

    def ready(self, parameter: Tensor) -> None:
        """The gradient of ``parameter`` is complete: called by its hook."""
        if not self._armed:
            return
        self._of[id(parameter)].waiting.discard(id(parameter))
        while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].waiting:
            self._launch(self._buckets[self._launched])

    def launch(self, numbers: Sequence[float | Tensor] = ()) -> None:
        """Send all that has not been sent, and ``numbers`` with it."""
        self._armed = False
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
        self._finish()
        for bucket in self._buckets:
            for parameter, piece in zip(bucket.parameters, bucket.pieces, strict=True):
                parameter.grad = piece
        return self._tail

    def discard(self) -> None:
        """Forget what is on its way. On all ranks alike."""
        if self.is_launched:
            self._finish()

    def _finish(self) -> None:
        for bucket in self._buckets:
            wait(bucket.work, self._group, self._look, self._spin)
            if self._staged:
                bucket.flat.copy_(bucket.sent)
        self._launched = 0

    def leave_out(self, used: Sequence[bool]) -> None:
        """Remove zeros that were sent for parameters without a gradient on any rank. Collective.

        An optimizer leaves parameters without a gradient alone; it would decay those whose gradient is zero.

        Args:
            used: whether each parameter had a gradient of this rank.
        """
        anywhere = all_reduce(torch.tensor(used, dtype=torch.float32, device=self._tail.device), self._group)
        for parameter, number in zip(self.parameters, anywhere.tolist(), strict=True):
            parameter.grad = parameter.grad if number else None


def _split(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Buckets in about the order in which a backward pass completes gradients; each has one type and device."""
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
    # Types that can carry the numbers come last.
    return sorted(parts, key=lambda part: part[0].dtype in (torch.float32, torch.float64))
