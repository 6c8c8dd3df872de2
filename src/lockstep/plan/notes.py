"""What people should know about settings that do nothing, and about what a pipeline waits for. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from lockstep.config import RunConfig
from lockstep.hardware.resolve import Placement
from lockstep.plan.batch import BatchPlan
from lockstep.plan.plan import ResumePoint, TaskFacts
from lockstep.strategies import strategies

#: So many micro-batches for each device keep a pipeline busy (Huang et al. 2019, https://arxiv.org/abs/1811.06965).
FILL = 4


def strategy_notes(config: RunConfig, placement: Placement, batch: BatchPlan) -> Iterator[str]:
    """Notes for the plan."""
    spec, exact = placement.spec, config.training.reproducibility == "exact"
    for owner in strategies().values():
        names = [key for setting in owner.settings for key in _changed_keys(config, setting)]
        if names and owner is not spec:
            yield f"{', '.join(names)} has no effect: the strategy is {spec.name}, not {owner.name}."
        elif names and exact:
            yield f"{', '.join(names)} has no effect: exact mode sums gradients in a fixed tree."
    if spec.scatters and config.training.compile:
        yield f"training.compile has no effect: {spec.name} copies the model to its GPUs in every step, not compiled."
    devices, parts = len(placement.devices) if placement.nodes == 1 else placement.world_size, batch.accumulate
    if spec.state == "staged" and config.pipeline.in_process:
        yield f"One process: the {devices} devices take turns, so it is no faster than one."
    elif spec.state == "staged" and parts < FILL * devices:
        # Section 2.3 of the same.
        share = (devices - 1) / (parts + devices - 1)
        yield (
            f"With {parts} micro-batch{'es' * (parts > 1)} a step, the {devices} devices of a pipeline wait "
            f"{share:.0%} of the time: more, smaller ones (--grad-accum-steps, --batch-size) fill it better."
        )


def module_notes(config: RunConfig, placement: Placement) -> Iterator[str]:
    """Notes for the plan of a ``LightningModule``: settings that do nothing, since its own parts decide."""
    if placement.accelerator == "cpu" and placement.precision == "16-mixed":
        yield "On a CPU, Lightning's Trainer uses bf16-mixed instead of 16-mixed."
    own = {
        "the module's configure_optimizers() decides": [
            *_changed("optimizer", config.optimizer),
            *_changed("scheduler", config.scheduler),
        ],
        "its DataLoaders and data module decide": [
            *_changed("training", config.training, "batch_size"),
            *_changed("data", config.data),
            *_changed("validation", config.validation, "batch_size"),
        ],
    }
    for owner, names in own.items():
        if names:
            yield f"{', '.join(names)} has no effect on a LightningModule: {owner}."


def optimizer_notes(config: RunConfig, facts: TaskFacts) -> Iterator[str]:
    """Notes for the plan of a task that makes its own optimizer or scheduler: settings that do nothing."""
    still_heeded = {"lr_scaling", "base_batch_size"}
    names = _changed("optimizer", config.optimizer, *(type(config.optimizer).model_fields.keys() - still_heeded))
    if facts.optimizer_lr is not None and names:
        yield f"{', '.join(sorted(names))} has no effect: the task makes its own optimizer."
    names = _changed("scheduler", config.scheduler)
    if facts.own_schedule and names:
        yield f"{', '.join(sorted(names))} has no effect: the task makes its own scheduler."


def _changed_keys(config: RunConfig, setting: str) -> list[str]:
    """The keys of ``setting``, a key or a section, that are not at their default."""
    section, _, name = setting.partition(".")
    return _changed(section, getattr(config, section), *filter(None, [name]))


def _changed(section: str, settings: BaseModel, *names: str) -> list[str]:
    """Those of ``names`` (default: all) that are not at their default."""
    fields = type(settings).model_fields
    return [f"{section}.{name}" for name in names or fields if getattr(settings, name) != fields[name].default]


def data_notes(facts: TaskFacts, resume: ResumePoint | None, workers: int) -> Iterator[str]:
    """What a resume cannot compare, and what it was asked to accept."""
    if facts.unstable:
        yield (
            f"Not the same each time it is read: {', '.join(facts.unstable)} of the training samples. A resume cannot "
            "see whether that changed. Draws from random, numpy.random or torch's global generator are repeatable."
        )
    if facts.read_file is not None and workers:
        yield (
            f"Warning: {workers} loader worker(s) share the position in {facts.read_file}, which the data set has "
            "open, and may read wrong samples, as in a DataLoader. Open the file in __getitem__, on the first call."
        )
    if resume is not None and resume.accept_data and resume.fingerprint not in (None, facts.fingerprint):
        yield (
            f"Warning: the training data are not those of the checkpoint (fingerprint {resume.fingerprint}, now "
            f"{facts.fingerprint}); accepted with --accept-data."
        )
