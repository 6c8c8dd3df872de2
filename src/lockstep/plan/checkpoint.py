"""Whether a checkpoint is one file for each kind of content, or a shard of it from each rank."""

from __future__ import annotations

from lockstep.config import OptimizerConfig
from lockstep.strategies import StrategySpec

#: To gather 0.4 GB of weights and optimizer state stops all ranks for 0.3 s, 0.9 GB for 1.8 s (two gloo ranks,
#: ``benchmarks/sharded_checkpoint.py``). Below, files that any tool reads are worth more than the pause.
SHARDED_FROM_BYTES = 500_000_000


def moments_of(optimizer: OptimizerConfig) -> int:
    """How many numbers the optimizer keeps for each parameter."""
    return 2 if optimizer.name != "sgd" else 1 if optimizer.momentum else 0


def choose_form(setting: str, strategy: StrategySpec, parameters: int, optimizer: OptimizerConfig) -> tuple[bool, str]:
    """Whether checkpoints are in shards, and why.

    Args:
        setting: ``checkpoint.sharded``.
        parameters: of the model, in 32 bits each.
    """
    if strategy.state != "sharded":
        return False, f"strategy {strategy.name} shards no parameters; checkpoint.sharded is for fsdp"
    size = 4 * parameters * (1 + moments_of(optimizer))
    told = f"{size / 1e9:.2g} GB" if size >= 1e8 else f"{size / 1e6:.2g} MB"
    told += " of weights and optimizer state"
    if setting != "auto":
        return setting == "on", f"as configured; {told}"
    if size < SHARDED_FROM_BYTES:
        return False, f"auto: {told} are soon gathered (in shards from {SHARDED_FROM_BYTES / 1e9:.2g} GB on)"
    return True, f"auto: {told}, too much to gather on one rank"
