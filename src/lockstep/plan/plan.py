"""The plan: one object, computed once an attempt, printed, saved, and used by all."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from lockstep.config import RunConfig
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.hardware.resolve import Placement
from lockstep.plan.batch import BatchPlan, resolve_batch
from lockstep.plan.loader import ITS_OWN, LoaderFacts, reasons_of_loader, training_of_loader
from lockstep.plan.lr import scale_lr
from lockstep.plan.order import OrderPlan, order_note, resolve_order
from lockstep.plan.schedule import Schedule, resolve_schedule
from lockstep.plan.workers import Recommendation, choose_workers


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class TaskFacts(_Frozen):
    """What the plan must know of a task: sizes of its data and traits of its model.

    ``lengths``: a hash of the lengths of the training samples, if the task gives them. ``loader``: the training
    loader that a ``LightningModule`` brings.
    """

    name: str
    train_samples: int
    val_samples: int = 0
    test_samples: int = 0
    parameters: int = 0
    has_batchnorm: bool = False
    whole_batches: bool = False
    lengths: str | None = None
    loader: LoaderFacts | None = None
    fingerprint: str = ""


class ResumePoint(_Frozen):
    """Where an earlier attempt stopped; sizes in samples. ``hold``: keep its global batch. Its order always stays."""

    step: int
    epoch: int
    position: int
    samples_seen: int
    global_batch: int
    order: OrderPlan = OrderPlan()
    hold: bool = True


class LoaderPlan(_Frozen):
    """Input pipeline of one rank."""

    num_workers: int
    prefetch_factor: int
    persistent_workers: bool
    pin_memory: bool


class Choice(_Frozen):
    """One decision: what, and why."""

    name: str
    value: str
    reason: str


class Plan(_Frozen):
    """Everything computed before the first step. ``position`` and sizes are in samples, ``lr`` per step."""

    task: TaskFacts
    placement: dict[str, Any]
    batch: BatchPlan
    order: OrderPlan = OrderPlan()
    schedule: Schedule
    loader: LoaderPlan
    epochs: int
    total_steps: int
    threads: int
    sync_batchnorm: bool
    eval_batch_size: int
    pre_scale: float
    reproducibility: str
    seed: int
    overfit_samples: int | None = None
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return self.batch.ranks

    @property
    def steps_per_epoch(self) -> int:
        return self.batch.steps_per_epoch

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of every parameter, so that a forward pass is collective."""
        return bool(self.placement["strategy"] == "fsdp")

    @property
    def pipelined(self) -> bool:
        """Whether devices hold stages of one model, so that all of them work on the same samples."""
        return bool(self.placement["strategy"] == "pipeline")

    @property
    def effective_batch_label(self) -> str:
        """As document and page word it: ``Effective batch size: 64 (32 × 2 GPUs)``."""
        devices = self.batch.ranks * self.batch.devices_per_rank
        kind = "GPUs" if self.placement["accelerator"] == "gpu" else "CPU ranks"
        factors = f"{self.batch.batch_size} × {devices} {kind if devices > 1 else kind.rstrip('s')}"
        if self.batch.accumulate > 1:
            factors += f" × {self.batch.accumulate} micro-batches"
        return f"Effective batch size: {self.batch.global_batch} ({factors})"

    def explain(self) -> list[tuple[str, str, str]]:
        """``(name, value, reason)`` of every decision, in reading order."""
        return [(choice.name, choice.value, choice.reason) for choice in self.choices]

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.model_dump(mode="json"),
            "steps_per_epoch": self.steps_per_epoch,
            "effective_batch": self.effective_batch_label,
        }


def make_plan(
    config: RunConfig,
    placement: Placement,
    facts: TaskFacts,
    *,
    cores: int,
    resume: ResumePoint | None = None,
    workers: Recommendation | str | None = None,
) -> Plan:
    """Resolve everything that does not change during the run.

    Args:
        cores: CPU cores this node may use.
        resume: given on resume; its global batch is held unless it says otherwise.
        workers: what measuring said for ``data.num_workers: auto``, or why nothing was measured.

    Raises:
        ConfigError, DataError, UnsupportedError: what was asked for cannot be.
    """
    t = config.training
    exact = t.reproducibility == "exact"
    devices_per_rank = len(placement.devices) if placement.strategy == "dp" else 1
    if exact:
        _check_exact(config, placement)
    if placement.strategy in {"fsdp", "pipeline"}:
        _check_divided(config, placement, facts)
    # The stages of a pipeline all take part in the same samples.
    readers = 1 if placement.strategy == "pipeline" else placement.world_size
    held = resume.global_batch if resume and resume.hold else t.global_batch_size
    if facts.loader is not None:
        t = training_of_loader(config, facts.loader, held=held, devices=placement.world_size)
        config = config.model_copy(update={"training": t})
    sync_bn, sync_reason = _sync_batchnorm(config, readers, facts.has_batchnorm, exact)
    samples, overfit = facts.train_samples, None
    batch, reasons = resolve_batch(
        samples=samples,
        ranks=readers,
        devices_per_rank=devices_per_rank,
        batch_size=t.batch_size,
        accumulate=t.accumulate,
        global_batch_size=held,
        tail=t.tail,
        lanes=t.lanes if exact else None,
        has_batchnorm=facts.has_batchnorm,
        sync_batchnorm=sync_bn and readers > 1,
        even=facts.loader is not None,
    )
    if config.debug.overfit_batches:
        overfit = min(samples, config.debug.overfit_batches * batch.global_batch)
        batch = batch.model_copy(update={"samples": overfit})
    order, order_reason = resolve_order(
        config.data,
        samples=facts.train_samples,
        lengths=facts.lengths is not None,
        lanes=t.lanes,
        held=resume.order if resume else None,
    )
    lr, lr_reason, lr_note = scale_lr(
        config.optimizer.lr,
        config.optimizer.lr_scaling,
        global_batch=batch.global_batch,
        base_batch=config.optimizer.base_batch_size or t.batch_size,
    )
    epochs, total_steps, offset, total_reason = _length(config, batch, resume)
    schedule, schedule_reason = resolve_schedule(
        config.scheduler, lr=lr, total_steps=total_steps + offset, steps_per_epoch=batch.steps_per_epoch, offset=offset
    )
    local_ranks = -(-placement.world_size // placement.nodes)
    threads, threads_reason = _threads(t.threads, exact, cores, local_ranks)
    workers_per_rank, loader_reason = choose_workers(
        config.data, whole_batches=facts.whole_batches, cores=cores, local_ranks=local_ranks, measured=workers
    )
    loader = _loader(config, placement.accelerator, workers_per_rank)
    choices = [
        Choice(name="accelerator", value=placement.accelerator, reason=placement.reasons["accelerator"]),
        Choice(name="devices", value=", ".join(placement.devices), reason=placement.reasons["devices"]),
        Choice(name="strategy", value=placement.strategy, reason=placement.reasons["strategy"]),
        Choice(name="backend", value=placement.backend or "none", reason=placement.reasons["backend"]),
        Choice(name="ranks", value=str(placement.world_size), reason=placement.reasons["world_size"]),
        Choice(name="precision", value=placement.precision, reason=placement.reasons["precision"]),
        Choice(name="global batch", value=str(batch.global_batch), reason=reasons["global_batch"]),
        Choice(name="batch size", value=str(batch.batch_size), reason=reasons["batch_size"]),
        Choice(name="accumulate", value=str(batch.accumulate), reason=reasons["accumulate"]),
        Choice(name="tail", value=t.tail, reason=reasons["tail"]),
        Choice(name="order", value=str(order), reason=order_reason),
        Choice(name="steps", value=str(total_steps), reason=total_reason),
        Choice(name="learning rate", value=f"{lr:g}", reason=lr_reason),
        Choice(name="schedule", value=config.scheduler.name, reason=schedule_reason),
        Choice(name="reproducibility", value=t.reproducibility, reason=_reproducibility_reason(exact, t.lanes)),
        Choice(name="sync batchnorm", value="on" if sync_bn else "off", reason=sync_reason),
        Choice(name="threads", value=str(threads), reason=threads_reason),
        Choice(
            name="loader", value=f"{loader.num_workers} worker{'s' * (loader.num_workers != 1)}", reason=loader_reason
        ),
    ]
    if facts.loader is not None:
        choices, lr_note = _choices_of_loader(choices, facts.loader), None
    advice = lr_note, order_note(config.data, order, batch.global_batch)
    notes = [*placement.notes, *filter(None, advice), *_resume_notes(resume, batch)]
    if facts.has_batchnorm and batch.accumulate > 1 and not exact:
        notes.append(
            f"BatchNorm sees micro-batches, not the global batch of {batch.global_batch}: with accumulation its "
            "statistics depend on how the batch is divided. reproducibility: exact keeps them the same on any devices."
        )
    return Plan(
        task=facts,
        placement=placement.as_dict(),
        batch=batch,
        order=order,
        schedule=schedule,
        loader=loader,
        epochs=epochs,
        total_steps=total_steps,
        threads=threads,
        sync_batchnorm=sync_bn,
        eval_batch_size=(config.validation.batch_size or t.batch_size) * devices_per_rank,
        # A sum over the global batch, scaled back to about a mean: a power of two, so that it is exact.
        pre_scale=2.0 ** -(batch.global_batch.bit_length() - 1),
        reproducibility=t.reproducibility,
        seed=t.seed,
        overfit_samples=overfit,
        choices=tuple(choices),
        notes=tuple(notes),
    )


def _choices_of_loader(choices: list[Choice], loader: LoaderFacts) -> list[Choice]:
    reasons = reasons_of_loader(loader, {choice.name: choice.reason for choice in choices})
    values = dict.fromkeys(ITS_OWN, "its own") | ({} if loader.shuffle else {"order": "index"})
    return [Choice(name=c.name, value=values.get(c.name, c.value), reason=reasons[c.name]) for c in choices]


def _check_exact(config: RunConfig, placement: Placement) -> None:
    lanes, ranks = config.training.lanes, placement.world_size
    refused = {
        f"strategy {placement.strategy}": placement.strategy not in {"single", "ddp"},
        "training.compile": config.training.compile,
        "training.engine lightning": config.training.engine == "lightning",
        "distributed.sync_batchnorm on": config.distributed.sync_batchnorm == "on",
    }
    for name, asked in refused.items():
        if asked:
            raise UnsupportedError(
                f"reproducibility: exact does not go together with {name}",
                why="its sums or kernels depend on how the work is divided",
                fix="use strategy single or ddp with the native engine, or reproducibility: fast",
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
        "training.engine lightning": (config.training.engine == "lightning", "Lightning would divide the model itself"),
        "a LightningModule": (facts.loader is not None, "its Trainer would divide the model itself"),
        "fsdp.cpu_offload on the CPU": (
            fsdp and config.fsdp.cpu_offload and placement.accelerator == "cpu",
            "there is no other memory to move anything to",
        ),
        "lockstep verify": (not fsdp and config.debug.trace != "off", "no process sees the weights of all stages"),
    }
    for name, (asked, why) in refused.items():
        if asked:
            raise UnsupportedError(
                f"strategy {placement.strategy} does not go together with {name}", why=why, fix="leave one of them out"
            )


def _sync_batchnorm(config: RunConfig, ranks: int, has_batchnorm: bool, exact: bool) -> tuple[bool, str]:
    setting = config.distributed.sync_batchnorm
    if not has_batchnorm:
        return False, "the model has no BatchNorm"
    if exact:
        return False, "exact mode computes statistics per lane and merges them in a fixed order"
    if ranks == 1:
        return False, "one rank sees the whole micro-batch"
    if setting == "auto":
        return True, f"auto: with {ranks} ranks, statistics of the whole micro-batch keep the result of one device"
    return setting == "on", "as configured"


def _length(config: RunConfig, batch: BatchPlan, resume: ResumePoint | None) -> tuple[int, int, int, str]:
    """Epochs, total optimizer steps, the schedule's offset, and the reason."""
    t = config.training
    if config.debug.fast_dev_run:
        return 1, 1, 0, "fast_dev_run: one step"
    per_epoch, offset = batch.steps_per_epoch, 0
    total = t.epochs * per_epoch
    start = config.debug.start_position
    if resume is None and start:
        resume = ResumePoint(step=0, epoch=0, position=start, samples_seen=0, global_batch=batch.global_batch)
    if resume:  # an earlier resume may have changed the global batch, so what is left is counted from here
        total = resume.step + batch.steps_left(resume.position) + (t.epochs - resume.epoch - 1) * per_epoch
        offset = t.epochs * per_epoch - total
    reason = f"{t.epochs} epochs × {per_epoch} steps"
    if t.max_steps is not None and t.max_steps < total:
        epochs = t.epochs if resume else -(-t.max_steps // per_epoch)
        return epochs, t.max_steps, offset, f"max_steps, before {reason} are over"
    return t.epochs, total, offset, reason


def _threads(setting: int | None, exact: bool, cores: int, local_ranks: int) -> tuple[int, str]:
    if setting is not None:
        return setting, "as configured"
    if exact:
        return 1, "exact mode: more intra-op threads change the order of sums"
    return max(1, cores // local_ranks), f"{cores} cores shared by {local_ranks} rank(s) of this node"


def _loader(config: RunConfig, accelerator: str, workers: int) -> LoaderPlan:
    d = config.data
    return LoaderPlan(
        num_workers=workers,
        prefetch_factor=d.prefetch_factor or 2,
        persistent_workers=workers > 0 if d.persistent_workers is None else d.persistent_workers,
        pin_memory=accelerator == "gpu" if d.pin_memory is None else d.pin_memory,
    )


#: Time of a step in exact mode against fast, as measured by ``benchmarks/exact_cost.py`` with 8 lanes on CPU cores.
EXACT_COST = "measured: 0.9 times the time of fast on two CPU ranks, 1.8 to 2.9 times on one"


def _reproducibility_reason(exact: bool, lanes: int) -> str:
    if exact:
        return (
            f"{lanes} lanes, each computed alone, summed along one tree: equal bits on any ranks that divide them "
            f"({EXACT_COST})"
        )
    return "same samples, denominators and schedule on any devices; equal to rounding"


def _resume_notes(resume: ResumePoint | None, batch: BatchPlan) -> list[str]:
    if resume is None:
        return []
    if resume.global_batch == batch.global_batch:
        return [f"Resumes at step {resume.step}; the global batch stays {batch.global_batch}."]
    return [
        f"Resumes at step {resume.step} with a global batch of {batch.global_batch} instead of {resume.global_batch}: "
        "from here on the run is no longer the one that was started."
    ]
