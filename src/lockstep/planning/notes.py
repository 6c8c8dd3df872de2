"""Notes of the plan for the user, and combinations of settings that it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from lockstep.config import RunConfig
from lockstep.errors import ConfigError, UnsupportedError, many
from lockstep.events import Note
from lockstep.hardware.resolve import Placement
from lockstep.planning.batch import DRAWS, OWN, BatchPlan
from lockstep.planning.plan import ResumePoint, TaskFacts
from lockstep.strategies import strategies

#: Micro-batches per device that keep a pipeline busy (Huang et al. 2019, https://arxiv.org/abs/1811.06965).
BUSY_MICRO_BATCHES = 4


def run_notes(
    config: RunConfig,
    placement: Placement,
    facts: TaskFacts,
    batch: BatchPlan,
    resume: ResumePoint | None,
    workers: int,
) -> Iterator[Note]:
    """Yield notes on causes of different results and on settings without effect.

    ``workers``: processes of each rank's loader.
    """
    if resume is not None and not resume.step:
        yield Note(
            "resumed_at_start", "The run has no usable checkpoint: it trains from its first step again.", "warning"
        )
    elif resume is not None and resume.global_batch == batch.global_batch:
        yield Note("resumed", f"Resumes at step {resume.step}; the global batch stays {batch.global_batch}.")
    elif resume is not None:
        yield Note(
            "global_batch_changed",
            f"Resumes at step {resume.step} with a global batch of {batch.global_batch} instead of "
            f"{resume.global_batch}: the results will differ from those of an uninterrupted run.",
        )
    yield from _data_notes(facts, resume, workers)
    yield from strategy_notes(config, placement, batch)
    yield from optimizer_notes(config, facts)
    for name, method in facts.similar_methods:
        yield Note(
            "unknown_method", f"{name}() is not a method of lockstep.Task and is not called; {method}() is.", "warning"
        )
    if facts.metrics_remark is not None:
        yield Note("compute_groups", facts.metrics_remark, "warning")
    if facts.has_batchnorm and placement.spec.scatters:
        yield Note(
            "batchnorm_split",
            f"BatchNorm does not see whole micro-batches: each of the {len(placement.devices)} GPUs normalises its "
            "part alone, and the running statistics are those of the first one. "
            f"{placement.strategy} cannot synchronise them; ddp does.",
        )
    if facts.has_batchnorm and batch.accumulate > 1 and config.training.reproducibility != "exact":
        yield Note(
            "batchnorm_micro_batches",
            f"BatchNorm normalises micro-batches, not the global batch of {batch.global_batch}: its statistics depend "
            f"on accumulate ({batch.accumulate}). reproducibility: exact keeps them the same on any devices.",
        )


def _data_notes(facts: TaskFacts, resume: ResumePoint | None, workers: int) -> Iterator[Note]:
    """Yield remarks of the data sets, and notes on data that a resume cannot check or that the user has accepted."""
    yield from (Note("data", remark) for remark in facts.remarks)
    if facts.unrecorded:
        yield Note(
            "arguments_unrecorded",
            f"The arguments {', '.join(facts.unrecorded)} of the task are not saved with the run: only numbers, texts, "
            "paths, lists and mappings are. Commands such as `lockstep resume` cannot construct this task again; "
            "use lockstep.Run(…).resume(task) with the task object.",
            "warning",
        )
    if facts.unstable:
        yield Note(
            "samples_vary",
            f"{', '.join(facts.unstable)} of the training samples differ each time they are read, so a resume cannot "
            "detect a change. Draws from random, numpy.random or torch's global generator are repeatable.",
        )
    if facts.read_file is not None and workers:
        yield Note(
            "file_shared",
            f"{many(workers, 'loader worker')} and the rank share the position in {facts.read_file}, which the data "
            "set has open, and may read wrong samples, as in a DataLoader. Open it in the first call of __getitem__.",
            "warning",
        )
    if resume is not None and resume.accept_data and resume.fingerprint not in (None, facts.fingerprint):
        yield Note(
            "other_data",
            f"the training data differ from those of the checkpoint (fingerprint {resume.fingerprint}, now "
            f"{facts.fingerprint}); accepted with --accept-data.",
            "warning",
        )


def strategy_notes(config: RunConfig, placement: Placement, batch: BatchPlan) -> Iterator[Note]:
    """Yield notes on settings of other strategies, and on an idle pipeline."""
    spec = placement.spec
    is_exact = config.training.reproducibility == "exact"
    for owner in strategies().values():
        names = [name for setting in owner.settings for name in changed_keys(config, *setting.split("."))]
        if owner is not spec:
            yield from unused(names, f"the strategy is {spec.name}, not {owner.name}")
        elif is_exact:
            yield from unused(names, "exact mode sums gradients in a fixed tree")
    if spec.scatters and config.training.compile:
        yield from unused(["training.compile"], f"{spec.name} copies the model to its GPUs in every step, not compiled")
    devices = len(placement.devices) if placement.nodes == 1 else placement.world_size
    micro_batches = batch.accumulate
    if spec.state == "staged" and micro_batches < BUSY_MICRO_BATCHES * devices:
        idle_share = (devices - 1) / (micro_batches + devices - 1)  # Huang et al., section 2.3
        yield Note(
            "pipeline_idle",
            f"With {many(micro_batches, 'micro-batch')} a step, the {devices} devices of a pipeline wait "
            f"{idle_share:.0%} of the time: more, smaller ones (--grad-accum-steps, --batch-size) fill it better.",
        )


def optimizer_notes(config: RunConfig, facts: TaskFacts) -> Iterator[Note]:
    """Yield notes on settings without effect for a task that makes its optimizer or scheduler."""
    if facts.optimizer_lr is not None:
        used = {"optimizer.lr_scaling", "optimizer.base_batch_size"}
        yield from unused(sorted({*changed_keys(config, "optimizer")} - used), "the task makes its optimizer")
    if facts.own_schedule:
        yield from unused(sorted(changed_keys(config, "scheduler")), "the task makes its scheduler")


def changed_keys(config: RunConfig, section: str, *names: str) -> list[str]:
    """Return the keys of a section, or of its settings ``names``, that differ from their default."""
    settings: BaseModel = getattr(config, section)
    fields = type(settings).model_fields
    return [f"{section}.{name}" for name in names or fields if getattr(settings, name) != fields[name].default]


def unused(keys: list[str], reason: str, scope: str = "") -> Iterator[Note]:
    if keys:
        yield Note("settings_unused", f"{', '.join(keys)} has no effect{scope}: {reason}.")


def refuse_contradictions(config: RunConfig, placement: Placement, facts: TaskFacts) -> None:
    """Raise :class:`ConfigError` or :class:`UnsupportedError` for settings that are incompatible with each other."""
    training = config.training
    spec = placement.spec
    strategy = f"strategy {spec.name}"
    is_staged = spec.state == "staged"
    has_averaging = config.averaging.name != "none"
    averaging = f"averaging.name={config.averaging.name}"
    if training.reproducibility == "exact":
        _check_exact(config, placement, facts)
    if config.scheduler.name == "plateau" and not (facts.val_samples or facts.validates_itself or facts.own_schedule):
        raise ConfigError(
            "scheduler.name=plateau needs validation data",
            why="it lowers the learning rate when the monitored metric of evaluations does not improve",
            fix="return validation data from datasets(), or choose another schedule, such as cosine",
        )
    if has_averaging:
        refused = {strategy: (is_staged, "no rank has all of the weights")}
        refuse(averaging, refused, "use another strategy, or averaging.name=none")
    if spec.scatters:
        reason = "it calls copies of the model, whose blocks would be those of the original"
        refused = {"training.activation_checkpointing": (training.activation_checkpointing, reason)}
        refuse(strategy, refused, "use --strategy ddp or fsdp, or leave it out")
    if placement.precision == "bf16-true":
        refused = {
            strategy: (is_staged, "its stages are called one by one, with float32"),
            averaging: (has_averaging, "an average of weights with 8 bits does not follow small changes"),
        }
        refuse("precision bf16-true", refused, "use bf16-mixed, or leave it out")
    if spec.divides:
        _check_divided(config, placement, facts)


def _check_divided(config: RunConfig, placement: Placement, facts: TaskFacts) -> None:
    """Refuse settings that need the whole model on each rank."""
    training = config.training
    optimizer = config.optimizer.name
    spec = placement.spec
    is_sharded = spec.state == "sharded"
    offloads_on_cpu = "fsdp" in spec.settings and config.fsdp.cpu_offload and placement.accelerator == "cpu"
    needs_matrices = is_sharded and optimizer == "adafactor" and facts.optimizer_lr is None
    blocks = "blocks are compiled one by one, as their parameters are gathered between them"
    refused = {
        "training.compile": (training.compile and not is_sharded, "its stages are called one by one, not as the model"),
        "training.compile_loss": (training.compile_loss, blocks),
        "fsdp.cpu_offload on the CPU": (offloads_on_cpu, "there is no other memory to move anything to"),
        f"optimizer.name={optimizer}": (needs_matrices, "it needs whole matrices, and each rank has rows of them"),
    }
    refuse(f"strategy {spec.name}", refused, "leave one of them out")


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
