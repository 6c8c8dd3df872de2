"""Models that no process holds as a whole, or on one device: which kind the plan asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config import RunConfig
from lockstep.data.loader import Request
from lockstep.engine.collectives import Collectives
from lockstep.engine.precision import Precision
from lockstep.engine.runtime import rank_device
from lockstep.engine.source import training_source
from lockstep.engine.strategy import Strategy
from lockstep.engine.task import Datasets, Task
from lockstep.engine.trained import refuse_modules
from lockstep.hardware.world import World
from lockstep.plan import Plan


class Divided(Protocol):
    """A model of which this process, or each of its devices, has a part.

    ``module`` is the model that the task made. An update asks for what concerns the whole gradient.
    ``remarks``: how it was divided, for people.
    """

    module: nn.Module
    remarks: tuple[str, ...]

    def strategy(self, task: Task, precision: Precision, plan: Plan, world: World) -> Strategy: ...

    def adopt(self, optimizer: Optimizer) -> None:
        """Learn which optimizer trains the model."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """Those that this process trains."""
        ...

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        """This process's parts of ``tensors``, sharing their memory."""
        ...

    def total_norm(self, norm: Tensor) -> Tensor:
        """The norm of the whole gradient, from that of this process's part of it; shape (). Collective."""
        ...

    def agree(self, flag: Tensor) -> None:
        """Make a flag, shape (), the highest of all ranks'. Collective."""
        ...

    def pick(self, parameters: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
        """As :func:`lockstep.engine.trace.pick`, of whole parameters, on every rank. Collective."""
        ...

    def divided_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's whole state dict, as that of ``optimizer``."""
        ...


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
        from lockstep.engine.fsdp import ShardedModel

        return ShardedModel(task, model, config.fsdp, plan.placement["precision"], device, world)
    from lockstep.engine.placed import PlacedModel, cut, measure, stages_of

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
    from lockstep.engine.pipeline import PipelineModel

    schedule, timeout_s = config.pipeline.schedule, config.distributed.timeout_s
    return PipelineModel(model, stages, bounds, device, world, schedule, timeout_s, remark)
