"""Batches to where the model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of a nested batch on ``device``, asynchronously from pinned memory."""
    return _mapped(batch, lambda leaf: leaf.to(device, non_blocking=True) if hasattr(leaf, "to") else leaf)


class SideStream:
    """Copies batches to a GPU while it still computes the step before: on a stream that is only for copies.

    The host runs ahead of the GPU, so when a batch is asked for, earlier steps are still queued; on their stream
    the copy would wait for them. (CUDA C++ Programming Guide, "Overlap of Data Transfer and Kernel Execution".)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Any) -> Any:
        with torch.cuda.stream(self._stream):
            moved = _mapped(batch, lambda leaf: to_device(leaf, self._device) if isinstance(leaf, Tensor) else leaf)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        return _mapped(moved, lambda leaf: self._handed_over(leaf, current))

    def _handed_over(self, leaf: Any, current: torch.cuda.Stream) -> Any:
        if isinstance(leaf, Tensor):
            # The copying stream's memory: free again only when this one is done with it.
            leaf.record_stream(current)
            return leaf
        return to_device(leaf, self._device)  # what tensors it holds is its own affair


def _mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(batch, dict):
        return {key: _mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_mapped(value, change) for value in batch)
    return change(batch)
