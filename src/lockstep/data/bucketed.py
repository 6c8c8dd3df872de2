"""The length-bucketed order for speech and text: like goes with like, so padding is short.

A pure function of (seed, epoch, position), as :mod:`lockstep.data.order` is, and of nothing that a
machine brings along: not of the batch, the lanes or the ranks. An epoch of the underlying order is
cut into windows of a fixed number of samples; a window is sorted by length and cut into blocks, and
its blocks are shuffled. A wide window makes for less padding, a narrow one for more mixing.

Neighbours within a block grow in length, so parts of a batch that run side by side are equal work
only when they take strided items of it (0, L, 2L, … of L parts), not contiguous ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.order import Order, check_slice, shuffled
from lockstep.data.randomness import derive_key
from lockstep.errors import ConfigError, DataError


class BucketedOrder:
    """``order``, rearranged by length within windows of ``window`` samples.

    Args:
        order: the order that the windows are cut from.
        lengths: one number per sample, in any unit: shape [samples]. A memory map stays one.
        window: samples sorted together, a multiple of ``block``; stored with the run.
        block: samples that stay together in order of length; stored with the run.

    Raises:
        ConfigError: ``window`` is not a positive multiple of ``block``.
        DataError: ``lengths`` is not one number per sample.
    """

    def __init__(self, order: Order, lengths: Sequence[float] | NDArray[Any], window: int, block: int) -> None:
        if block < 1 or window < 1 or window % block:
            raise ConfigError(
                f"windows of {window} samples cannot be cut into blocks of {block}",
                why="the window must be a positive multiple of the block",
                fix=f"take a window of {max(1, round(window / max(1, block))) * max(1, block)} samples",
            )
        given: NDArray[Any] = np.asanyarray(lengths)
        if given.shape != (order.samples,) or given.dtype.kind not in "uif":
            raise DataError(
                f"lengths of shape {given.shape} and type {given.dtype} do not fit {order.samples} samples",
                why="a length-bucketed order needs one number per sample",
                fix=f"give a one-dimensional array of {order.samples} lengths",
            )
        self._lengths = given
        self.order = order
        self.window = window
        self.block = block
        self._cache: tuple[int, int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self.order.samples

    def slice(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """The samples at positions [start, stop) of ``epoch``: shape [stop - start], the caller's own.

        Costs time and memory in proportion to ``stop - start``, and at most two windows more.

        Raises:
            IndexError: not 0 ≤ start ≤ stop ≤ samples.
        """
        check_slice(self.order.samples, epoch, start, stop)
        indices = np.empty(stop - start, dtype=np.int64)
        for number in range(start // self.window, -(-stop // self.window)):
            first = number * self.window
            low, high = max(start, first), min(stop, first + self.window)
            indices[low - start : high - start] = self._window(epoch, number)[low - first : high - first]
        return indices

    def _window(self, epoch: int, number: int) -> NDArray[np.int64]:
        cache = self._cache
        if cache is not None and cache[:2] == (epoch, number):
            return cache[2]
        first = number * self.window
        samples = self.order.slice(epoch, first, min(first + self.window, self.order.samples))
        # A stable sort: equal lengths keep their random order.
        samples = samples[np.argsort(self._lengths[samples], kind="stable")]
        blocks = shuffled(-(-len(samples) // self.block), derive_key("blocks", self.order.seed, epoch, number))
        places = (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)
        window: NDArray[np.int64] = samples[places[places < len(samples)]]
        self._cache = (epoch, number, window)
        return window
