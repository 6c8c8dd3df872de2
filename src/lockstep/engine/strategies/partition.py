"""Models that no process holds as a whole, or on one device: which kind the plan asks for."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.data.requests import Request
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.optim.precision import Precision
from lockstep.engine.process.determinism import rank_device
from lockstep.engine.strategies.divided import Divided
from lockstep.engine.task import Datasets, Task
from lockstep.engine.trained import refuse_modules
from lockstep.engine.training_data import training_source
from lockstep.hardware.world import World
from lockstep.plan import Plan


def divide(
    task: Task,
    model: nn.Module,
    config: RunConfig,
    plan: Plan,
    datasets: Datasets,
    device: torch.device,
    world: World,
    collectives: Collectives,
) -> Divided:
    """Divide ``model``, which is the same on every rank and on the host. Collective.

    Raises:
        TaskError, UnsupportedError, ConfigError: it cannot be divided so.
    """
    if plan.sharded:
        refuse_modules(model, "fsdp")
        from lockstep.engine.strategies.fsdp import ShardedModel

        return ShardedModel(task, model, config.fsdp, plan.placement["precision"], device, world)
    from lockstep.engine.strategies.stages import PlacedModel, cut, measure, stages_of

    names = plan.placement["devices"]
    parts = world.size if world.size > 1 else len(names)
    stages = stages_of(task, model, parts)
    seconds = None
    if collectives.is_main and len(stages) > parts:
        size = min(plan.batch.batch_size, plan.batch.samples)
        request = Request(0, 0, 0, size, window=(0, size))
        batch = training_source(task, datasets.train, plan).batch(request)
        precision = Precision(plan.placement["precision"], device, plan.pre_scale)
        seconds = measure(stages, task.loss, batch, device, precision)
    seconds = collectives.broadcast(seconds)
    bounds, remark = cut(stages, parts, seconds)
    if world.size == 1:
        return PlacedModel(model, stages, bounds, [rank_device([name], World()) for name in names], remark)
    from lockstep.engine.strategies.pipeline import PipelineModel

    schedule, timeout_s = config.pipeline.schedule, config.distributed.timeout_s
    return PipelineModel(model, stages, bounds, device, world, schedule, timeout_s, remark)
