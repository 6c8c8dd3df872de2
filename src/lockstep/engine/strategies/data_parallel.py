"""``strategy: dp``: torch's DataParallel, several GPUs in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from lockstep._compat.torch import tree_leaves
from lockstep.arithmetic import ceil_div
from lockstep.config import RunConfig
from lockstep.engine.runtime import rank_device
from lockstep.engine.strategies.base import Replica, Strategy
from lockstep.engine.trained import bare
from lockstep.hardware.world import World
from lockstep.planning import Plan


def build(replica: Replica, config: RunConfig, plan: Plan) -> Strategy:
    """Replicate the model over the plan's GPUs for each micro-batch, and scatter its samples to them.

    DataParallel wraps the model alone, so the task's loss must call the model itself, not other methods of it.
    """
    devices = [rank_device([name], World()) for name in plan.placement["devices"]]
    model = ScatteredModel(bare(replica.module), devices, plan.batch.least_part)
    return Strategy(replica._replace(forward=model, devices=tuple(devices)))


def devices_for(samples: int, devices: int, min_samples: int) -> int:
    """Count the ``devices`` that ``samples`` may be scattered to: each gets ``min_samples``, or one gets all.

    It hands out ⌈samples/devices⌉ each, as ``torch.chunk`` does, and the rest to the last one.
    """
    for used in range(devices, 1, -1):
        size = ceil_div(samples, used)
        if min(size, samples % size or size) >= min_samples:
            return used
    return 1


class ScatteredModel(DataParallel):  # type: ignore[type-arg]
    """Leaves out devices that would get fewer samples than ``least_part``: two under BatchNorm."""

    def __init__(self, module: nn.Module, devices: list[torch.device], least_part: int) -> None:
        super().__init__(module, device_ids=devices)
        self._least_part = least_part

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        first = next((leaf for leaf in tree_leaves((inputs, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()), None)
        if first is not None:
            device_ids = device_ids[: devices_for(len(first), len(device_ids), self._least_part)]
        return super().scatter(inputs, kwargs, device_ids)
