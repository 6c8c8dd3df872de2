"""Which strategy trains by a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep._compat.torch import watch_compiler
from lockstep.config import RunConfig
from lockstep.engine.optim.precision import Precision
from lockstep.engine.process.determinism import rank_device
from lockstep.engine.strategies.base import DdpStrategy, Replica, SingleStrategy, Strategy
from lockstep.engine.strategies.data_parallel import DataParallelStrategy
from lockstep.engine.strategies.divided import Divided
from lockstep.engine.strategies.small_ddp import FlatStrategy, fits
from lockstep.engine.task import Task
from lockstep.engine.trained import bare
from lockstep.hardware.world import World
from lockstep.plan import Plan
from lockstep.telemetry.progress_board import Activity, pulse


def build_strategy(
    task: Task,
    model: nn.Module,
    config: RunConfig,
    plan: Plan,
    precision: Precision,
    device: torch.device,
    world: World,
    divided: Divided | None,
) -> Strategy:
    """The one that ``plan`` names, around ``model``, which is on its device. Collective.

    Args:
        divided: the model's parts, where each rank or device has some of it.
    """
    replica = Replica(task, model, precision, device, plan.seed, world.rank)
    if plan.reproducibility == "exact":
        from lockstep.engine.strategies.exact import ExactStrategy

        return ExactStrategy(replica, world_size=world.size)
    if plan.placement["strategy"] == "dp":
        devices = [rank_device([name], World()) for name in plan.placement["devices"]]
        return DataParallelStrategy(replica, devices, least_part=plan.batch.least_part)
    if divided is not None:
        return divided.strategy(task, precision, plan, world)
    if config.training.compile:
        replica = replica._replace(forward=_compiled(bare(model), config.training.compile_mode))
    if world.size == 1:
        return SingleStrategy(replica)
    unused, bucket_cap_mb = config.distributed.find_unused_parameters, config.distributed.bucket_cap_mb
    if not unused and bucket_cap_mb is None and fits(model, device):
        return FlatStrategy(replica)
    return DdpStrategy(
        replica,
        world_size=world.size,
        find_unused_parameters=unused,
        bucket_cap_mb=bucket_cap_mb,
    )


def _compiled(model: nn.Module, mode: str) -> Any:
    """``model`` compiled at its first call, and again for other shapes: for as long as it takes."""
    if pulse.is_watched:
        watch_compiler(lambda _: pulse.at(Activity.COMPILING), lambda _: pulse.at(Activity.STEP))
    return torch.compile(model, mode=mode)
