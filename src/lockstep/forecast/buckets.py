"""When DistributedDataParallel reduces what: its buckets, and their messages beside the backward. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: torch.nn.parallel.DistributedDataParallel's own: buckets of 25 MiB, the first of 1 MiB so that messages begin early.
DEFAULT_BUCKET, FIRST_BUCKET = 25 << 20, 1 << 20


class Bucket(NamedTuple):
    """Gradients that travel together: their bytes, and the share of the backward after which all are there."""

    size: int
    ready: float


def buckets(sizes: Sequence[int], ready: Sequence[float], cap: int | None = None) -> list[Bucket]:
    """DDP's buckets after its first step, when it has seen in which order gradients come.

    A bucket closes with the gradient that brings it to its cap (torch's ``compute_bucket_assignment_by_size``).

    Args:
        sizes: bytes of each gradient, in the order in which the backward finishes them.
        ready: when, as shares of the backward; ascending.
        cap: bytes; ``None``: torch's default, with its smaller first bucket.
    """
    found: list[Bucket] = []
    filled = 0
    for size, when in zip(sizes, ready, strict=True):
        filled += size
        limit = cap if cap is not None else DEFAULT_BUCKET if found else FIRST_BUCKET
        if filled >= limit:
            found.append(Bucket(filled, when))
            filled = 0
    if filled:
        found.append(Bucket(filled, ready[-1]))
    return found


def exposed(messages: Sequence[tuple[float, float]], backward_s: float) -> float:
    """Seconds after the backward until the last message has arrived.

    Args:
        messages: (when it may start, how long it takes), in the order in which they are sent; one at a time.
    """
    free = 0.0
    for ready, seconds in messages:
        free = max(free, ready) + seconds
    return max(0.0, free - backward_s)
