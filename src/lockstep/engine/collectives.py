"""Communication between ranks for everything that is not a gradient.

The same calls work on one process. Objects and flags travel over gloo, so that they never wait for a
GPU and never mix with the gradient traffic of another backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lockstep.hardware.world import World

T = TypeVar("T")


class Collectives:
    """Rank, size and the collectives among all ranks of a run.

    Every method is collective: all ranks call it in the same order. A rank that does not come makes the
    others fail after ``timeout_s`` instead of waiting for ever.
    """

    def __init__(self, world: World, *, timeout_s: float = 600.0) -> None:
        self.rank, self.size = world.rank, world.size
        self.is_main = world.is_main
        self.local_rank = world.local_rank
        self.group: dist.ProcessGroup | None = None
        if self.size > 1:
            # A group of its own: DDP's reducer issues collectives from the autograd thread.
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def broadcast(self, value: T, source: int = 0) -> T:
        """``source``'s value, on every rank. Any picklable object."""
        if self.group is None:
            return value
        box = [value if self.rank == source else None]
        dist.broadcast_object_list(box, src=source, group=self.group)
        return box[0]  # type: ignore[return-value]

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, value: T, target: int = 0) -> list[T] | None:
        """Every rank's value, by rank, on ``target``; ``None`` elsewhere."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == target else None
        dist.gather_object(value, values, dst=target, group=self.group)
        return values

    def sum(self, *values: float) -> tuple[float, ...]:
        """Element-wise sums over ranks, in float64."""
        if self.group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        return tuple(tensor.tolist())

    def weighted_mean(self, value: float, count: float) -> float:
        """Σ value·count / Σ count over ranks: the mean of what the ranks counted, whatever each one's share."""
        total, counts = self.sum(value * count if count else 0.0, count)
        return total / counts if counts else float("nan")

    def any(self, flag: bool) -> bool:
        return self.sum(float(flag))[0] > 0

    @contextmanager
    def main_first(self, *, per_node: bool = False) -> Iterator[None]:
        """Rank 0 (or each node's first rank) runs the body before the others; its failure fails all of them."""
        first = self.local_rank == 0 if per_node else self.is_main
        error: BaseException | None = None
        if first:
            try:
                yield
            except BaseException as caught:
                error = caught
        failed = self.any(error is not None)
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("the first rank failed in a section that the others wait for; see its log")
        if not first:
            yield
