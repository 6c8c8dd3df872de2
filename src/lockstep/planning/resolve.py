"""Making the plan: a function for each decision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config import CheckpointConfig, DistributedConfig, OptimizerConfig, RunConfig
from lockstep.errors import ConfigError, many
from lockstep.hardware.resolve import Placement
from lockstep.planning.batch import BatchPlan, order_notes, resolve_batch, resolve_order
from lockstep.planning.decision import Decision, Decisions, by_key, decide
from lockstep.planning.loader import of_loader, resolve_loader, training_of_loader
from lockstep.planning.notes import module_notes, refuse_contradictions, run_notes
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
#: Precisions whose convolutions take 16-bit numbers.
HALF = ("16-mixed", "bf16-mixed", "bf16-true")


@dataclass(frozen=True)
class Given:
    """What decisions are made from; ``cores`` and ``preset`` as for :func:`make_plan`."""

    config: RunConfig
    placement: Placement
    facts: TaskFacts
    cores: int
    preset: tuple[int, str] | None = None

    @property
    def readers(self) -> int:
        """Ranks that read different samples: the stages of a pipeline all take part in the same ones."""
        return 1 if self.placement.spec.state == "staged" else self.placement.world_size

    @property
    def local_ranks(self) -> int:
        return -(-self.placement.world_size // self.placement.nodes)

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
        preset: intra-op threads that the user has set outside Lockstep, and where.
        resume: given on resume; its global batch is held unless it says otherwise.

    Raises:
        ConfigError, DataError, UnsupportedError: settings that contradict each other, the data or the devices.
    """
    refuse_contradictions(config, placement, facts)
    held = resume.global_batch if resume and resume.hold else config.training.global_batch_size
    data, module, unused = config.data, facts.loader, list(module_notes(config, placement) if facts.loader else ())
    if module is not None:
        training = training_of_loader(config, module, held=held, devices=placement.world_size)
        config = config.model_copy(update={"training": training})
        data = data.model_copy(update={"epoch_samples": None})
    given = Given(config, placement, facts, cores, preset)
    synced = _sync_batchnorm(given)
    order, ordered = resolve_order(
        data,
        samples=facts.train_samples,
        lengths=facts.lengths is not None,
        lanes=config.training.lanes,
        held=resume.order if resume else None,
        sampling=facts.sampling,
    )
    batch, sized = _batch(given, order.positions or facts.train_samples, held, bool(synced.value))
    done = (resume.step, resume.epoch, resume.position) if resume else None
    course = resolve_course(config, batch, done=done, own_lr=facts.optimizer_lr, own_schedule=facts.own_schedule)
    local_ranks = given.local_ranks
    loader, loaded = resolve_loader(config.data, facts, cores=cores, local_ranks=local_ranks, pin_memory=given.on_gpu)
    judged = facts.val_samples > 0 or module is not None  # a module evaluates on its own data
    monitor, mode, judging = resolve_monitor(config.checkpoint, facts.monitor, facts.metric_modes, judged=judged)
    layout = _memory_layout(given)
    numbers = facts.parameters // 2 if placement.precision == "bf16-true" else facts.parameters
    decisions = [
        *_placed(placement),
        *_kernels(given),
        *layout,
        *_data_device(given),
        *_reduction(given, by_rows=not any(decision.value for decision in layout)),
        *sized.values(),
        ordered,
        *course.decisions,
        _parameters(facts),
        *_rates_and_decay(given),
        *_compiled(given, batch),
        *_averaging(given, course.schedule.total_steps),
        *(_reproducibility(given), synced, _threads(given, batch), loaded),
        *(choose_form(config.checkpoint.sharded, placement.spec, numbers, config.optimizer), judging),
    ]
    if module is not None:
        decisions = [of_loader(decision, module) for decision in decisions if decision.key != "warmup"]
    notes = [*placement.notes, *(() if module else course.notes), *order_notes(config.data, order, batch.global_batch)]
    notes += run_notes(config, placement, facts, batch, resume, loader.num_workers)
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
        notes=(*notes, *unused),
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


def _kernels(given: Given) -> list[Decision]:
    """On GPUs: how float32 products are computed, and how cuDNN chooses algorithms."""
    hardware = given.config.hardware
    products, measures = hardware.matmul_precision, hardware.cudnn_benchmark
    tf32 = "auto: TF32, which keeps the range of float32 and 10 bits of its mantissa"
    if not given.on_gpu:
        return []
    return [
        decide(
            "matmul_precision",
            (given.exact, "highest", "exact mode: float32, whose rounding is the same on every GPU of a model"),
            (products != "auto", products, "as set"),
            (given.placement.tf32, "high", tf32),
            (True, "highest", "auto: this GPU has no TF32"),
        ),
        decide(
            "cudnn_benchmark",
            (given.exact, False, "exact mode: measured choices may differ from run to run"),
            (measures != "auto", measures == "on", "as set"),
            (given.facts.lengths is None, True, "auto: samples have one length, so that each shape is measured once"),
            (True, False, "auto: samples differ in length, and each shape would be measured"),
        ),
    ]


def _memory_layout(given: Given) -> list[Decision]:
    """Whether the weights of 2-D convolutions are channels_last; none for a model without them."""
    config, placement = given.config, given.placement
    if not given.facts.convolutions or given.facts.loader is not None:  # a LightningModule's model is its own
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
            (given.exact, False, "exact mode: as the model has it"),
            (config.training.compile, False, "auto: torch.compile chooses layouts itself"),
            (not given.on_gpu, False, "auto: as the model has it on a CPU"),
            (placement.precision in HALF, True, f"auto: {placement.precision} convolutions on a GPU use tensor cores"),
            (True, False, "auto: as the model has it in 32-bit precision"),
            shown={True: "channels_last", False: "as the model has it"},
        )
    ]


def _data_device(given: Given) -> list[Decision]:
    """Where arrays in memory are during training; none for other data, and on a CPU."""
    if not given.on_gpu or not given.facts.array_bytes or given.facts.loader is not None:
        return []
    setting = given.config.data.device
    return [
        decide(
            "data_device",
            (setting != "auto", setting, "as set"),
            (True, "auto", "on the GPU if they fill at most a fifth of its free memory"),
        )
    ]


def _sync_batchnorm(given: Given) -> Decision:
    setting, ranks, strategy = given.config.distributed.sync_batchnorm, given.readers, given.placement.strategy
    parts = f"{strategy} gives each GPU a part of the micro-batch, with separate statistics"
    whole = f"auto: with {ranks} ranks, statistics of the whole micro-batch keep the result of one device"
    return decide(
        "sync_batchnorm",
        (not given.facts.has_batchnorm, False, "the model has no BatchNorm"),
        (given.exact, False, "exact mode computes statistics per lane and merges them in a fixed order"),
        (given.placement.spec.scatters, False, parts),
        (ranks == 1, False, "one rank sees the whole micro-batch"),
        (setting == "auto", True, whole),
        (True, setting == "on", "as configured"),
    )


def _batch(given: Given, samples: int, held: int | None, sync_batchnorm: bool) -> tuple[BatchPlan, Decisions]:
    t, placement, facts = given.config.training, given.placement, given.facts
    batch, decisions = resolve_batch(
        samples=samples,
        ranks=given.readers,
        devices_per_rank=len(placement.devices) if placement.spec.scatters else 1,
        batch_size=t.batch_size,
        accumulate=t.accumulate,
        global_batch_size=held,
        tail=t.tail,
        lanes=t.lanes if given.exact else None,
        has_batchnorm=facts.has_batchnorm and not (facts.loader and facts.loader.batches),
        sync_batchnorm=sync_batchnorm,
        even=facts.loader is not None,
    )
    if given.config.debug.overfit_batches:
        few = min(samples, given.config.debug.overfit_batches * batch.global_batch)
        batch = batch.model_copy(update={"samples": few})
    return batch, decisions


def _threads(given: Given, batch: BatchPlan) -> Decision:
    training, flops = given.config.training, 6 * given.facts.multiply_adds * batch.batch_size
    small = not given.on_gpu and 0 < flops < SMALL_STEP
    shared = f"{given.cores} cores shared by {many(given.local_ranks, 'rank')} of this node"
    preset, where = given.preset or (None, "")
    return decide(
        "threads",
        (training.threads, training.threads, "as configured"),
        (given.exact, 1, "exact mode: more intra-op threads change the order of sums"),
        (preset, preset, where),
        (small, 1, f"a step has {flops / 1e6:.2g} MFLOP: more threads would wait longer than they compute"),
        (True, max(1, given.cores // given.local_ranks), shared),
    )


def _reduction(given: Given, *, by_rows: bool) -> list[Decision]:
    """Of strategies that may reduce gradients in one message, where all weights lie ``by_rows``, or in buckets."""
    facts, placement = given.facts, given.placement
    if not placement.spec.has_buckets or given.exact or facts.loader is not None:
        return []
    joint = 0 if placement.precision == "bf16-true" or not by_rows else facts.joint_bytes
    return [resolve_reduction(given.config.distributed, joint, on_cpu=not given.on_gpu)]


def resolve_reduction(config: DistributedConfig, joint_bytes: int, *, on_cpu: bool) -> Decision:
    """Whether gradients are reduced in one message; ``joint_bytes``: of those that one can carry, 0 where it cannot."""
    size, buckets = f"{joint_bytes / 1e6:.2g} MB of gradients", config.bucket_cap_mb or config.find_unused_parameters
    several = f"{size} fill more than DDP's first bucket (1 MiB): the others are reduced during the backward"
    return decide(
        "one_message",
        (buckets, False, "distributed.bucket_cap_mb or find_unused_parameters is set, which are settings of buckets"),
        (not on_cpu, False, "on GPUs the buckets are reduced while the backward runs"),
        (not joint_bytes, False, "the parameters are not all contiguous and of one type, float32 or float64"),
        (joint_bytes > FIRST_BUCKET_BYTES, False, several),
        (True, True, f"{size} fit in DDP's first bucket (1 MiB): nothing to overlap with the backward"),
        shown={True: "one message", False: "buckets"},
    )


def _parameters(facts: TaskFacts) -> Decision:
    trained, frozen = facts.parameters - facts.frozen, facts.frozen
    others = f"requires_grad is off for the other {frozen:,}"
    rules = (frozen, trained, others), (True, trained, "all of the model")
    return decide("trained_parameters", *rules, shown={trained: f"{trained:,}"})


def _rates_and_decay(given: Given) -> list[Decision]:
    """Which parameters the configured optimizer decays, and learning rates by depth."""
    config, facts = given.config.optimizer, given.facts
    if facts.optimizer_lr is not None or facts.loader is not None:
        return []
    vectors = f"{facts.vectors:,} of norms and biases"
    decay = decide(
        "weight_decay",
        (config.weight_decay_on == "all", config.weight_decay, f"on all parameters, the {vectors} included"),
        (True, config.weight_decay, f"optimizer.weight_decay_on is matrices: the {vectors} have none"),
    )
    each = f"each block has {config.layer_decay:g} of the rate of the one after it; the rate shown is that of the "
    by_depth = decide("layer_decay", (True, config.layer_decay, f"{each}output layer"))
    return [*[decay] * bool(config.weight_decay), *[by_depth] * (config.layer_decay != 1)]


def _compiled(given: Given, batch: BatchPlan) -> list[Decision]:
    training, facts = given.config.training, given.facts
    if not training.compile or given.placement.spec.scatters:
        return []
    what = "each block" if given.placement.spec.divides else "model and loss" if training.compile_loss else "model"
    again, full = "compiled again for smaller batches, which are not filled up:", batch.largest
    shown = f"{what} ({training.compile_mode})"
    found = decide(
        "compiled",
        (facts.has_batchnorm, 0, f"{again} BatchNorm would count what fills them"),
        (not facts.pads, 0, f"{again} the task has no pad()"),
        (True, full, f"smaller batches are filled up to {full} samples with some that count nothing: one shape"),
        shown={0: shown, full: shown},
    )
    return [found]


def _averaging(given: Given, steps: int) -> list[Decision]:
    config = given.config.averaging
    decay = f"decay {config.decay:g}{', less at the start' if config.warmup else ''}"
    mean = f"the mean from step {round(config.start_share * steps) + 1} on"
    reason = f"as configured: {mean if config.name == 'swa' else decay}; evaluated, judged, saved and exported"
    return [] if config.name == "none" else [decide("averaging", (True, config.name, reason))]


def _reproducibility(given: Given) -> Decision:
    lanes = f"{given.config.training.lanes} lanes, each computed alone, summed along one tree"
    return decide(
        "reproducibility",
        (given.exact, "exact", f"{lanes}: equal bits on any ranks that divide them ({EXACT_COST})"),
        (True, "fast", "same samples, denominators and schedule on any devices; equal to rounding"),
    )


def moments_of(optimizer: OptimizerConfig) -> int:
    """How many numbers the optimizer keeps for each parameter."""
    return {"sgd": int(optimizer.momentum > 0), "lion": 1, "adafactor": 0}.get(optimizer.name, 2)


def choose_form(setting: str, strategy: StrategySpec, parameters: int, optimizer: OptimizerConfig) -> Decision:
    """Whether checkpoints are in shards; ``setting``: ``checkpoint.sharded``; ``parameters``: in 32 bits each."""
    size, limit = 4 * parameters * (1 + moments_of(optimizer)), f"{SHARDED_FROM_BYTES / 1e9:.2g} GB"
    state = f"{size / 1e9:.2g} GB" if size >= 1e8 else f"{size / 1e6:.2g} MB"
    state += " of weights and optimizer state"
    whole = f"strategy {strategy.name} keeps all parameters on each rank; checkpoint.sharded is for fsdp"
    return decide(
        "checkpoints",
        (strategy.state != "sharded", False, whole),
        (setting != "auto", setting == "on", f"as configured; {state}"),
        (size >= SHARDED_FROM_BYTES, True, f"auto: {state}, too much to gather on rank 0"),
        (True, False, f"auto: {state}, small enough to gather on rank 0 (sharded from {limit})"),
        shown={True: "sharded", False: "whole"},
    )


#: Words of a metric's name that is better the lower it is.
_LOWER_IS_BETTER = {
    "bce", "bpb", "bpc", "bpd", "brier", "cer", "cost", "crps", "deviance", "distance", "divergence", "ece", "eer",
    "entropy", "fid", "kl", "kld", "losses", "lpips", "mase", "mcd", "mer", "perplexity", "ppl", "regret", "ter", "wer",
    "wil",
}  # fmt: skip
#: And what such words end with: ``rmse``, ``smape``.
_LOWER_ENDINGS = ("loss", "error", "errors", "mae", "mape", "mse", "msle", "nll")
#: Words of a metric's name that is better the higher it is.
_HIGHER_IS_BETTER = {
    "acc", "ap", "bleu", "chrf", "cider", "corr", "correlation", "dice", "em", "f", "fbeta", "hit", "hits", "jaccard",
    "kappa", "map", "mcc", "meteor", "mos", "mrr", "ndcg", "pesq", "precision", "psnr", "r", "recall", "return",
    "reward", "rewards", "rouge", "sdr", "sensitivity", "similarity", "snr", "specificity", "ssim", "stoi", "success",
}  # fmt: skip
_HIGHER_ENDINGS = ("accuracy", "auc", "auprc", "auroc", "iou", "score")


def natural_mode(monitor: str) -> Mode | None:
    """``min`` for losses, errors and their rates, ``max`` for scores, by the words of the name; ``None``: not known."""
    words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", monitor)}
    if words & _LOWER_IS_BETTER or any(w.startswith("error") or w.endswith(_LOWER_ENDINGS) for w in words):
        return "min"
    return "max" if words & _HIGHER_IS_BETTER or any(w.endswith(_HIGHER_ENDINGS) for w in words) else None


def resolve_monitor(
    config: CheckpointConfig, own: tuple[str, Mode], modes: Mapping[str, Mode], *, judged: bool
) -> tuple[str, Mode, Decision]:
    """The metric and the mode of a run.

    Args:
        own: those of the task.
        modes: of metrics that state it, by name.
        judged: there is data to evaluate on.

    Raises:
        ConfigError: the configured metric has a name that does not say which value is the best, and no other does.
    """
    monitor = config.monitor or own[0]
    stated = modes.get(monitor.removeprefix("val_")) or next(
        (mode for name, mode in modes.items() if monitor.endswith(f"_{name}")), None
    )
    inferred = stated or natural_mode(monitor)
    by_task = own[1] if monitor == own[0] else None
    mode = config.mode or by_task or inferred
    if mode is None:
        raise ConfigError(
            f"nothing says whether the lowest or the highest {monitor} is the best (checkpoint.monitor)",
            why="its metric has no higher_is_better, and its name is none that is known",
            fix="set checkpoint.mode=min or checkpoint.mode=max",
        )
    reason = "as configured" if config.monitor or config.mode else "the task's own"
    if not config.mode and not by_task:
        source = "by its metric's higher_is_better" if stated else "by its name"
        reason += f"; {source}, {'lower' if mode == 'min' else 'higher'} is better (checkpoint.mode says otherwise)"
    none = "no validation data: no checkpoint is marked best"
    rules = (not judged, None, none), (True, monitor, reason)
    return monitor, mode, decide("monitor", *rules, shown={monitor: f"{monitor} ({mode})"})
