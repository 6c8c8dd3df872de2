"""The length-bucketed order for speech and text: like goes with like, so padding is short.

A pure function of (seed, epoch, position), as :mod:`lockstep.data.order` is, and of nothing that a
machine brings along: not of the batch, the lanes or the ranks. An epoch of the underlying order is
cut into windows of a fixed number of samples; a window is sorted by length and cut into blocks, and
its blocks are shuffled. A wide window makes for less padding, a narrow one for more mixing.

Neighbours within a block grow in length, so parts of a step that run at the same time are equal work
only when they take strided items of it (0, L, 2L, … of L parts), not contiguous ones. :func:`deal`
lays a step's items out so that its contiguous parts hold strided items, whoever takes how many of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.order import BlockOrder, Order, derive_key, shuffled
from lockstep.data.sampling import SampleOrder
from lockstep.errors import DataError
from lockstep.planning.order import check_sizes


class BucketedOrder(BlockOrder):
    """``order``, rearranged by length within windows of ``window`` samples.

    Args:
        order: the order that the windows are cut from.
        lengths: one number per sample, in any unit: shape [samples of the data set]. A memory map stays one.
        window: samples sorted together, a multiple of ``block``; stored with the run.
        block: samples that stay together in order of length; stored with the run.

    Raises:
        ConfigError: ``window`` is not a positive multiple of ``block``.
        DataError: ``lengths`` is not one number per sample.
    """

    def __init__(self, order: SampleOrder, lengths: Sequence[float] | NDArray[Any], window: int, block: int) -> None:
        check_sizes(window, block)
        self._lengths = check_lengths(lengths, order.samples if type(order) is Order else len(lengths))
        self.order, self.samples, self.repeats = order, order.samples, order.repeats
        self.seed, self.block, self._blocks = order.seed, window, block

    def _compute(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """A window."""
        samples = self.order.slice(epoch, start, stop)
        # A stable sort: equal lengths keep their random order.
        samples = samples[np.argsort(self._lengths[samples], kind="stable")]
        key = derive_key("blocks", self.order.seed, epoch, start // self.block)
        blocks = shuffled(-(-len(samples) // self._blocks), key)
        places = (blocks[:, None] * self._blocks + np.arange(self._blocks)).reshape(-1)
        window: NDArray[np.int64] = samples[places[places < len(samples)]]
        return window


def check_lengths(lengths: Sequence[float] | NDArray[Any], samples: int) -> NDArray[Any]:
    """``lengths`` as an array of shape [samples].

    Raises:
        DataError: it is not one number per sample.
    """
    given: NDArray[Any] = np.asanyarray(lengths)
    if given.shape != (samples,) or given.dtype.kind not in "uif":
        raise DataError(
            f"lengths of shape {given.shape} and type {given.dtype} do not fit {samples} samples",
            why="a length-bucketed order needs one number per sample",
            fix=f"give a one-dimensional array of {samples} lengths",
        )
    return given


def hash_lengths(lengths: NDArray[Any]) -> str:
    """A hash of all lengths: with another one of them, the order is another."""
    digest = hashlib.sha256(str(lengths.dtype).encode())
    digest.update(np.ascontiguousarray(lengths).data)
    return digest.hexdigest()[:16]


@lru_cache(maxsize=64)
def deal(items: int, lanes: int) -> NDArray[np.int64]:
    """Which item stands at each place when ``items`` are dealt to ``lanes`` in turn: shape [items], read-only.

    Lane l holds the places j with ⌊j·lanes/items⌋ = l, as in :class:`lockstep.planning.BatchPlan`, and gets the items
    l, l + lanes, l + 2·lanes, …; what is left of the last round goes to the lanes that hold one more.
    """
    places = np.arange(items, dtype=np.int64)
    lane = places * lanes // items
    turn = places + (-lane * items // lanes)  # the place within its lane
    dealt = np.empty_like(places)
    dealt[np.lexsort((lane, turn))] = places
    dealt.flags.writeable = False
    return dealt
