"""Make the plan: one function for each decision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.arithmetic import ceil_div
from lockstep.config import CheckpointConfig, DistributedConfig, OptimizerConfig, RunConfig
from lockstep.errors import ConfigError, many
from lockstep.hardware.resolve import Placement
from lockstep.planning.batch import BatchPlan, order_notes, resolve_batch, resolve_order
from lockstep.planning.conflicts import refuse_contradictions
from lockstep.planning.decision import Decision, Decisions, by_key, decide
from lockstep.planning.loader import resolve_loader
from lockstep.planning.notes import run_notes
from lockstep.planning.plan import Mode, Plan, ResumePoint, TaskFacts
from lockstep.planning.schedule import resolve_course
from lockstep.strategies import StrategySpec

#: Operations of a step that take one core about 3 ms; passing parts of them to other cores takes as long.
SMALL_STEP = 5e7
#: Time of a step in exact mode against fast, as measured by ``benchmarks/exact_cost.py`` with 8 lanes on CPU cores.
EXACT_COST = "measured: 0.9 times the time of fast on two CPU ranks, 1.8 to 2.9 times on one"
#: To gather 0.4 GB of weights and optimizer state stops all ranks for 0.3 s, 0.9 GB for 1.8 s (two gloo ranks,
#: ``benchmarks/sharded_checkpoint.py``). Below, files that any tool reads are worth more than the pause.
SHARDED_FROM_BYTES = 500_000_000
#: DistributedDataParallel's first bucket (torch's ``_DEFAULT_FIRST_BUCKET_BYTES``).
FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class PlanInputs:
    """Inputs of the decisions; ``cores`` and ``preset`` as for :func:`make_plan`."""

    config: RunConfig
    placement: Placement
    facts: TaskFacts
    cores: int
    preset: tuple[int, str] | None = None

    @property
    def readers(self) -> int:
        """Ranks that read different samples; all stages of a pipeline work on the same ones."""
        return 1 if self.placement.spec.state == "staged" else self.placement.world_size

    @property
    def local_ranks(self) -> int:
        return ceil_div(self.placement.world_size, self.placement.nodes)

    @property
    def exact(self) -> bool:
        return self.config.training.reproducibility == "exact"

    @property
    def on_gpu(self) -> bool:
        return self.placement.accelerator == "gpu"


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
        preset: intra-op threads set by the user outside Lockstep, and their source.
        resume: state of the previous attempt; its global batch is kept if ``resume.hold``.

    Raises:
        ConfigError, DataError, UnsupportedError: settings that contradict each other, the data or the devices.
    """
    refuse_contradictions(config, placement, facts)
    fixed_global_batch = resume.global_batch if resume and resume.hold else config.training.global_batch_size
    inputs = PlanInputs(config, placement, facts, cores, preset)
    batchnorm_decision = _sync_batchnorm(inputs)
    order, order_decision = resolve_order(
        config.data,
        samples=facts.train_samples,
        lengths=facts.lengths is not None,
        lanes=config.training.lanes,
        saved_order=resume.order if resume else None,
        sampling=facts.sampling,
    )
    epoch_samples = order.positions or facts.train_samples
    batch, batch_decisions = _batch(inputs, epoch_samples, fixed_global_batch, bool(batchnorm_decision.value))
    course = resolve_course(
        config,
        batch,
        done=(resume.step, resume.epoch, resume.position) if resume else None,
        task_lr=facts.optimizer_lr,
        has_scheduler=facts.own_schedule,
    )
    loader, workers_decision = resolve_loader(
        config.data, facts, cores=cores, local_ranks=inputs.local_ranks, pin_memory=inputs.on_gpu
    )
    monitor, mode, monitor_decision = resolve_monitor(
        config.checkpoint,
        facts.monitor,
        facts.metric_modes,
        judged=facts.val_samples > 0 or facts.validates_itself,
    )
    layout_decisions = _memory_layout(inputs)
    # choose_form counts 32 bits for each parameter.
    float32_parameters = facts.parameters * placement.number_format.weight_bytes // 4
    decisions = [
        *_placed(placement),
        *_kernels(inputs),
        *layout_decisions,
        *_data_device(inputs),
        *_reduction(inputs, by_rows=not any(decision.value for decision in layout_decisions)),
        *batch_decisions.values(),
        order_decision,
        *course.decisions,
        _parameters(facts),
        *_weight_decay(inputs),
        *_compiled(inputs, batch),
        *_averaging(inputs, course.schedule.total_steps),
        _reproducibility(inputs),
        batchnorm_decision,
        _threads(inputs, batch),
        workers_decision,
        choose_form(config.checkpoint.sharded, placement.spec, float32_parameters, config.optimizer),
        monitor_decision,
    ]
    notes = [
        *placement.notes,
        *course.notes,
        *order_notes(config.data, order, batch.global_batch),
        *run_notes(config, placement, facts, batch, resume, loader.num_workers),
    ]
    return Plan(
        task=facts,
        placement=placement.as_dict(),
        batch=batch,
        order=order,
        schedule=course.schedule,
        loader=loader,
        epochs=course.epochs,
        eval_batch_size=config.validation.batch_size or config.training.batch_size,
        # A sum over the global batch, scaled back to about a mean: a power of two, so that it is exact.
        pre_scale=2.0 ** -(batch.global_batch.bit_length() - 1),
        seed=config.training.seed,
        overfit_samples=batch.samples if config.debug.overfit_batches else None,
        monitor=monitor,
        mode=mode,
        accepted_data=resume.fingerprint if resume and resume.accept_data else None,
        decisions=by_key(decisions),
        notes=tuple(notes),
    )


def _placed(placement: Placement) -> list[Decision]:
    values = {
        "accelerator": placement.accelerator,
        "devices": ", ".join(placement.devices),
        "strategy": placement.strategy,
        "backend": placement.backend,
        "ranks": placement.world_size,
        "precision": placement.precision,
    }
    reasons = placement.reasons | {"ranks": placement.reasons["world_size"]}
    return [decide(key, (True, value, reasons[key])) for key, value in values.items()]


def _kernels(inputs: PlanInputs) -> list[Decision]:
    """Decide the precision of float32 products and cuDNN's choice of algorithms; no decisions on a CPU."""
    products = inputs.config.hardware.matmul_precision
    measures = inputs.config.hardware.cudnn_benchmark
    tf32 = "auto: TF32, which keeps the range of float32 and 10 bits of its mantissa"
    if not inputs.on_gpu:
        return []
    return [
        decide(
            "matmul_precision",
            (inputs.exact, "highest", "exact mode: float32, whose rounding is the same on every GPU of a model"),
            (products != "auto", products, "as set"),
            (inputs.placement.tf32, "high", tf32),
            (True, "highest", "auto: this GPU has no TF32"),
        ),
        decide(
            "cudnn_benchmark",
            (inputs.exact, False, "exact mode: measured choices may differ from run to run"),
            (measures != "auto", measures == "on", "as set"),
            (inputs.facts.lengths is None, True, "auto: samples have one length, so that each shape is measured once"),
            (True, False, "auto: samples differ in length, and each shape would be measured"),
        ),
    ]


def _memory_layout(inputs: PlanInputs) -> list[Decision]:
    """Decide whether weights of 2-D convolutions are channels_last; no decision for a model without them."""
    config = inputs.config
    placement = inputs.placement
    if not inputs.facts.convolutions:
        return []
    setting = config.hardware.channels_last
    return [
        decide(
            "channels_last",
            (
                placement.spec.divides or placement.spec.scatters,
                False,
                f"{placement.strategy} distributes weights row by row",
            ),
            (setting != "auto", setting == "on", "as set"),
            (inputs.exact, False, "exact mode: as the model has it"),
            (config.training.compile, False, "auto: torch.compile chooses layouts itself"),
            (not inputs.on_gpu, False, "auto: as the model has it on a CPU"),
            (
                placement.number_format.is_half,
                True,
                f"auto: {placement.precision} convolutions on a GPU use tensor cores",
            ),
            (True, False, "auto: as the model has it in 32-bit precision"),
            shown={True: "channels_last", False: "as the model has it"},
        )
    ]


def _data_device(inputs: PlanInputs) -> list[Decision]:
    """Decide the device of arrays in memory during training; no decision for other data or on a CPU."""
    if not inputs.on_gpu or not inputs.facts.array_bytes:
        return []
    setting = inputs.config.data.device
    return [
        decide(
            "data_device",
            (setting != "auto", setting, "as set"),
            (True, "auto", "on the GPU if they fill at most a fifth of its free memory"),
        )
    ]


def _sync_batchnorm(inputs: PlanInputs) -> Decision:
    setting = inputs.config.distributed.sync_batchnorm
    ranks = inputs.readers
    per_gpu = f"{inputs.placement.strategy} gives each GPU a part of the micro-batch, with separate statistics"
    per_micro_batch = f"auto: with {ranks} ranks, statistics of the whole micro-batch keep the result of one device"
    return decide(
        "sync_batchnorm",
        (not inputs.facts.has_batchnorm, False, "the model has no BatchNorm"),
        (inputs.exact, False, "exact mode computes statistics per lane and merges them in a fixed order"),
        (inputs.placement.spec.scatters, False, per_gpu),
        (ranks == 1, False, "one rank sees the whole micro-batch"),
        (setting == "auto", True, per_micro_batch),
        (True, setting == "on", "as configured"),
    )


def _batch(
    inputs: PlanInputs, samples: int, global_batch_size: int | None, sync_batchnorm: bool
) -> tuple[BatchPlan, Decisions]:
    training = inputs.config.training
    placement = inputs.placement
    facts = inputs.facts
    batch, decisions = resolve_batch(
        samples=samples,
        ranks=inputs.readers,
        devices_per_rank=len(placement.devices) if placement.spec.scatters else 1,
        batch_size=training.batch_size,
        accumulate=training.accumulate,
        global_batch_size=global_batch_size,
        tail=training.tail,
        lanes=training.lanes if inputs.exact else None,
        has_batchnorm=facts.has_batchnorm and not facts.keeps_batches,
        sync_batchnorm=sync_batchnorm,
        even=facts.even_steps,
    )
    if inputs.config.debug.overfit_batches:
        overfit_samples = min(samples, inputs.config.debug.overfit_batches * batch.global_batch)
        batch = batch.model_copy(update={"samples": overfit_samples})
    return batch, decisions


def _threads(inputs: PlanInputs, batch: BatchPlan) -> Decision:
    training = inputs.config.training
    flops = 6 * inputs.facts.multiply_adds * batch.batch_size
    is_small = not inputs.on_gpu and 0 < flops < SMALL_STEP
    shared = f"{inputs.cores} cores shared by {many(inputs.local_ranks, 'rank')} of this node"
    preset_threads, preset_source = inputs.preset or (None, "")
    return decide(
        "threads",
        (training.threads, training.threads, "as configured"),
        (inputs.exact, 1, "exact mode: more intra-op threads change the order of sums"),
        (preset_threads, preset_threads, preset_source),
        (is_small, 1, f"a step has {flops / 1e6:.2g} MFLOP: more threads would wait longer than they compute"),
        (True, max(1, inputs.cores // inputs.local_ranks), shared),
    )


def _reduction(inputs: PlanInputs, *, by_rows: bool) -> list[Decision]:
    """Decide how gradients are reduced, for strategies that can use one message or buckets.

    ``by_rows``: all weights are contiguous in memory, so one message can carry their gradients.
    """
    facts = inputs.facts
    placement = inputs.placement
    if not placement.spec.has_buckets or inputs.exact:
        return []
    casts_weights = placement.number_format.weights is not None
    joint_bytes = 0 if casts_weights or not by_rows else facts.joint_bytes
    return [resolve_reduction(inputs.config.distributed, joint_bytes, on_cpu=not inputs.on_gpu)]


def resolve_reduction(config: DistributedConfig, joint_bytes: int, *, on_cpu: bool) -> Decision:
    """Decide whether gradients are reduced in one message.

    ``joint_bytes``: size of the gradients that one message can carry; 0 if it cannot carry all of them.
    """
    size = f"{joint_bytes / 1e6:.2g} MB of gradients"
    has_bucket_settings = config.bucket_cap_mb or config.find_unused_parameters
    several = f"{size} fill more than DDP's first bucket (1 MiB): the others are reduced during the backward"
    return decide(
        "one_message",
        (has_bucket_settings, False, "distributed.bucket_cap_mb or find_unused_parameters is set, settings of buckets"),
        (not on_cpu, False, "on GPUs the buckets are reduced while the backward runs"),
        (not joint_bytes, False, "the parameters are not all contiguous and of one type, float32 or float64"),
        (joint_bytes > FIRST_BUCKET_BYTES, False, several),
        (True, True, f"{size} fit in DDP's first bucket (1 MiB): nothing to overlap with the backward"),
        shown={True: "one message", False: "buckets"},
    )


def _parameters(facts: TaskFacts) -> Decision:
    trained = facts.parameters - facts.frozen
    return decide(
        "trained_parameters",
        (facts.frozen, trained, f"requires_grad is off for the other {facts.frozen:,}"),
        (True, trained, "all of the model"),
        shown={trained: f"{trained:,}"},
    )


def _weight_decay(inputs: PlanInputs) -> list[Decision]:
    """Decide which parameters the configured optimizer decays."""
    config = inputs.config.optimizer
    if inputs.facts.optimizer_lr is not None or not config.weight_decay:
        return []
    vectors = f"{inputs.facts.vectors:,} of norms and biases"
    decay = decide(
        "weight_decay",
        (config.weight_decay_on == "all", config.weight_decay, f"on all parameters, also the {vectors}"),
        (True, config.weight_decay, f"optimizer.weight_decay_on is matrices: the {vectors} have none"),
    )
    return [decay]


def _compiled(inputs: PlanInputs, batch: BatchPlan) -> list[Decision]:
    """Decide the number of samples that smaller batches are filled up to; no decision without torch.compile."""
    training = inputs.config.training
    facts = inputs.facts
    if not training.compile or inputs.placement.spec.scatters:
        return []
    compiled_part = "model and loss" if training.compile_loss else "model"
    if inputs.placement.spec.divides:
        compiled_part = "each block"
    shown = f"{compiled_part} ({training.compile_mode})"
    full = batch.largest
    recompiled = "compiled again for smaller batches, which are not filled up:"
    decision = decide(
        "compiled",
        (facts.has_batchnorm, 0, f"{recompiled} BatchNorm would count the added samples"),
        (not facts.pads, 0, f"{recompiled} the task has no pad()"),
        (True, full, f"smaller batches are filled up to {full} samples, which do not count: one shape"),
        shown={0: shown, full: shown},
    )
    return [decision]


def _averaging(inputs: PlanInputs, steps: int) -> list[Decision]:
    config = inputs.config.averaging
    decay = f"decay {config.decay:g}{', less at the start' if config.warmup else ''}"
    if config.name == "none":
        return []
    mean = f"the mean from step {round(config.start_share * steps) + 1} on"
    reason = f"as configured: {mean if config.name == 'swa' else decay}; evaluated, judged, saved and exported"
    return [decide("averaging", (True, config.name, reason))]


def _reproducibility(inputs: PlanInputs) -> Decision:
    lanes = f"{inputs.config.training.lanes} lanes, each computed alone, summed along one tree"
    return decide(
        "reproducibility",
        (inputs.exact, "exact", f"{lanes}: equal bits on any ranks that divide them ({EXACT_COST})"),
        (True, "fast", "same samples, denominators and schedule on any devices; equal to rounding"),
    )


def moments_of(optimizer: OptimizerConfig) -> int:
    """Count the numbers of optimizer state for each parameter."""
    return {"sgd": int(optimizer.momentum > 0), "adafactor": 0}.get(optimizer.name, 2)


def choose_form(setting: str, strategy: StrategySpec, parameters: int, optimizer: OptimizerConfig) -> Decision:
    """Decide whether each rank writes a shard of a checkpoint.

    Args:
        setting: ``checkpoint.sharded``.
        parameters: their number, in 32 bits each.
    """
    size = 4 * parameters * (1 + moments_of(optimizer))
    limit = f"{SHARDED_FROM_BYTES / 1e9:.2g} GB"
    state = f"{size / 1e9:.2g} GB" if size >= 1e8 else f"{size / 1e6:.2g} MB"
    state += " of weights and optimizer state"
    unsharded = f"strategy {strategy.name} keeps all parameters on each rank; checkpoint.sharded is for fsdp"
    return decide(
        "checkpoints",
        (strategy.state != "sharded", False, unsharded),
        (setting != "auto", setting == "on", f"as configured; {state}"),
        (size >= SHARDED_FROM_BYTES, True, f"auto: {state}, too much to gather on rank 0"),
        (True, False, f"auto: {state}, small enough to gather on rank 0 (sharded from {limit})"),
        shown={True: "sharded", False: "whole"},
    )


#: Words in names of metrics whose lowest value is the best.
_LOWER_IS_BETTER = {
    "bce", "bpb", "bpc", "bpd", "brier", "cer", "cost", "crps", "deviance", "distance", "divergence", "ece", "eer",
    "entropy", "fid", "kl", "kld", "losses", "lpips", "mase", "mcd", "mer", "perplexity", "ppl", "regret", "ter", "wer",
    "wil",
}  # fmt: skip
#: Endings of such words: ``rmse``, ``smape``.
_LOWER_ENDINGS = ("loss", "error", "errors", "mae", "mape", "mse", "msle", "nll")
#: Words in names of metrics whose highest value is the best.
_HIGHER_IS_BETTER = {
    "acc", "ap", "bleu", "chrf", "cider", "corr", "correlation", "dice", "em", "f", "fbeta", "hit", "hits", "jaccard",
    "kappa", "map", "mcc", "meteor", "mos", "mrr", "ndcg", "pesq", "precision", "psnr", "r", "recall", "return",
    "reward", "rewards", "rouge", "sdr", "sensitivity", "similarity", "snr", "specificity", "ssim", "stoi", "success",
}  # fmt: skip
_HIGHER_ENDINGS = ("accuracy", "auc", "auprc", "auroc", "iou", "score")


def natural_mode(monitor: str) -> Mode | None:
    """Infer ``min`` (losses, errors) or ``max`` (scores) from the words of a metric's name; ``None`` if unknown."""
    words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", monitor)}
    if words & _LOWER_IS_BETTER or any(w.startswith("error") or w.endswith(_LOWER_ENDINGS) for w in words):
        return "min"
    return "max" if words & _HIGHER_IS_BETTER or any(w.endswith(_HIGHER_ENDINGS) for w in words) else None


def resolve_monitor(
    config: CheckpointConfig, task_monitor: tuple[str, Mode], metric_modes: Mapping[str, Mode], *, judged: bool
) -> tuple[str, Mode, Decision]:
    """Decide the metric that selects the best checkpoint, and its mode.

    Args:
        task_monitor: the task's metric and mode, used if none is configured.
        metric_modes: modes of the metrics that state one, by name.
        judged: there are data to evaluate on.

    Raises:
        ConfigError: neither a setting nor the metric nor its name gives the mode.
    """
    task_metric, task_mode = task_monitor
    monitor = config.monitor or task_metric
    stated_mode = metric_modes.get(monitor.removeprefix("val_")) or next(
        (mode for name, mode in metric_modes.items() if monitor.endswith(f"_{name}")), None
    )
    uses_task_mode = not config.mode and monitor == task_metric
    mode = config.mode or (task_mode if uses_task_mode else stated_mode or natural_mode(monitor))
    if mode is None:
        raise ConfigError(
            f"cannot decide whether the lowest or the highest {monitor} is the best (checkpoint.monitor)",
            why="its metric has no higher_is_better, and Lockstep does not know its name",
            fix="set checkpoint.mode=min or checkpoint.mode=max",
        )
    task_reason = "the default" if monitor == "val_loss" else "the task's metric"
    reason = "as configured" if config.monitor or config.mode else task_reason
    if not config.mode and not uses_task_mode:
        source = "by its metric's higher_is_better" if stated_mode else "by its name"
        reason += f"; {source}, {'lower' if mode == 'min' else 'higher'} is better (checkpoint.mode says otherwise)"
    return (
        monitor,
        mode,
        decide(
            "monitor",
            (not judged, None, "no validation data: no checkpoint is marked best"),
            (True, monitor, reason),
            shown={monitor: f"{monitor} ({mode})"},
        ),
    )
