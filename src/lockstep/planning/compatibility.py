"""Which settings are incompatible with a strategy."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.config import RunConfig
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.hardware.resolve import Placement
from lockstep.planning.plan import TaskFacts


def refuse_contradictions(config: RunConfig, placement: Placement, facts: TaskFacts) -> None:
    """Raises :class:`ConfigError` or :class:`UnsupportedError` when settings are incompatible with the strategy."""
    if config.training.reproducibility == "exact":
        _check_exact(config, placement)
    spec = placement.spec
    if spec.divides:
        _refuse(
            f"strategy {spec.name}",
            {
                "training.compile": (config.training.compile, "compiled code would keep parameters that are freed"),
                "a LightningModule": (facts.loader is not None, "its Trainer would divide the model itself"),
                "fsdp.cpu_offload on the CPU": (
                    "fsdp" in spec.settings and config.fsdp.cpu_offload and placement.accelerator == "cpu",
                    "there is no other memory to move anything to",
                ),
            },
            fix="leave one of them out",
        )


def _check_exact(config: RunConfig, placement: Placement) -> None:
    lanes, ranks = config.training.lanes, placement.world_size
    why = "its sums or kernels depend on how the work is divided"
    _refuse(
        "reproducibility: exact",
        {
            f"strategy {placement.strategy}": (not placement.spec.supports_exact, why),
            "training.compile": (config.training.compile, why),
            "distributed.sync_batchnorm on": (config.distributed.sync_batchnorm == "on", why),
        },
        fix="use strategy single or ddp, or reproducibility: fast",
    )
    if lanes % ranks:
        raise ConfigError(
            f"{ranks} ranks do not divide {lanes} lanes",
            why="exact mode gives every rank the same number of lanes",
            fix=f"use 1, 2, 4, … up to {lanes} ranks, or set training.lanes (a power of two) before the run starts",
        )


def _refuse(what: str, refused: Mapping[str, tuple[bool, str]], fix: str) -> None:
    """Raise :class:`UnsupportedError` for the first of ``refused`` that is asked for, with its reason."""
    for name, (asked, why) in refused.items():
        if asked:
            raise UnsupportedError(f"{what} is incompatible with {name}", why=why, fix=fix)
