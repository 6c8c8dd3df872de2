"""Combinations of settings that the plan refuses."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.config import RunConfig
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.hardware.resolve import Placement
from lockstep.planning.batch import DRAWS, OWN
from lockstep.planning.plan import TaskFacts


def refuse_contradictions(config: RunConfig, placement: Placement, facts: TaskFacts) -> None:
    """Raise :class:`ConfigError` or :class:`UnsupportedError` for settings that are incompatible with each other."""
    training = config.training
    spec = placement.spec
    if training.reproducibility == "exact":
        _check_exact(config, placement, facts)
    if config.scheduler.name == "plateau" and not (facts.val_samples or facts.validates_itself or facts.own_schedule):
        raise ConfigError(
            "scheduler.name=plateau needs validation data",
            why="it lowers the learning rate when the monitored metric of evaluations does not improve",
            fix="return validation data from datasets(), or choose another schedule, such as cosine",
        )
    strategy = f"strategy {spec.name}"
    is_staged = spec.state == "staged"
    is_sharded = spec.state == "sharded"
    averaging = f"averaging.name={config.averaging.name}"
    has_averaging = config.averaging.name != "none"
    precision = f"precision {placement.precision}"
    casts_weights = placement.number_format.weights is not None
    recomputes = training.activation_checkpointing
    offloads_on_cpu = "fsdp" in spec.settings and config.fsdp.cpu_offload and placement.accelerator == "cpu"
    needs_matrices = config.optimizer.name == "adafactor" and facts.optimizer_lr is None
    other_strategy = "use another strategy, or averaging.name=none"
    copies = "it calls copies of the model, whose blocks would be those of the original"
    small_changes = "an average of weights with 8 bits does not follow small changes"
    stages = "its stages are called one by one, not as the model"
    memory = "there is no other memory to move anything to"
    blocks = "blocks are compiled one by one, as their parameters are gathered between them"
    matrices = "it needs whole matrices, and each rank has rows of them"
    ddp_or_fsdp = "use --strategy ddp or fsdp, or leave it out"
    mixed = "use bf16-mixed, or leave it out"
    either = "leave one of them out"
    # Two settings, whether both are used, the reason why they are incompatible, and the fix.
    conflicts = (
        (averaging, strategy, has_averaging and is_staged, "no rank has all of the weights", other_strategy),
        (strategy, "training.activation_checkpointing", spec.scatters and recomputes, copies, ddp_or_fsdp),
        (precision, strategy, casts_weights and is_staged, "its stages are called one by one, with float32", mixed),
        (precision, averaging, casts_weights and has_averaging, small_changes, mixed),
        (strategy, "training.compile", is_staged and training.compile, stages, either),
        (strategy, "training.compile_loss", spec.divides and training.compile_loss, blocks, either),
        (strategy, "fsdp.cpu_offload on the CPU", offloads_on_cpu, memory, either),
        (strategy, "optimizer.name=adafactor", is_sharded and needs_matrices, matrices, either),
    )
    for subject, setting, are_used, reason, fix in conflicts:
        refuse(subject, {setting: (are_used, reason)}, fix)


def _check_exact(config: RunConfig, placement: Placement, facts: TaskFacts) -> None:
    lanes = config.training.lanes
    ranks = placement.world_size
    reason = "its sums or kernels depend on how the work is divided"
    refused = {
        f"strategy {placement.strategy}": (not placement.spec.supports_exact, reason),
        "training.compile": (config.training.compile, reason),
        "distributed.sync_batchnorm on": (config.distributed.sync_batchnorm == "on", reason),
    }
    refuse("reproducibility: exact", refused, "use strategy single or ddp, or reproducibility: fast")
    if facts.sampling is not None and facts.sampling.draws:
        raise UnsupportedError("reproducibility: exact cannot train on this stream", why=DRAWS, fix=OWN)
    if lanes % ranks:
        raise ConfigError(
            f"{ranks} ranks do not divide {lanes} lanes",
            why="exact mode gives every rank the same number of lanes",
            fix=f"use 1, 2, 4, … up to {lanes} ranks, or set training.lanes (a power of two) before the run starts",
        )


def refuse(subject: str, refused: Mapping[str, tuple[bool, str]], fix: str) -> None:
    """Raise :class:`UnsupportedError` for the first setting of ``refused`` that is used.

    ``refused``: for each setting that is incompatible with ``subject``, whether it is used, and the reason.
    """
    for setting, (is_used, reason) in refused.items():
        if is_used:
            raise UnsupportedError(f"{subject} is incompatible with {setting}", why=reason, fix=fix)
