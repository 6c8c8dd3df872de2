"""``reproducibility: exact``: the same weights bit for bit on every world size that divides the lanes.

Each lane of a step is computed alone: with a separate forward and backward, dropout seed and BatchNorm statistics from
the same starting point. The results of lanes (gradients, loss and count, running statistics) are summed along one fixed
binary tree: the same bits for any distribution of lanes over ranks.

Floating-point addition is commutative but not associative, so a sum has the same bits wherever the same pairs are
added. A rank sums the subtree of its lanes; then ranks exchange and add in pairs (recursive doubling; Thakur,
Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH", section 4.4), which
continues the tree upwards. An empty lane is a leaf of zeros: to add it or to leave it out changes only the sign of
zeros, so those of the finished sum are made positive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep._compat.torch import foreach_add_, foreach_copy_
from lockstep.data.requests import BatchRequest
from lockstep.engine.distributed.buffers import Buffers
from lockstep.engine.distributed.staging import Group, wire_device
from lockstep.engine.strategies.base import Replica, Strategy
from lockstep.engine.strategies.reducers import FLAG_INTERVAL, Flags, Reduced, Reducer, check_change
from lockstep.hardware.world import World

Leaf = list[Tensor]
_NO_FLAGS = Flags()


class TreeSum:
    """Adds leaves in their order and in place, holding at most log₂(leaves) + 1. ``None``: empty lane."""

    def __init__(self) -> None:
        self._stack: list[tuple[int, Leaf | None]] = []

    def push(self, leaf: Leaf | None) -> None:
        """Add the next leaf. All leaves have tensors of the same types and shapes."""
        height = 0
        while self._stack and self._stack[-1][0] == height:
            left = self._stack.pop()[1]
            if left is not None and leaf is not None:
                foreach_add_(left, leaf)
            leaf = leaf if left is None else left
            height += 1
        self._stack.append((height, leaf))

    def result(self) -> Leaf | None:
        """Return the sum of all leaves, whose number is a power of two; ``None`` if all were empty."""
        assert len(self._stack) == 1, "the number of leaves must be a power of two"
        return self._stack[0][1]


class TreeAllReduce:
    """Sums lists of tensors over a power of two of ranks, in place and in one message; all ranks get the same bits."""

    def __init__(self, rank: int, world_size: int, group: Group = None) -> None:
        assert world_size & (world_size - 1) == 0, "the number of ranks must be a power of two"
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._layout: list[tuple[torch.dtype, torch.Size]] = []

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Reduce. A rank whose lanes were all empty passes zeros of the shapes that others pass. Collective."""
        if not tensors:
            return
        if self._world_size == 1:
            foreach_add_(list(tensors), 0)
            return
        # The widest types first, so that each begins at a multiple of its size.
        tensors = sorted(tensors, key=lambda tensor: (-tensor.itemsize, str(tensor.dtype)))
        layout = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if layout != self._layout:
            self._layout = layout
            self._make_buffers(tensors)
        foreach_copy_(self._views, tensors)
        if self._sent is not self._flat:
            self._sent.copy_(self._flat)
        distance = 1
        while distance < self._world_size:
            partner = self._rank ^ distance
            operations = [
                dist.P2POp(dist.isend, self._sent, group=self._group, group_peer=partner),
                dist.P2POp(dist.irecv, self._received, group=self._group, group_peer=partner),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            for partial_sum, partner_sum in self._sums:
                partial_sum += partner_sum
            distance *= 2
        for partial_sum, _ in self._sums:
            partial_sum += 0
        if self._sent is not self._flat:
            self._flat.copy_(self._sent)
        foreach_copy_(tensors, self._views)

    def _make_buffers(self, tensors: Sequence[Tensor]) -> None:
        """Allocate memory for ``tensors`` on their device, and for two copies on the device of messages, by type."""
        device = tensors[0].device
        wire = wire_device(device, self._group)
        sizes = [tensor.nbytes for tensor in tensors]
        self._flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        parts = zip(self._flat.split(sizes), tensors, strict=True)
        self._views = [part.view(tensor.dtype).view(tensor.shape) for part, tensor in parts]
        pinned = wire != device
        room = [torch.zeros(sum(sizes), dtype=torch.uint8, device=wire, pin_memory=pinned) for _ in "ab"]
        self._sent, self._received = room if pinned else (self._flat, room[1])
        by_type = Counter[torch.dtype]()
        for tensor in tensors:
            by_type[tensor.dtype] += tensor.nbytes
        cut = [flat.split([*by_type.values()]) for flat in (self._sent, self._received)]
        self._sums = [(a.view(dtype), b.view(dtype)) for dtype, a, b in zip(by_type, *cut, strict=True)]


class LaneSums:
    """Sums over lanes and ranks (:class:`TreeSum`); a rank's lanes come in order.

    Every lane starts from the same buffers. Afterwards running statistics are the mean over samples, and counters are
    those of lane 0. Each lane leaves ``parameters`` without a gradient.

    Args:
        device: of the numbers that are summed besides, in float64: loss, count and flags.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], buffers: Buffers | None, device: torch.device, world: World
    ) -> None:
        self._parameters = list(parameters)
        self._numbers = 2 + len(Flags._fields)
        self._device = device
        self._all_reduce = TreeAllReduce(world.rank, world.size)
        self._ranks = world.size
        self._statistics = buffers.tensors("mean") if buffers else []
        self._counters = buffers.tensors("max", "once") if buffers else []
        self.begin()

    def begin(self, flags: Flags = _NO_FLAGS) -> None:
        """Begin a step; ``flags``: of this rank, unless they are given to :meth:`reduced`."""
        self._tree = TreeSum()
        self._all_used = False
        self._flags = flags
        self._added: tuple[Tensor | float, ...] = ()
        self._starts = [buffer.clone() for buffer in (*self._statistics, *self._counters)]

    def add(self, total: Tensor | float, count: Tensor | float, *, is_last: bool = False) -> None:
        self._added = total.detach() if isinstance(total, Tensor) else total, count

    def end(self, request: BatchRequest) -> None:
        """Push the lane ``request`` with the sums that were added; those of a lane without samples are dropped."""
        self._tree.push(None if request.ghost or request.size == 0 else self._leaf(request, self._added))
        self._added = ()
        for parameter in self._parameters:
            parameter.grad = None
        for buffer, value in zip((*self._statistics, *self._counters), self._starts, strict=True):
            buffer.copy_(value)

    def _leaf(self, request: BatchRequest | None = None, numbers: Sequence[Any] = ()) -> Leaf:
        """Return the terms of a lane; without ``request`` zeros, for a rank without samples."""
        size = 0 if request is None else request.size
        used = [p.grad is not None for p in self._parameters]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        statistics = [
            buffer.double() * size if size else torch.zeros_like(buffer).double() for buffer in self._statistics
        ]
        is_first = request is not None and request.part == 0
        counters = [buffer.clone() if is_first else torch.zeros_like(buffer) for buffer in self._counters]
        sums = torch.zeros(self._numbers + len(self._parameters) + 1, dtype=torch.float64, device=self._device)
        if size:
            self._all_used = self._all_used or all(used)
            for column, number in enumerate(numbers):
                sums[column] = number
            # To copy a tensor to a GPU, the host would wait for all that the GPU has to do.
            sums[self._numbers : -1] = 1.0 if all(used) else torch.tensor(used)
            sums[-1] = size
        return [*gradients, *statistics, *counters, sums]

    def total(self, *last: float) -> Leaf:
        """Sum over all ranks, to be taken; ``last``: of this rank, added to the last numbers. Collective."""
        total = self._tree.result() or self._leaf()
        if any(last):
            total[-1][self._numbers - len(last) : self._numbers] += torch.tensor(last).to(total[-1])
        self._all_reduce(total)
        return total

    @torch.no_grad()
    def take(self, total: Leaf) -> Tensor:
        """Put gradients and buffers in place; the sums of the numbers: [numbers]."""
        number = len(self._parameters)
        sums = total[-1]
        # A parameter that no lane used has no gradient, as in one process: an optimizer leaves it alone.
        lanes = [1.0] * number if self._all_used else sums[self._numbers : -1].tolist()
        for parameter, gradient, used in zip(self._parameters, total[:number], lanes, strict=True):
            parameter.grad = gradient if used else None
        values = iter(total[number:])
        for buffer in self._statistics:
            buffer.copy_(next(values) / sums[-1])
        for buffer in self._counters:
            buffer.copy_(next(values))
        return sums[: self._numbers]

    def reduced(self, step: int, flags: Flags | None = None) -> Reduced:
        """Sum over lanes and ranks, and take the sums, unless a change is announced. Collective."""
        flags = self._flags if flags is None else flags
        announces = flags.changed > 0
        if announces:  # no lane has run
            self.end(BatchRequest(0, 0, 0, 0))
        total = self.total(*flags)
        sums = total[-1][: self._numbers] if announces else self.take(total)
        if self._ranks == 1:
            return Reduced(sums[0], sums[1], 1.0, flags)
        is_read = sums.device.type == "cpu" or step % FLAG_INTERVAL == 0  # which waits for a GPU
        agreed = check_change(Flags(*sums[2:].tolist()), self._ranks, announced=announces) if is_read else None
        return Reduced(sums[0].clone(), sums[1].clone(), 1.0, agreed)


class ExactStrategy(Strategy):
    """One or more ranks; a window's requests are this rank's lanes, empty ones included."""

    _merges = "exact"

    def __init__(self, replica: Replica, world: World) -> None:
        self._world = world
        super().__init__(replica)

    def _make_reducer(self) -> Reducer:
        self._lanes = LaneSums(self._trained, self.passes.buffers, self._device, self._world)
        return self._lanes

    def _micro_batch(self, request: BatchRequest, batch: Any, step: int, index: int, *, is_last: bool) -> None:
        if request.size:
            total, count = self._forward_pass(batch, step, request.part)
            self._lanes.add(total, count)
            self._backward(total)
        self._lanes.end(request)
