"""Sums of a step over its micro-batches and over ranks: gradients, loss, count, and requests to agree on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import is_not
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep._compat.torch import foreach_copy_
from lockstep.engine.distributed.staging import Group, all_reduce, wire_device, world_size
from lockstep.errors import TaskError

#: Bytes of a bucket; the first one is smaller, so that it can be sent early (both as in DistributedDataParallel).
BUCKET_BYTES = 25 << 20
FIRST_BYTES = 1 << 20
#: A sum over up to 4,096 ranks of numbers below this stays below 2²⁴, and so is exact in float32.
_DIGIT = 2.0**12
#: Types that can carry the numbers of a step.
_EXACT_TYPES = (torch.float32, torch.float64)
#: On a GPU, reading the agreed flags costs a host sync; they are read every this many steps.
FLAG_INTERVAL = 16


class Flags(NamedTuple):
    """Requests that all ranks must agree on: they travel with the step's count, as sums over ranks.

    ``changed``: parameters were frozen or unfrozen since the step before.
    """

    stop: float = 0.0
    time_up: float = 0.0
    save: float = 0.0
    changed: float = 0.0


class Reduced(NamedTuple):
    """Sums over all ranks and micro-batches of a step. ``flags`` is ``None`` when they were not read."""

    total: Tensor
    count: Tensor | float  # type: ignore[assignment]  # hides tuple.count()
    divisor: float
    flags: Flags | None


def check_change(flags: Flags, ranks: int, *, announced: bool) -> Flags:
    """Return ``flags``, summed over ``ranks``; refuse a change on some ranks only. ``announced``: this one has it."""
    if flags.changed != (ranks if announced else 0):
        raise TaskError(
            "parameters were frozen or unfrozen on some ranks only",
            why=f"requires_grad changed on {flags.changed:.0f} of {ranks} ranks before this step",
            fix="call requires_grad_() on every rank alike: hooks run on all of them",
        )
    return flags


class Reducer(Protocol):
    """Sums the micro-batches of all ranks in a step. Gradients are summed in ``p.grad``."""

    def begin(self, flags: Flags) -> None:
        """Begin a step; ``flags``: of this rank."""

    def add(self, total: Tensor | float, count: Tensor | float, *, is_last: bool = False) -> None:
        """Add a micro-batch of this rank, whose backward pass follows; ``is_last``: on every rank."""

    def reduced(self, step: int) -> Reduced:
        """Sum over all ranks. Collective."""


def announce_change(reducer: Reducer) -> None:
    """Raise :class:`TaskError` unless the same parameters have changed on all ranks as on this one. Collective."""
    reducer.begin(Flags(changed=1.0))
    reducer.reduced(0)


class Alone:
    """The sums of one process."""

    def begin(self, flags: Flags) -> None:
        self._total: Any = 0.0
        self._count: Any = 0.0
        self._flags = flags

    def add(self, total: Tensor | float, count: Tensor | float, *, is_last: bool = False) -> None:
        # New tensors: a CUDA graph writes the next total to the same memory.
        self._total = self._total + (total.detach() if isinstance(total, Tensor) else total)
        self._count = self._count + (count.detach() if isinstance(count, Tensor) else count)

    def reduced(self, step: int) -> Reduced:
        return Reduced(self._total, self._count, 1.0, self._flags)


def pack(total: Any, count: Any, flags: Flags) -> list[Any]:
    """Pack numbers of a rank for sums in float32: a count of whole items below 2³⁶ comes through exactly.

    ``total`` and ``count`` may be tensors in float64, which are not read.
    """
    rest = count // _DIGIT
    low = count % _DIGIT
    return [total, rest // _DIGIT, rest % _DIGIT, low, *flags]


def unpack(sums: Iterable[Any]) -> tuple[Any, Any, Flags]:
    """Unpack the sums of :func:`pack`: total, count, flags."""
    total, high, mid, low, *flags = sums
    return total, (high * _DIGIT + mid) * _DIGIT + low, Flags(*flags)


#: In the tail of the last bucket: what ``pack`` gives, then the parts of ranks, their squares, and unused gradients.
NUMBERS = len(pack(0.0, 0.0, Flags())) + 3


class GradientBuckets:
    """Gradient sums over the ranks of ``group`` without a wrapper around the model, of one optimizer's parameters.

    As DistributedDataParallel (Li et al. 2020, https://arxiv.org/abs/2006.15704) sends a bucket while the backward
    pass computes the next one, in a fixed order. The last bucket carries the numbers of the step in its tail.

    Args:
        parameters: the same on all ranks, in the same order.
        cap_bytes: of a bucket; 0: one for all gradients of a type.
        divisor: of the gradients, where others reduce them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        group: Group = None,
        *,
        cap_bytes: int = 0,
        divisor: float = 1.0,
    ) -> None:
        self.parameters = list(parameters)
        self._divisor = divisor
        self._group = group
        self._staged = wire_device(device, group) != device
        *split, last = _split(self.parameters, cap_bytes)
        self._buckets = [*(_Bucket(part, device, 0) for part in split), _Bucket(last, device, NUMBERS)]
        self._tail = self._buckets[-1].tail
        self._of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._launched = 0
        self.is_armed = False
        self._reads = False
        #: Whether ranks have added different numbers of parts to the latest step.
        self.is_uneven = False
        #: Whether hooks are of use.
        self.overlaps = len(self._buckets) > 1

    @property
    def is_launched(self) -> bool:
        return self._launched == len(self._buckets)

    def arm(self) -> None:
        """Announce the last backward pass of a step."""
        self.is_armed = True
        for bucket in self._buckets:
            bucket.waiting = {id(p) for p in bucket.parameters}

    def ready(self, parameter: Tensor) -> None:
        """Handle the complete gradient of ``parameter``: called by its hook."""
        if not self.is_armed:
            return
        self._of[id(parameter)].waiting.discard(id(parameter))
        while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].waiting:
            self._launch(self._buckets[self._launched])

    def begin(self, flags: Flags) -> None:
        self._total: Any = 0.0
        self._count: Any = 0.0
        self._parts = 0
        self._flags = flags

    def add(self, total: Tensor | float, count: Tensor | float, *, is_last: bool = False) -> None:
        self._total = self._total + _number(total)
        self._count = self._count + _number(count)
        self._parts += 1
        if is_last and not self.parameters:  # the numbers travel while the backward pass runs
            self.send()

    def send(self) -> None:
        """Send all that has not been sent, and the numbers with it."""
        self._used = [p.grad is not None for p in self.parameters]
        parts = self._parts
        unused = float(parts > 0 and not all(self._used))
        numbers = [*pack(self._total, self._count, self._flags), float(parts), float(parts**2), unused]
        self.is_armed = False
        unread = {}
        if self._tail.device.type != "cpu":  # where reading a tensor would wait
            unread = {column: number for column, number in enumerate(numbers) if isinstance(number, Tensor)}
        values = [0.0 if column in unread else number for column, number in enumerate(numbers)] if unread else numbers
        sent = torch.tensor(values, dtype=self._tail.dtype)
        # From other memory than page-locked, the host would wait for all that the GPU has to do.
        self._tail.copy_(sent.pin_memory() if self._tail.is_cuda else sent, non_blocking=True)
        for column, number in unread.items():
            self._tail[column].copy_(number)
        while not self.is_launched:
            self._launch(self._buckets[self._launched])

    def reduced(self, step: int) -> Reduced:
        if not self.is_launched:
            self.send()
        tail = self._wait()
        if not (self._reads or tail.device.type == "cpu" or step % FLAG_INTERVAL == 0):
            # Zeros stand in for a gradient that no rank has, until numbers are read again.
            total, count, _ = unpack(tail[:-3].double())
            return Reduced(total, count, self._divisor, None)
        *numbers, parts, squares, unused = tail.tolist()
        if unused:
            self._reads = True
            self._leave_out()
        total, count, flags = unpack(numbers)
        ranks = world_size(self._group)
        self.is_uneven = ranks * squares != parts**2
        check_change(flags, ranks, announced=self._flags.changed > 0)
        return Reduced(torch.tensor(total, dtype=torch.float64), count, self._divisor, flags)

    @torch.no_grad()  # gradients may have a graph (create_graph)
    def _launch(self, bucket: _Bucket) -> None:
        gradients = [p.grad for p in bucket.parameters]
        if gradients and all(map(is_not, gradients, repeat(None))):
            foreach_copy_(bucket.pieces, gradients)
        else:
            for piece, gradient in zip(bucket.pieces, gradients, strict=True):
                piece.zero_() if gradient is None else piece.copy_(gradient)
        bucket.sent = bucket.flat.cpu() if self._staged else bucket.flat
        bucket.work = dist.all_reduce(bucket.sent, group=self._group, async_op=True)
        self._launched += 1

    def _wait(self) -> Tensor:
        """Wait for the sums, put them into ``p.grad``, and return those of the numbers."""
        self.discard()
        for bucket in self._buckets:
            for parameter, piece in zip(bucket.parameters, bucket.pieces, strict=True):
                parameter.grad = piece
        return self._tail

    def discard(self) -> None:
        """Wait for messages in flight, and leave the gradients as they are."""
        if not self.is_launched:
            return
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            if self._staged:
                bucket.flat.copy_(bucket.sent)
        self._launched = 0

    def _leave_out(self) -> None:
        """Remove zeros that were sent for parameters without a gradient on any rank. Collective.

        An optimizer leaves parameters without a gradient alone; it would decay those whose gradient is zero.
        """
        anywhere = all_reduce(torch.tensor(self._used, dtype=torch.float32, device=self._tail.device), self._group)
        for parameter, number in zip(self.parameters, anywhere.tolist(), strict=True):
            parameter.grad = parameter.grad if number else None


def step_sums(device: torch.device, divisor: float = 1.0) -> Reducer:
    """Sum the numbers of a step over ranks, beside gradients that torch reduces and divides by ``divisor``."""
    return GradientBuckets((), device, divisor=divisor) if dist.is_initialized() else Alone()


def _number(value: Tensor | float) -> Tensor | float:
    """Return a number in double precision: on the host, or on a GPU, for which the host would wait."""
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" else value.detach().double()
    return value


class _Bucket:
    """Parameters whose gradients travel together, and their slices of ``flat``; ``tail``: for numbers."""

    def __init__(self, parameters: list[nn.Parameter], device: torch.device, numbers: int) -> None:
        sizes = [p.numel() for p in parameters]
        dtype, device = (parameters[0].dtype, parameters[0].device) if parameters else (torch.float64, device)
        self.parameters = parameters
        self.waiting = set[int]()
        self.flat = torch.zeros(sum(sizes) + numbers, dtype=dtype, device=device)
        *pieces, tail = self.flat.split([*sizes, numbers])
        self.tail: Tensor = tail
        self.pieces = [_like(piece, p) for piece, p in zip(pieces, parameters, strict=True)]
        self.sent = self.flat
        self.work: dist.Work | None = None


def _like(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return ``piece`` in the shape and memory layout of ``parameter``: a fused optimizer walks both through memory."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim())
    if not parameter.is_contiguous() and layout is not None and parameter.is_contiguous(memory_format=layout):
        return piece.as_strided(parameter.shape, parameter.stride())
    return piece.view(parameter.shape)


def _split(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets in about the order of a backward pass; each has one type and device.

    Numbers travel with the last bucket, so it has a type that can carry them, or is empty.
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
    return [*parts, []] if not parts or parts[-1][0].dtype not in _EXACT_TYPES else parts
