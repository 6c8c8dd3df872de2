"""Whether a model's state has room on each GPU. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.hardware.device import Device
from lockstep.hardware.resolve import Placement
from lockstep.hardware.selection import find
from lockstep.strategies import auto_strategy

#: Bytes of a GPU that are not for tensors: its context and the workspaces of libraries (an allowance).
CONTEXT = 0.8e9


def divide_if_needed(placement: Placement, state: float, detected: Sequence[Device]) -> Placement:
    """A strategy that shards the state where it alone is more than a GPU of this node has; else as it was.

    Activations do not count: a smaller batch makes room for them (`lockstep memory` counts them).

    Args:
        placement: what ``strategy: auto`` resolved to.
        state: bytes of parameters, gradients and optimizer.
    """
    devices = placement.devices
    if placement.spec.divides or placement.world_size == 1 or placement.accelerator != "gpu" or placement.nodes > 1:
        return placement
    if len(set(devices)) < len(devices):
        return placement
    smallest = min((find(name, detected) for name in devices), key=lambda device: device.memory_gb)
    if smallest.memory_gb <= 0 or state <= smallest.memory_gb * 1e9 - CONTEXT:
        return placement
    sharded = auto_strategy(len(devices), fits=False)
    reason = (
        f"auto: parameters, gradients and optimizer take {state / 1e9:.1f} GB, and {smallest.id} has "
        f"{smallest.memory_gb} GB; {sharded} divides them, {state / 1e9 / len(devices):.1f} GB each"
    )
    return replace(placement, strategy=sharded, reasons={**placement.reasons, "strategy": reason})
