"""Whether a checkpoint is one file for each kind of content, or a shard of it from each rank."""

from __future__ import annotations

from lockstep.config import OptimizerConfig
from lockstep.planning.decision import Decision
from lockstep.strategies import StrategySpec

#: To gather 0.4 GB of weights and optimizer state stops all ranks for 0.3 s, 0.9 GB for 1.8 s (two gloo ranks,
#: ``benchmarks/sharded_checkpoint.py``). Below, files that any tool reads are worth more than the pause.
SHARDED_FROM_BYTES = 500_000_000


def moments_of(optimizer: OptimizerConfig) -> int:
    """How many numbers the optimizer keeps for each parameter."""
    return 2 if optimizer.name != "sgd" else 1 if optimizer.momentum else 0


def choose_form(setting: str, strategy: StrategySpec, parameters: int, optimizer: OptimizerConfig) -> Decision:
    """Whether checkpoints are in shards.

    Args:
        setting: ``checkpoint.sharded``.
        parameters: of the model, in 32 bits each.
    """
    size = 4 * parameters * (1 + moments_of(optimizer))
    state = f"{size / 1e9:.2g} GB" if size >= 1e8 else f"{size / 1e6:.2g} MB"
    state += " of weights and optimizer state"
    sharded = strategy.state == "sharded" and (setting == "on" or (setting == "auto" and size >= SHARDED_FROM_BYTES))
    if strategy.state != "sharded":
        reason = f"strategy {strategy.name} keeps all parameters on each rank; checkpoint.sharded is for fsdp"
    elif setting != "auto":
        reason = f"as configured; {state}"
    elif sharded:
        reason = f"auto: {state}, too much to gather on rank 0"
    else:
        reason = f"auto: {state}, small enough to gather on rank 0 (sharded from {SHARDED_FROM_BYTES / 1e9:.2g} GB)"
    return Decision("checkpoints", "checkpoints", sharded, reason, "sharded" if sharded else "whole")
