"""Notes of the plan for the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

from lockstep.config import RunConfig
from lockstep.errors import many
from lockstep.events import Note
from lockstep.hardware.resolve import Placement
from lockstep.planning.batch import BatchPlan
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


#: Settings of a section that only some of its kinds read, by their names.
_READERS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "optimizer": {
        "betas": ("adamw", "adam"),
        "eps": ("adamw", "adam"),
        "momentum": ("sgd",),
        "nesterov": ("sgd",),
    },
    "scheduler": {
        "step_epochs": ("step",),
        "milestones": ("multistep",),
        "gamma": ("step", "multistep", "plateau"),
        "decay_share": ("wsd",),
        "patience": ("plateau",),
        "power": ("poly",),
        "decay": ("exponential",),
        "decay_steps": ("exponential",),
    },
    "averaging": {
        "decay": ("ema",),
        "warmup": ("ema",),
        "start_share": ("swa",),
        "every_steps": ("ema", "swa"),
    },
}


def optimizer_notes(config: RunConfig, facts: TaskFacts) -> Iterator[Note]:
    """Yield notes on settings without effect for a task that makes its optimizer or scheduler."""
    if facts.optimizer_lr is not None:
        used = {"optimizer.lr_scaling", "optimizer.base_batch_size"}
        yield from unused(sorted({*changed_keys(config, "optimizer")} - used), "the task makes its optimizer")
    else:
        yield from _notes_of_kind(config, "optimizer")
    if facts.own_schedule:
        yield from unused(sorted(changed_keys(config, "scheduler")), "the task makes its scheduler")
    else:
        yield from _notes_of_kind(config, "scheduler")
    yield from _notes_of_kind(config, "averaging")


def _notes_of_kind(config: RunConfig, section: str) -> Iterator[Note]:
    """Yield a note on settings that the optimizer, schedule or average of this name does not read."""
    name = getattr(config, section).name
    unread = [setting for setting, readers in _READERS[section].items() if name not in readers]
    yield from unused(changed_keys(config, section, *unread) if unread else [], f"{section}.name is {name}")


def changed_keys(config: RunConfig, section: str, *names: str) -> list[str]:
    """Return the keys of a section, or of its settings ``names``, that differ from their default."""
    settings: BaseModel = getattr(config, section)
    fields = type(settings).model_fields
    return [f"{section}.{name}" for name in names or fields if getattr(settings, name) != fields[name].default]


def unused(keys: list[str], reason: str, scope: str = "") -> Iterator[Note]:
    if keys:
        yield Note("settings_unused", f"{', '.join(keys)} has no effect{scope}: {reason}.")
