"""Making the plan: a line for each decision, which returns what was decided and the choice to show for it."""

from __future__ import annotations

from lockstep.config import RunConfig
from lockstep.hardware.resolve import Placement
from lockstep.plan.batch import BatchPlan, resolve_batch
from lockstep.plan.checkpoint import choose_form
from lockstep.plan.compatibility import refuse_contradictions
from lockstep.plan.horizon import Course, resolve_course
from lockstep.plan.loader import ITS_OWN, LoaderFacts, reasons_of_loader, training_of_loader
from lockstep.plan.monitor import resolve_monitor
from lockstep.plan.notes import data_notes, module_notes, optimizer_notes, strategy_notes
from lockstep.plan.order import OrderPlan, order_note, resolve_order
from lockstep.plan.plan import Choice, LoaderPlan, Plan, ResumePoint, TaskFacts
from lockstep.plan.workers import choose_workers

#: Operations of a step that take one core about 3 ms; passing parts of them to other cores takes as long.
SMALL_STEP = 5e7
#: Time of a step in exact mode against fast, as measured by ``benchmarks/exact_cost.py`` with 8 lanes on CPU cores.
EXACT_COST = "measured: 0.9 times the time of fast on two CPU ranks, 1.8 to 2.9 times on one"


def make_plan(
    config: RunConfig,
    placement: Placement,
    facts: TaskFacts,
    *,
    cores: int,
    preset: tuple[int, str] | None = None,
    resume: ResumePoint | None = None,
) -> Plan:
    """Resolve everything that does not change during the run.

    Args:
        cores: CPU cores this node may use.
        preset: intra-op threads that the user has set outside Lockstep, and where.
        resume: given on resume; its global batch is held unless it says otherwise.

    Raises:
        ConfigError, DataError, UnsupportedError: what was asked for cannot be.
    """
    refuse_contradictions(config, placement, facts)
    held = resume.global_batch if resume and resume.hold else config.training.global_batch_size
    of_module: list[str] = []
    if facts.loader is not None:
        of_module = list(module_notes(config, placement))
        training = training_of_loader(config, facts.loader, held=held, devices=placement.world_size)
        config = config.model_copy(update={"training": training})
    sync_batchnorm, synced = _sync_batchnorm(config, placement, facts)
    batch, sized = _batch(config, placement, facts, held=held, sync_batchnorm=sync_batchnorm)
    order, ordered = _order(config, facts, resume)
    course = resolve_course(config, batch, resume, facts)
    threads, threaded = _threads(config, placement, facts, batch.batch_size, cores, preset)
    loader, loaded = _loader(config, placement, facts, cores)
    in_shards, saved = _checkpoints(config, placement, facts)
    judged = facts.val_samples > 0 or facts.loader is not None  # a module evaluates on what it likes
    monitor, mode, judging = resolve_monitor(config.checkpoint, facts.monitor, judged=judged)
    choices = [*_placed(placement), *sized, ordered, *course.choices]
    choices += [_parameters(facts), _reproducibility(config), synced, threaded, loaded, *saved, judging]
    return Plan(
        task=facts,
        placement=placement.as_dict(),
        batch=batch,
        order=order,
        schedule=course.schedule,
        loader=loader,
        epochs=course.epochs,
        total_steps=course.total_steps,
        threads=threads,
        sync_batchnorm=sync_batchnorm,
        eval_batch_size=config.validation.batch_size or config.training.batch_size,
        # A sum over the global batch, scaled back to about a mean: a power of two, so that it is exact.
        pre_scale=2.0 ** -(batch.global_batch.bit_length() - 1),
        reproducibility=config.training.reproducibility,
        seed=config.training.seed,
        overfit_samples=batch.samples if config.debug.overfit_batches else None,
        sharded_checkpoints=in_shards,
        monitor=monitor,
        mode=mode,
        accepted_data=resume.fingerprint if resume and resume.accept_data else None,
        choices=tuple(choices if facts.loader is None else _choices_of_loader(choices, facts.loader)),
        notes=(*_notes(config, placement, facts, batch, order, course, resume, loader), *of_module),
    )


def _placed(placement: Placement) -> list[Choice]:
    reasons = placement.reasons
    return [
        Choice(name="accelerator", value=placement.accelerator, reason=reasons["accelerator"]),
        Choice(name="devices", value=", ".join(placement.devices), reason=reasons["devices"]),
        Choice(name="strategy", value=placement.strategy, reason=reasons["strategy"]),
        Choice(name="backend", value=placement.backend or "none", reason=reasons["backend"]),
        Choice(name="ranks", value=str(placement.world_size), reason=reasons["world_size"]),
        Choice(name="precision", value=placement.precision, reason=reasons["precision"]),
    ]


def _readers(placement: Placement) -> int:
    """How many ranks read samples of their own: the stages of a pipeline all take part in the same ones."""
    return 1 if placement.spec.state == "staged" else placement.world_size


def _sync_batchnorm(config: RunConfig, placement: Placement, facts: TaskFacts) -> tuple[bool, Choice]:
    setting, ranks = config.distributed.sync_batchnorm, _readers(placement)
    if not facts.has_batchnorm:
        on, reason = False, "the model has no BatchNorm"
    elif config.training.reproducibility == "exact":
        on, reason = False, "exact mode computes statistics per lane and merges them in a fixed order"
    elif placement.spec.scatters:
        on, reason = False, f"{placement.strategy} gives each GPU a part of the micro-batch, with separate statistics"
    elif ranks == 1:
        on, reason = False, "one rank sees the whole micro-batch"
    elif setting == "auto":
        on = True
        reason = f"auto: with {ranks} ranks, statistics of the whole micro-batch keep the result of one device"
    else:
        on, reason = setting == "on", "as configured"
    return on, Choice(name="sync batchnorm", value="on" if on else "off", reason=reason)


def _batch(
    config: RunConfig, placement: Placement, facts: TaskFacts, *, held: int | None, sync_batchnorm: bool
) -> tuple[BatchPlan, list[Choice]]:
    t = config.training
    batch, reasons = resolve_batch(
        samples=facts.train_samples,
        ranks=_readers(placement),
        devices_per_rank=len(placement.devices) if placement.spec.scatters else 1,
        batch_size=t.batch_size,
        accumulate=t.accumulate,
        global_batch_size=held,
        tail=t.tail,
        lanes=t.lanes if t.reproducibility == "exact" else None,
        has_batchnorm=facts.has_batchnorm and not (facts.loader and facts.loader.batches),
        sync_batchnorm=sync_batchnorm,
        even=facts.loader is not None,
    )
    if config.debug.overfit_batches:
        few = min(facts.train_samples, config.debug.overfit_batches * batch.global_batch)
        batch = batch.model_copy(update={"samples": few})
    return batch, [
        Choice(name="global batch", value=str(batch.global_batch), reason=reasons["global_batch"]),
        Choice(name="batch size", value=str(batch.batch_size), reason=reasons["batch_size"]),
        Choice(name="accumulate", value=str(batch.accumulate), reason=reasons["accumulate"]),
        Choice(name="tail", value=t.tail, reason=reasons["tail"]),
    ]


def _order(config: RunConfig, facts: TaskFacts, resume: ResumePoint | None) -> tuple[OrderPlan, Choice]:
    order, reason = resolve_order(
        config.data,
        samples=facts.train_samples,
        lengths=facts.lengths is not None,
        lanes=config.training.lanes,
        held=resume.order if resume else None,
    )
    return order, Choice(name="order", value=str(order), reason=reason)


def _local_ranks(placement: Placement) -> int:
    return -(-placement.world_size // placement.nodes)


def _threads(
    config: RunConfig,
    placement: Placement,
    facts: TaskFacts,
    batch_size: int,
    cores: int,
    preset: tuple[int, str] | None,
) -> tuple[int, Choice]:
    local_ranks = _local_ranks(placement)
    if config.training.threads is not None:
        threads, reason = config.training.threads, "as configured"
    elif config.training.reproducibility == "exact":
        threads, reason = 1, "exact mode: more intra-op threads change the order of sums"
    elif preset is not None:
        threads, reason = preset
    elif placement.accelerator == "cpu" and 0 < (flops := 6 * facts.multiply_adds * batch_size) < SMALL_STEP:
        threads, reason = 1, f"a step has {flops / 1e6:.2g} MFLOP: more threads would wait longer than they compute"
    else:
        threads = max(1, cores // local_ranks)
        reason = f"{cores} cores shared by {local_ranks} rank(s) of this node"
    return threads, Choice(name="threads", value=str(threads), reason=reason)


def _loader(config: RunConfig, placement: Placement, facts: TaskFacts, cores: int) -> tuple[LoaderPlan, Choice]:
    d = config.data
    workers, most, reason = choose_workers(d, facts, cores=cores, local_ranks=_local_ranks(placement))
    loader = LoaderPlan(
        num_workers=workers,
        most_workers=most,
        prefetch_factor=d.prefetch_factor or 2,
        persistent_workers=most > 0 if d.persistent_workers is None else d.persistent_workers,
        pin_memory=placement.accelerator == "gpu" if d.pin_memory is None else d.pin_memory,
    )
    value = f"{workers} worker{'s' * (workers != 1)}" + (f" at first, up to {most}" if most > workers else "")
    return loader, Choice(name="loader", value=value, reason=reason)


def _checkpoints(config: RunConfig, placement: Placement, facts: TaskFacts) -> tuple[bool, list[Choice]]:
    form = config.checkpoint.sharded
    in_shards, reason = choose_form(form, placement.spec, facts.parameters, config.optimizer)
    if placement.spec.state != "sharded" and form != "on":
        return in_shards, []
    return in_shards, [Choice(name="checkpoints", value="in shards" if in_shards else "whole", reason=reason)]


def _parameters(facts: TaskFacts) -> Choice:
    reason = f"requires_grad is off for the other {facts.frozen:,}" if facts.frozen else "all of the model"
    return Choice(name="trained parameters", value=f"{facts.parameters - facts.frozen:,}", reason=reason)


def _reproducibility(config: RunConfig) -> Choice:
    reason = "same samples, denominators and schedule on any devices; equal to rounding"
    if config.training.reproducibility == "exact":
        reason = (
            f"{config.training.lanes} lanes, each computed alone, summed along one tree: equal bits on any ranks that "
            f"divide them ({EXACT_COST})"
        )
    return Choice(name="reproducibility", value=config.training.reproducibility, reason=reason)


def _choices_of_loader(choices: list[Choice], loader: LoaderFacts) -> list[Choice]:
    reasons = reasons_of_loader(loader, {choice.name: choice.reason for choice in choices})
    values = dict.fromkeys(ITS_OWN, "its own") | (
        {} if loader.shuffle else {"order": "index" if loader.batches is None else "its own"}
    )
    return [Choice(name=c.name, value=values.get(c.name, c.value), reason=reasons[c.name]) for c in choices]


def _notes(
    config: RunConfig,
    placement: Placement,
    facts: TaskFacts,
    batch: BatchPlan,
    order: OrderPlan,
    course: Course,
    resume: ResumePoint | None,
    loader: LoaderPlan,
) -> list[str]:
    of_lr = course.notes if facts.loader is None else ()  # a module's learning rate is its own
    of_order = order_note(config.data, order, batch.global_batch)
    notes = [*placement.notes, *of_lr, *filter(None, (of_order,)), *_resume_notes(resume, batch)]
    notes += data_notes(facts, resume, loader.num_workers)
    notes += strategy_notes(config, placement, batch)
    notes += optimizer_notes(config, facts)
    if facts.has_batchnorm and placement.spec.scatters:
        notes.append(
            f"BatchNorm does not see whole micro-batches: each of the {len(placement.devices)} GPUs normalises its "
            "part alone, and the running statistics are those of the first one. "
            f"{placement.strategy} cannot synchronise them; ddp does."
        )
    if facts.has_batchnorm and batch.accumulate > 1 and config.training.reproducibility != "exact":
        notes.append(
            f"BatchNorm normalises micro-batches, not the global batch of {batch.global_batch}: its statistics depend "
            f"on accumulate ({batch.accumulate}). reproducibility: exact keeps them the same on any devices."
        )
    return notes


def _resume_notes(resume: ResumePoint | None, batch: BatchPlan) -> list[str]:
    if resume is None:
        return []
    if resume.global_batch == batch.global_batch:
        return [f"Resumes at step {resume.step}; the global batch stays {batch.global_batch}."]
    return [
        f"Resumes at step {resume.step} with a global batch of {batch.global_batch} instead of {resume.global_batch}: "
        "from here on the run is no longer the one that was started."
    ]
