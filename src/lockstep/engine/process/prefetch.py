"""Batches to where the model is."""

from __future__ import annotations

from functools import cache
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from lockstep.data.requests import mapped


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of a nested batch on ``device``, asynchronously from pinned memory."""
    return mapped(batch, lambda leaf: _moved(leaf, device), "to")


def to_host(rows: Any) -> Any:
    """Every tensor of ``rows`` in host memory, complete on return."""
    return mapped(rows, lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else _own_move(leaf, "cpu"), "to")


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    kind: Any = type(leaf)
    if _may_not_block(kind):
        return _own_move(leaf, device, non_blocking=True)
    return _own_move(leaf, device)


def _own_move(leaf: Any, *place: Any, **how: Any) -> Any:
    """What an object's ``to`` returns; itself where that moves in place."""
    moved = leaf.to(*place, **how)
    return leaf if moved is None else moved


@cache
def _may_not_block(kind: Any) -> bool:
    parameters = signature(kind.to).parameters.values()
    return any(p.name == "non_blocking" or p.kind is Parameter.VAR_KEYWORD for p in parameters)


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
            moved = mapped(batch, lambda leaf: _moved(leaf, self._device) if isinstance(leaf, Tensor) else leaf, "to")
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        return mapped(moved, lambda leaf: self._handed_over(leaf, current), "to")

    def _handed_over(self, leaf: Any, current: torch.cuda.Stream) -> Any:
        if isinstance(leaf, Tensor):
            # The copying stream's memory: free again only when this one is done with it.
            leaf.record_stream(current)
            return leaf
        return _moved(leaf, self._device)  # what tensors it holds is its own affair


def finish(device: torch.device) -> None:
    """Wait until ``device`` has done all that it was given; the host has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
