"""Sums along one fixed binary tree: the same bits however the leaves are spread over ranks.

Floating-point addition is commutative but not associative, so a sum has the same bits wherever the
same pairs are added. Leaves are lanes. A rank sums the subtree of its own lanes; then ranks exchange and
add in pairs (recursive doubling; Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH", section 4.4), which continues the same tree upwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Leaf = list[Tensor]


class TreeSum:
    """Adds leaves as they come, holding at most log₂(leaves) + 1 of them.

    A leaf belongs to the tree once it is pushed: sums are made in its tensors. ``None`` is an empty lane.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[int, Leaf | None]] = []

    def push(self, leaf: Leaf | None) -> None:
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
    torch._foreach_add_(left, right)
    return left


def all_reduce_tree(tensors: Sequence[Tensor], rank: int, world_size: int) -> None:
    """Sum ``tensors`` over ranks in place, by recursive doubling; the bits are equal on all ranks.

    A rank whose lanes were all empty passes zeros. Negative zeros become positive, since x + 0.0 may or
    may not have happened to them, depending on the ranks.

    Args:
        world_size: a power of two.
    """
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        group = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in group])
        staged = flat.cpu() if dist.is_initialized() and world_size > 1 and dist.get_backend() == "gloo" else flat
        other = torch.empty_like(staged)
        distance = 1
        while distance < world_size:
            _exchange(staged, other, rank ^ distance)
            staged += other
            distance *= 2
        staged += 0.0
        pieces = staged.to(flat.device).split([t.numel() for t in group])
        torch._foreach_copy_(group, [piece.view_as(t) for piece, t in zip(pieces, group, strict=True)])


def _exchange(mine: Tensor, theirs: Tensor, partner: int) -> None:
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
    ):
        work.wait()
