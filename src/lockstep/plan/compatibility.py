"""What does not go together with how a run's work is divided."""

from __future__ import annotations

from lockstep.config import RunConfig
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.hardware.resolve import Placement
from lockstep.plan.plan import TaskFacts


def refuse_contradictions(config: RunConfig, placement: Placement, facts: TaskFacts) -> None:
    """Raises :class:`ConfigError` or :class:`UnsupportedError` when a setting cannot be kept on this placement."""
    if config.training.reproducibility == "exact":
        _check_exact(config, placement)
    if placement.strategy in {"fsdp", "pipeline"}:
        _check_divided(config, placement, facts)


def _check_exact(config: RunConfig, placement: Placement) -> None:
    lanes, ranks = config.training.lanes, placement.world_size
    refused = {
        f"strategy {placement.strategy}": placement.strategy not in {"single", "ddp"},
        "training.compile": config.training.compile,
        "distributed.sync_batchnorm on": config.distributed.sync_batchnorm == "on",
    }
    for name, asked in refused.items():
        if asked:
            raise UnsupportedError(
                f"reproducibility: exact does not go together with {name}",
                why="its sums or kernels depend on how the work is divided",
                fix="use strategy single or ddp, or reproducibility: fast",
            )
    if lanes % ranks:
        raise ConfigError(
            f"{ranks} ranks do not divide {lanes} lanes",
            why="exact mode gives every rank the same number of lanes",
            fix=f"use 1, 2, 4, … up to {lanes} ranks, or set training.lanes (a power of two) before the run starts",
        )


def _check_divided(config: RunConfig, placement: Placement, facts: TaskFacts) -> None:
    fsdp = placement.strategy == "fsdp"
    refused = {
        "training.compile": (config.training.compile, "compiled code would hold parameters that are freed"),
        "a LightningModule": (facts.loader is not None, "its Trainer would divide the model itself"),
        "fsdp.cpu_offload on the CPU": (
            fsdp and config.fsdp.cpu_offload and placement.accelerator == "cpu",
            "there is no other memory to move anything to",
        ),
    }
    for name, (asked, why) in refused.items():
        if asked:
            raise UnsupportedError(
                f"strategy {placement.strategy} does not go together with {name}", why=why, fix="leave one of them out"
            )
