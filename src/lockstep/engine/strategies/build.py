"""The strategy that a plan names, made by its module (:class:`lockstep.strategies.StrategySpec`)."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from lockstep.config import RunConfig
from lockstep.engine.optim.precision import Precision
from lockstep.engine.partition import Divided, Undivided, blocks_of, checkpoint_activations, compiled
from lockstep.engine.rank_context import RankContext
from lockstep.engine.strategies.base import Replica, Strategy
from lockstep.engine.task import Datasets, Task
from lockstep.engine.trained import bare, refuse_modules
from lockstep.planning import Plan
from lockstep.strategies import auto_strategy, find_strategy


def build(replica: Replica, config: RunConfig, plan: Plan) -> Strategy:
    """Build ``strategy: single``."""
    return Strategy(replica)


def on_device(model: nn.Module, rank: RankContext) -> nn.Module:
    """Move a whole model to its device, in the memory layout of the plan."""
    model = model.to(rank.device)
    if rank.plan.value("channels_last"):
        convert_conv2d_weight_memory_format(model, torch.channels_last)
    return model


def divide(rank: RankContext, task: Task, model: nn.Module, datasets: Datasets) -> Divided:
    """Divide ``model`` as the plan's strategy does, or raise why it cannot be divided. Collective."""
    spec = rank.plan.strategy
    refuse_modules(model, spec.name)
    whole = Undivided(task=task, model=model, datasets=datasets, rank=rank)
    divided: Divided = import_module(spec.module).divide(whole)
    return divided


def build_strategy(
    rank: RankContext, task: Task, model: nn.Module, precision: Precision, divided: Divided | None
) -> Strategy:
    """Build the plan's strategy for ``model``, which is on its device. Collective.

    A plan of several ranks may be given to one process alone, to measure it: then it is ``single``.
    """
    config = rank.config
    plan = rank.plan
    if divided is not None:
        return divided.strategy(task, precision)
    replica = Replica(task, model, precision, rank.device, plan.seed, rank.world.rank)
    if config.training.activation_checkpointing:
        checkpoint_activations(bare(model), blocks_of(task, bare(model)))
    if plan.reproducibility == "exact":
        from lockstep.engine.strategies.exact import ExactStrategy

        return ExactStrategy(replica, rank.world)
    spec = plan.strategy if plan.strategy.one_process or rank.world.size > 1 else find_strategy(auto_strategy(1))
    if config.training.compile and not spec.scatters:
        mode = config.training.compile_mode
        replica = replica._replace(forward=compiled(bare(model), mode), compiled=True)
        if config.training.compile_loss:
            replica = replica._replace(loss_mode=mode)
    strategy: Strategy = import_module(spec.module).build(replica, config, plan)
    return strategy
