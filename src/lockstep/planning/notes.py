"""Combinations that the plan refuses, settings that have no effect, and what the user should know of this run."""

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
FILL = 4


def run_notes(
    config: RunConfig,
    placement: Placement,
    facts: TaskFacts,
    batch: BatchPlan,
    resume: ResumePoint | None,
    workers: int,
) -> Iterator[Note]:
    """On what the results depend on, and on settings that have no effect. ``workers``: of each loader."""
    if resume is not None and resume.global_batch == batch.global_batch:
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
    """What data sets say of themselves; what a resume cannot compare, and what it was asked to accept."""
    yield from (Note("data", remark) for remark in facts.remarks)
    if facts.unrecorded:
        yield Note(
            "arguments_unrecorded",
            f"Not recorded with the run, since they are no numbers, texts, paths, lists or mappings that a "
            f"configuration gives back: the arguments {', '.join(facts.unrecorded)} of the task. Commands such as "
            "`lockstep resume` cannot make this task again; lockstep.Run(…).resume(task) can, with the task object.",
            "warning",
        )
    if facts.unstable:
        yield Note(
            "samples_vary",
            f"Not the same each time it is read: {', '.join(facts.unstable)} of the training samples. A resume cannot "
            "detect whether that changed. Draws from random, numpy.random or torch's global generator are repeatable.",
        )
    if facts.read_file is not None and workers:
        yield Note(
            "file_shared",
            f"With {many(workers, 'loader worker')}, processes share the position in {facts.read_file}, which the data "
            "set has open, and may read wrong samples, as in a DataLoader: open it in __getitem__, at the first call.",
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
    """On settings of other strategies, and on an idle pipeline."""
    spec, exact = placement.spec, config.training.reproducibility == "exact"
    for owner in strategies().values():
        names = [name for setting in owner.settings for name in _changed(config, *setting.split("."))]
        if owner is not spec:
            yield from _unused(names, f"the strategy is {spec.name}, not {owner.name}")
        elif exact:
            yield from _unused(names, "exact mode sums gradients in a fixed tree")
    if spec.scatters and config.training.compile:
        yield from _unused(
            ["training.compile"], f"{spec.name} copies the model to its GPUs in every step, not compiled"
        )
    devices, parts = len(placement.devices) if placement.nodes == 1 else placement.world_size, batch.accumulate
    if spec.state == "staged" and parts < FILL * devices:
        # Section 2.3 of the same.
        share = (devices - 1) / (parts + devices - 1)
        yield Note(
            "pipeline_idle",
            f"With {many(parts, 'micro-batch')} a step, the {devices} devices of a pipeline wait "
            f"{share:.0%} of the time: more, smaller ones (--grad-accum-steps, --batch-size) fill it better.",
        )


def module_notes(config: RunConfig, placement: Placement) -> Iterator[Note]:
    """For a ``LightningModule``: on settings that its own parts decide."""
    if placement.accelerator == "cpu" and placement.precision == "16-mixed":
        yield Note("precision_changed", "On a CPU, Lightning's Trainer uses bf16-mixed instead of 16-mixed.")
    if placement.world_size > 1:
        yield Note(
            "module_means",
            "A module's loss is a mean over the samples of a rank, and DDP gives each rank's the same weight. Where it "
            "divides by something else (class weights, ignored targets, tokens), the result depends on the number of "
            "devices; `lockstep verify FILE.py:MODULE` measures by how much.",
        )
    names = [*_changed(config, "optimizer"), *_changed(config, "scheduler")]
    yield from _unused(names, "the module's configure_optimizers() decides", " on a LightningModule")
    retries = ["training.on_oom"] * (config.training.on_oom == "retry")
    names = [*_changed(config, "training", "batch_size"), *retries, *_changed(config, "data")]
    names += _changed(config, "validation", "batch_size")
    yield from _unused(names, "its DataLoaders and data module decide", " on a LightningModule")


def optimizer_notes(config: RunConfig, facts: TaskFacts) -> Iterator[Note]:
    """For a task that makes its own optimizer or scheduler: on settings that have no effect."""
    if facts.optimizer_lr is not None:
        used = {"optimizer.lr_scaling", "optimizer.base_batch_size"}
        yield from _unused(sorted({*_changed(config, "optimizer")} - used), "the task makes its own optimizer")
    if facts.own_schedule:
        yield from _unused(sorted(_changed(config, "scheduler")), "the task makes its own scheduler")


def _changed(config: RunConfig, section: str, *names: str) -> list[str]:
    """The keys of a section, or those of ``names`` in it, that are not at their default."""
    settings: BaseModel = getattr(config, section)
    fields = type(settings).model_fields
    return [f"{section}.{name}" for name in names or fields if getattr(settings, name) != fields[name].default]


def _unused(names: list[str], why: str, where: str = "") -> Iterator[Note]:
    if names:
        yield Note("settings_unused", f"{', '.join(names)} has no effect{where}: {why}.")


def refuse_contradictions(config: RunConfig, placement: Placement, facts: TaskFacts) -> None:
    """Raises :class:`ConfigError` or :class:`UnsupportedError` when settings are incompatible with the strategy."""
    training, spec, optimizer = config.training, placement.spec, config.optimizer.name
    strategy, staged, averaged = f"strategy {spec.name}", spec.state == "staged", config.averaging.name != "none"
    averaging = f"averaging.name={config.averaging.name}"
    if training.reproducibility == "exact":
        _check_exact(config, placement, facts)
    if config.scheduler.name == "plateau" and not (facts.val_samples or facts.loader or facts.own_schedule):
        raise ConfigError(
            "scheduler.name=plateau needs validation data",
            why="it lowers the learning rate when the monitored metric of evaluations does not improve",
            fix="return validation data from datasets(), or choose another schedule, such as cosine",
        )
    if averaged:
        refused = {strategy: (staged, "no rank has all of the weights")}
        refuse(averaging, refused, "use another strategy, or averaging.name=none")
    if spec.scatters:
        why = "it calls copies of the model, whose blocks would be those of the original"
        refused = {"training.activation_checkpointing": (training.activation_checkpointing, why)}
        refuse(strategy, refused, "use --strategy ddp or fsdp, or leave it out")
    if placement.precision == "bf16-true":
        refused = {
            strategy: (staged, "its stages are called one by one, with float32"),
            averaging: (averaged, "an average of weights with 8 bits does not follow small changes"),
        }
        refuse("precision bf16-true", refused, "use bf16-mixed, or leave it out")
    if spec.divides:
        offloads = "fsdp" in spec.settings and config.fsdp.cpu_offload and placement.accelerator == "cpu"
        compiles, sharded = training.compile and spec.state != "sharded", spec.state == "sharded"
        by_matrix = sharded and optimizer in ("muon", "adafactor") and facts.optimizer_lr is None
        blocks = "blocks are compiled one by one, as their parameters are gathered between them"
        refused = {
            "training.compile": (compiles, "its stages are called one by one, not as the model"),
            "training.compile_loss": (training.compile_loss, blocks),
            "a LightningModule": (facts.loader is not None, "its Trainer would divide the model itself"),
            "fsdp.cpu_offload on the CPU": (offloads, "there is no other memory to move anything to"),
            f"optimizer.name={optimizer}": (by_matrix, "it needs whole matrices, and each rank has rows of them"),
        }
        refuse(strategy, refused, "leave one of them out")


def _check_exact(config: RunConfig, placement: Placement, facts: TaskFacts) -> None:
    lanes, ranks = config.training.lanes, placement.world_size
    why = "its sums or kernels depend on how the work is divided"
    refused = {
        f"strategy {placement.strategy}": (not placement.spec.supports_exact, why),
        "training.compile": (config.training.compile, why),
        "distributed.sync_batchnorm on": (config.distributed.sync_batchnorm == "on", why),
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


def refuse(what: str, refused: Mapping[str, tuple[bool, str]], fix: str) -> None:
    """Raise :class:`UnsupportedError` for the first of ``refused`` that is asked for, with its reason."""
    for name, (asked, why) in refused.items():
        if asked:
            raise UnsupportedError(f"{what} is incompatible with {name}", why=why, fix=fix)
