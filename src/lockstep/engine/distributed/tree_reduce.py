"""Sums along one fixed binary tree: the same bits however the leaves are spread over ranks.

Floating-point addition is commutative but not associative, so a sum has the same bits wherever the
same pairs are added. Leaves are lanes. A rank sums the subtree of its lanes; then ranks exchange and
add in pairs (recursive doubling; Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH", section 4.4), which continues the same tree upwards.

An empty lane is a leaf of zeros. Adding one, or leaving it out, differs in nothing but the sign of a
zero; so the zeros of the finished sum are made positive, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep._compat.torch import foreach_add_, foreach_copy_
from lockstep.engine.distributed.staging import Group, wire_device

Leaf = list[Tensor]
#: Sections of a buffer start at multiples of this, which suits every type and vector width.
_ALIGNMENT = 64


class TreeSum:
    """Adds leaves as they come, in order, holding at most log₂(leaves) + 1 of them.

    A leaf belongs to the tree once it is pushed: sums are made in its tensors, and :meth:`result` is
    made of the first leaf's. ``None`` is an empty lane.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[int, Leaf | None]] = []

    def push(self, leaf: Leaf | None) -> None:
        """Add the next leaf. All leaves have tensors of the same types and shapes."""
        height = 0
        while self._stack and self._stack[-1][0] == height:
            leaf = _add(self._stack.pop()[1], leaf)
            height += 1
        self._stack.append((height, leaf))

    def result(self) -> Leaf | None:
        """The sum of all leaves, whose number is a power of two; ``None`` if all were empty."""
        assert len(self._stack) == 1, "the number of leaves must be a power of two"
        return self._stack[0][1]


def _add(left: Leaf | None, right: Leaf | None) -> Leaf | None:
    if left is None or right is None:
        return right if left is None else left
    foreach_add_(left, right)
    return left


class TreeAllReduce:
    """Sums lists of tensors over ranks, in place; all ranks get the same bits.

    It keeps its buffers (two copies of the tensors, or four where they are staged through the host),
    so one object serves all steps of a training. Tensors of different types travel in one message.

    Args:
        world_size: ranks in ``group``, a power of two; with one, there is no group.
    """

    def __init__(self, rank: int, world_size: int, group: Group = None) -> None:
        assert world_size & (world_size - 1) == 0, "the number of ranks must be a power of two"
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._buffers: _Buffers | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Collective. A rank whose lanes were all empty passes zeros of the shapes that others pass."""
        if not tensors:
            return
        if self._world_size == 1:
            foreach_add_(list(tensors), 0)
            return
        layout = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
        if self._buffers is None or self._buffers.layout != layout:
            device = tensors[0].device
            self._buffers = _Buffers(layout, device, wire_device(device, self._group))
        buffers = self._buffers
        buffers.load(tensors)
        distance = 1
        while distance < self._world_size:
            self._exchange(buffers.sent, buffers.received, self._rank ^ distance)
            for mine, theirs in buffers.sections:
                mine += theirs
            distance *= 2
        for mine, _ in buffers.sections:
            mine += 0
        buffers.store(tensors)

    def _exchange(self, sent: Tensor, received: Tensor, partner: int) -> None:
        operations = [
            dist.P2POp(dist.isend, sent, group=self._group, group_peer=partner),
            dist.P2POp(dist.irecv, received, group=self._group, group_peer=partner),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


_Layout = tuple[tuple[torch.dtype, torch.Size], ...]


class _Buffers:
    """Room for one list of tensors on their device, and for two where they travel.

    ``sections`` are the parts of (``sent``, ``received``) that hold one type each.
    """

    def __init__(self, layout: _Layout, device: torch.device, wire: torch.device) -> None:
        self.layout = layout
        sizes = dict.fromkeys((dtype for dtype, _ in layout), 0)
        for dtype, shape in layout:
            sizes[dtype] += prod(shape) * dtype.itemsize
        offsets, length = {}, 0
        for dtype, size in sizes.items():
            offsets[dtype] = length
            length += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._flat = torch.zeros(length, dtype=torch.uint8, device=device)
        pinned = wire != device
        self.sent = torch.zeros(length, dtype=torch.uint8, device=wire, pin_memory=True) if pinned else self._flat
        self.received = torch.zeros(length, dtype=torch.uint8, device=wire, pin_memory=pinned)
        self.sections = [
            tuple(flat[offsets[dtype] : offsets[dtype] + size].view(dtype) for flat in (self.sent, self.received))
            for dtype, size in sizes.items()
        ]
        self._views = []
        for dtype, shape in layout:
            size = prod(shape) * dtype.itemsize
            self._views.append(self._flat[offsets[dtype] : offsets[dtype] + size].view(dtype).view(shape))
            offsets[dtype] += size

    def load(self, tensors: Sequence[Tensor]) -> None:
        foreach_copy_(self._views, list(tensors))
        if self.sent is not self._flat:
            self.sent.copy_(self._flat)

    def store(self, tensors: Sequence[Tensor]) -> None:
        if self.sent is not self._flat:
            self._flat.copy_(self.sent)
        foreach_copy_(list(tensors), self._views)
