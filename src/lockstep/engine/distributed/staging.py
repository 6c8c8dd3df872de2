"""Move batches to the model's device and small tensors between ranks, and wait for both.

gloo moves host memory only (for some collectives), so with a gloo group a tensor on a GPU is staged
through the host. Without a process group, one process is a group of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from inspect import Parameter, signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.data.requests import mapped


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of a nested batch to ``device``, asynchronously from pinned memory."""
    return mapped(batch, lambda leaf: _moved(leaf, device), "to")


def to_host(rows: Any) -> Any:
    """Copy every tensor of ``rows`` to host memory, complete on return."""
    return mapped(rows, lambda leaf: _moved(leaf, torch.device("cpu"), waits=True), "to")


def _moved(leaf: Any, device: torch.device, *, waits: bool = False) -> Any:
    kind: Any = type(leaf)
    may_not_block = isinstance(leaf, Tensor) or _may_not_block(kind)
    moved = leaf.to(device, non_blocking=True) if may_not_block and not waits else leaf.to(device)
    return leaf if moved is None else moved  # it moves in place


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
        return _moved(leaf, self._device)  # its tensors are not visible here


def arrival(device: torch.device) -> Callable[[Any], Any]:
    if device.type == "cuda":
        return SideStream(device)
    return (lambda batch: batch) if device.type == "cpu" else (lambda batch: to_device(batch, device))


def finish(device: torch.device) -> None:
    """Wait until ``device`` has done all that it was given; the host has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def moment(device: torch.device) -> Any:
    """Return the present moment; on a GPU, after the work that is queued on it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(start: Any, stop: Any) -> float:
    """Return the seconds between two moments of one device, which has reached ``stop``."""
    return float(stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3)


Group = dist.ProcessGroup | None
"""``None``: the default group, or one process when there is none."""


def world_size(group: Group) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def wire_device(device: torch.device, group: Group) -> torch.device:
    """Return where tensors of ``device`` must lie to travel over ``group``."""
    return torch.device("cpu") if dist.get_backend(group) == dist.Backend.GLOO else device


def all_gather_rows(row: Tensor, group: Group) -> Tensor:
    """Gather every rank's ``row``, by rank: [n] → [ranks, n]."""
    ranks = world_size(group)
    if ranks == 1:
        return row.unsqueeze(0)
    sent = row.to(wire_device(row.device, group))
    rows = sent.new_empty(ranks, sent.numel())
    dist.all_gather(list(rows.unbind()), sent, group=group)
    return rows.to(row.device)


def all_reduce(tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce every rank's ``tensor``; the result may be ``tensor`` itself."""
    if world_size(group) == 1:
        return tensor
    sent = tensor.to(wire_device(tensor.device, group))
    dist.all_reduce(sent, op=op, group=group)
    return sent.to(tensor.device)
