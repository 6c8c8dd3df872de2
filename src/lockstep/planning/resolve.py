"""Making the plan: a function for each decision."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.config import CheckpointConfig, DistributedConfig, OptimizerConfig, RunConfig
from lockstep.errors import UnsupportedError, many
from lockstep.hardware.resolve import Placement
from lockstep.planning.batch import BatchPlan, resolve_batch
from lockstep.planning.decision import Decision, Decisions, by_key
from lockstep.planning.horizon import resolve_course
from lockstep.planning.loader import of_loader, resolve_loader, training_of_loader
from lockstep.planning.measured import measured_choices
from lockstep.planning.notes import module_notes, refuse_contradictions, run_notes
from lockstep.planning.order import order_notes, resolve_order
from lockstep.planning.plan import LAYOUT, Mode, Plan, ResumePoint, TaskFacts
from lockstep.strategies import StrategySpec

#: Operations of a step that take one core about 3 ms; passing parts of them to other cores takes as long.
SMALL_STEP = 5e7
#: Operations of a step below which a GPU waits for Python: a millisecond at 10 TFLOP/s, and starting the hundreds of
#: kernels of a small model takes longer.
LAUNCH_BOUND = 1e10
#: Time of a step in exact mode against fast, as measured by ``benchmarks/exact_cost.py`` with 8 lanes on CPU cores.
EXACT_COST = "measured: 0.9 times the time of fast on two CPU ranks, 1.8 to 2.9 times on one"


@dataclass(frozen=True)
class Given:
    """What decisions are made from.

    ``cores``: CPU cores that this node may use. ``preset``: intra-op threads that the user has set outside Lockstep,
    and where.
    """

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
    unused = [] if facts.loader is None else list(module_notes(config, placement))
    if facts.loader is not None:
        training = training_of_loader(config, facts.loader, held=held, devices=placement.world_size)
        config = config.model_copy(update={"training": training})
    given = Given(config, placement, facts, cores, preset)
    synced = _sync_batchnorm(given)
    order, ordered = resolve_order(
        config.data if facts.loader is None else config.data.model_copy(update={"epoch_samples": None}),
        samples=facts.train_samples,
        lengths=facts.lengths is not None,
        lanes=config.training.lanes,
        held=resume.order if resume else None,
        sampling=facts.sampling,
    )
    batch, sized = _batch(given, order.positions or facts.train_samples, held, bool(synced.value))
    course = resolve_course(config, batch, resume, facts)
    on_gpu = placement.accelerator == "gpu"
    loader, loaded = resolve_loader(config.data, facts, cores=cores, local_ranks=given.local_ranks, pin_memory=on_gpu)
    judged = facts.val_samples > 0 or facts.loader is not None  # a module evaluates on its own data
    monitor, mode, judging = resolve_monitor(config.checkpoint, facts.monitor, judged=judged)
    measured = by_key(measured_choices(config, placement, facts, resume.measured if resume else None))
    numbers = facts.parameters // 2 if placement.precision == "bf16-true" else facts.parameters
    decisions = [
        *_placed(placement),
        *_kernels(given),
        *measured.values(),
        *_cuda_graphs(given, batch),
        *_reduction(given, by_rows=LAYOUT not in measured or measured[LAYOUT].value is False),
        *sized.values(),
        ordered,
        *course.decisions,
        _parameters(given),
        *_weight_decay(given),
        *_layer_decay(given),
        *_compiled(given, batch),
        *_averaging(given, course.schedule.total_steps),
        *(_reproducibility(given), synced, _threads(given, batch), loaded),
        *(choose_form(config.checkpoint.sharded, placement.spec, numbers, config.optimizer), judging),
    ]
    if facts.loader is not None:
        decisions = [of_loader(decision, facts.loader) for decision in decisions if decision.key != "warmup"]
    notes = [*placement.notes, *(course.notes if facts.loader is None else ())]
    notes += order_notes(config.data, order, batch.global_batch)
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
    reasons = placement.reasons
    return [
        Decision("accelerator", "accelerator", placement.accelerator, reasons["accelerator"]),
        Decision("devices", "devices", ", ".join(placement.devices), reasons["devices"]),
        Decision("strategy", "strategy", placement.strategy, reasons["strategy"]),
        Decision("backend", "backend", placement.backend, reasons["backend"]),
        Decision("ranks", "ranks", placement.world_size, reasons["world_size"]),
        Decision("precision", "precision", placement.precision, reasons["precision"]),
    ]


def _kernels(given: Given) -> list[Decision]:
    """On GPUs: how float32 products are computed, and how cuDNN chooses algorithms."""
    hardware, placement = given.config.hardware, given.placement
    if placement.accelerator != "gpu":
        return []
    products, reason = str(hardware.matmul_precision), "as set"
    if products == "auto" and placement.tf32:
        products, reason = "high", "auto: TF32, which keeps the range of float32 and 10 bits of its mantissa"
    elif products == "auto":
        products, reason = "highest", "auto: this GPU has no TF32"
    measures, why = hardware.cudnn_benchmark == "on", "as set"
    if hardware.cudnn_benchmark == "auto" and given.facts.lengths is None:
        measures, why = True, "auto: samples have one length, so that each shape is measured once"
    elif hardware.cudnn_benchmark == "auto":
        why = "auto: samples differ in length, and each shape would be measured"
    if given.config.training.reproducibility == "exact":
        products, reason = "highest", "exact mode: float32, whose rounding is the same on every GPU of a model"
        measures, why = False, "exact mode: measured choices may differ from run to run"
    return [
        Decision("matmul_precision", "float32 products", products, reason),
        Decision("cudnn_benchmark", "cudnn benchmark", measures, why),
    ]


def _cuda_graphs(given: Given, batch: BatchPlan) -> list[Decision]:
    """On a GPU: whether the kernels of a step are recorded and replayed."""
    setting = given.config.training.cuda_graphs
    if given.placement.accelerator != "gpu" and setting == "off":
        return []
    flops = 6 * given.facts.multiply_adds * batch.batch_size
    small = 0 < flops < LAUNCH_BOUND
    size = f"a step has {flops / 1e9:.2g} GFLOP" if flops else "the operations of a step are not known"
    unfit = graphs_unfit(given, batch)
    if setting == "on" and unfit and given.placement.accelerator == "gpu":
        raise UnsupportedError(
            f"training.cuda_graphs=on is incompatible with {unfit[0]}",
            why=unfit[1],
            fix="leave one of them out, or set training.cuda_graphs to auto or off",
        )
    on = setting != "off" and not unfit and (setting == "on" or small)
    if unfit:
        reason = f"{unfit[0]}: {unfit[1]}"
    elif setting == "off" and small:
        reason = f"off; {size}, so it may wait for Python: try training.cuda_graphs=auto (not yet run on a GPU)"
    elif setting == "off":
        reason = f"off; {size}"
    else:
        reason = f"{'as set' if setting == 'on' else 'auto'}: {size}, " + (
            "fewer than a GPU does in the time that Python needs to start its kernels"
            if small
            else "for which a GPU needs longer than Python needs to start its kernels"
        )
    return [Decision("cuda_graphs", "CUDA graphs", on, reason)]


def graphs_unfit(given: Given, batch: BatchPlan) -> tuple[str, str] | None:
    """What keeps a step from being recorded as a CUDA graph, and why."""
    training, debug, placement = given.config.training, given.config.debug, given.placement
    reasons = {
        "the CPU": (placement.accelerator != "gpu", "it has no CUDA graphs"),
        "a LightningModule": (given.facts.loader is not None, "Lightning's Trainer takes the steps"),
        "several devices": (len(placement.devices) > 1, "their gradients are reduced while the backward runs"),
        "reproducibility: exact": (training.reproducibility == "exact", "lanes are computed one by one"),
        "precision 16-mixed": (placement.precision == "16-mixed", "the scale of the loss changes between steps"),
        "training.compile": (training.compile, "its compile_mode reduce-overhead makes graphs of the compiled code"),
        "accumulation": (batch.accumulate > 1, "gradients of a graph are written to the same memory again"),
        "samples of different lengths": (given.facts.lengths is not None, "each shape would need a graph"),
        "debug settings": (
            debug.trace != "off" or bool(debug.switch_off) or debug.detect_anomaly,
            "they look into each step",
        ),
    }
    return next(((name, why) for name, (applies, why) in reasons.items() if applies), None)


def _sync_batchnorm(given: Given) -> Decision:
    setting, ranks = given.config.distributed.sync_batchnorm, given.readers
    on = False
    if not given.facts.has_batchnorm:
        reason = "the model has no BatchNorm"
    elif given.config.training.reproducibility == "exact":
        reason = "exact mode computes statistics per lane and merges them in a fixed order"
    elif given.placement.spec.scatters:
        reason = f"{given.placement.strategy} gives each GPU a part of the micro-batch, with separate statistics"
    elif ranks == 1:
        reason = "one rank sees the whole micro-batch"
    elif setting == "auto":
        on = True
        reason = f"auto: with {ranks} ranks, statistics of the whole micro-batch keep the result of one device"
    else:
        on, reason = setting == "on", "as configured"
    return Decision("sync_batchnorm", "sync batchnorm", on, reason)


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
        lanes=t.lanes if t.reproducibility == "exact" else None,
        has_batchnorm=facts.has_batchnorm and not (facts.loader and facts.loader.batches),
        sync_batchnorm=sync_batchnorm,
        even=facts.loader is not None,
    )
    if given.config.debug.overfit_batches:
        few = min(samples, given.config.debug.overfit_batches * batch.global_batch)
        batch = batch.model_copy(update={"samples": few})
    return batch, decisions


def _threads(given: Given, batch: BatchPlan) -> Decision:
    training, local_ranks = given.config.training, given.local_ranks
    flops = 6 * given.facts.multiply_adds * batch.batch_size
    if training.threads is not None:
        threads, reason = training.threads, "as configured"
    elif training.reproducibility == "exact":
        threads, reason = 1, "exact mode: more intra-op threads change the order of sums"
    elif given.preset is not None:
        threads, reason = given.preset
    elif given.placement.accelerator == "cpu" and 0 < flops < SMALL_STEP:
        threads, reason = 1, f"a step has {flops / 1e6:.2g} MFLOP: more threads would wait longer than they compute"
    else:
        threads = max(1, given.cores // local_ranks)
        reason = f"{given.cores} cores shared by {many(local_ranks, 'rank')} of this node"
    return Decision("threads", "threads", threads, reason)


def _reduction(given: Given, *, by_rows: bool) -> list[Decision]:
    """Of strategies that may reduce gradients in one message, where all weights lie ``by_rows``, or in buckets."""
    config, facts, placement = given.config, given.facts, given.placement
    if not placement.spec.has_buckets or config.training.reproducibility == "exact" or facts.loader is not None:
        return []
    joint = 0 if placement.precision == "bf16-true" or not by_rows else facts.joint_bytes
    return [resolve_reduction(config.distributed, joint, on_cpu=placement.accelerator == "cpu")]


def _parameters(given: Given) -> Decision:
    trained, frozen = given.facts.parameters - given.facts.frozen, given.facts.frozen
    reason = f"requires_grad is off for the other {frozen:,}" if frozen else "all of the model"
    return Decision("trained_parameters", "trained parameters", trained, reason, f"{trained:,}")


def _weight_decay(given: Given) -> list[Decision]:
    """Which parameters the configured optimizer decays."""
    config, facts = given.config.optimizer, given.facts
    if not config.weight_decay or facts.optimizer_lr is not None or facts.loader is not None:
        return []
    on, vectors = config.weight_decay_on, f"{facts.vectors:,} of norms and biases"
    without = f"optimizer.weight_decay_on is matrices: the {vectors} have none"
    reason = without if on == "matrices" else f"on all parameters, the {vectors} included"
    return [Decision("weight_decay", "weight decay", config.weight_decay, reason)]


def _layer_decay(given: Given) -> list[Decision]:
    """Learning rates by depth."""
    decay = given.config.optimizer.layer_decay
    if decay == 1 or given.facts.optimizer_lr is not None or given.facts.loader is not None:
        return []
    reason = f"each block has {decay:g} of the rate of the one after it; the rate shown is that of the output layer"
    return [Decision("layer_decay", "rates by depth", decay, reason)]


def _compiled(given: Given, batch: BatchPlan) -> list[Decision]:
    """What is compiled, and for which shapes."""
    training, facts = given.config.training, given.facts
    if not training.compile or given.placement.spec.scatters:
        return []
    what = "each block" if given.placement.spec.divides else "model and loss" if training.compile_loss else "model"
    full = batch.largest if facts.pads and not facts.has_batchnorm else 0
    if full:
        reason = f"smaller batches are filled up to {full} samples with some that count nothing: one shape"
    else:
        why = "BatchNorm would count what fills them" if facts.has_batchnorm else "the task has no pad()"
        reason = f"compiled again for smaller batches, which are not filled up: {why}"
    return [Decision("compiled", "compiled", full, reason, f"{what} ({training.compile_mode})")]


def _averaging(given: Given, steps: int) -> list[Decision]:
    config = given.config.averaging
    if config.name == "none":
        return []
    how = f"decay {config.decay:g}{', less at the start' if config.warmup else ''}"
    if config.name == "swa":
        how = f"the mean from step {round(config.start_share * steps) + 1} on"
    reason = f"as configured: {how}; evaluated, judged, saved and exported"
    return [Decision("averaging", "averaged weights", config.name, reason)]


def _reproducibility(given: Given) -> Decision:
    training = given.config.training
    reason = "same samples, denominators and schedule on any devices; equal to rounding"
    if training.reproducibility == "exact":
        reason = (
            f"{training.lanes} lanes, each computed alone, summed along one tree: equal bits on any ranks that "
            f"divide them ({EXACT_COST})"
        )
    return Decision("reproducibility", "reproducibility", training.reproducibility, reason)


#: To gather 0.4 GB of weights and optimizer state stops all ranks for 0.3 s, 0.9 GB for 1.8 s (two gloo ranks,
#: ``benchmarks/sharded_checkpoint.py``). Below, files that any tool reads are worth more than the pause.
SHARDED_FROM_BYTES = 500_000_000


def moments_of(optimizer: OptimizerConfig) -> int:
    """How many numbers the optimizer keeps for each parameter."""
    return {"sgd": int(optimizer.momentum > 0), "lion": 1, "adafactor": 0}.get(optimizer.name, 2)


def choose_form(setting: str, strategy: StrategySpec, parameters: int, optimizer: OptimizerConfig) -> Decision:
    """Whether checkpoints are in shards.

    Args:
        setting: ``checkpoint.sharded``.
        parameters: of the model, in 32 bits each.
    """
    size = 4 * parameters * (1 + moments_of(optimizer))
    state = f"{size / 1e9:.2g} GB" if size >= 1e8 else f"{size / 1e6:.2g} MB"
    state += " of weights and optimizer state"
    sharded = strategy.state == "sharded" and (setting == "on" or (setting == "auto" and size >= SHARDED_FROM_BYTES))
    if strategy.state != "sharded":
        reason = f"strategy {strategy.name} keeps all parameters on each rank; checkpoint.sharded is for fsdp"
    elif setting != "auto":
        reason = f"as configured; {state}"
    elif sharded:
        reason = f"auto: {state}, too much to gather on rank 0"
    else:
        reason = f"auto: {state}, small enough to gather on rank 0 (sharded from {SHARDED_FROM_BYTES / 1e9:.2g} GB)"
    return Decision("checkpoints", "checkpoints", sharded, reason, "sharded" if sharded else "whole")


#: Words of a metric's name that is better the lower it is.
_LOWER_IS_BETTER = {
    "bce", "brier", "cer", "cost", "deviance", "distance", "divergence", "ece", "eer", "entropy", "fid", "kl", "kld",
    "losses", "mase", "mcd", "mer", "perplexity", "ppl", "regret", "ter", "wer", "wil",
}  # fmt: skip
#: And what such words end with: ``rmse``, ``smape``.
_LOWER_ENDINGS = ("loss", "error", "errors", "mae", "mape", "mse", "msle", "nll")


def natural_mode(monitor: str) -> Mode:
    """``min`` for losses, errors and their rates, else ``max``; by the words of the name, as ``val_cer`` has two."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", monitor)
    lower = any(
        word in _LOWER_IS_BETTER or word.startswith("error") or word.endswith(_LOWER_ENDINGS)
        for word in map(str.lower, words)
    )
    return "min" if lower else "max"


def resolve_monitor(config: CheckpointConfig, own: tuple[str, Mode], *, judged: bool) -> tuple[str, Mode, Decision]:
    """The metric and the mode of a run, and the decision.

    Args:
        own: the task's metric and its mode.
        judged: whether there is data to evaluate on.
    """
    monitor = config.monitor or own[0]
    by_name = config.mode is None and monitor != own[0]
    mode = config.mode or (natural_mode(monitor) if by_name else own[1])
    better = "lower" if mode == "min" else "higher"
    reason = "as configured" if config.monitor or config.mode else "the task's own"
    if by_name:
        reason += f"; by its name, {better} is better (checkpoint.mode says otherwise)"
    if not judged:
        return monitor, mode, Decision("monitor", "monitor", None, "no validation data: no checkpoint is marked best")
    return monitor, mode, Decision("monitor", "monitor", monitor, reason, f"{monitor} ({mode})")


#: DistributedDataParallel's first bucket (torch's ``_DEFAULT_FIRST_BUCKET_BYTES``).
FIRST_BUCKET_BYTES = 2**20


def resolve_reduction(config: DistributedConfig, joint_bytes: int, *, on_cpu: bool) -> Decision:
    """Whether gradients are reduced in one message.

    Args:
        joint_bytes: of the gradients that one message can carry; 0 where it cannot.
    """
    size, joint = f"{joint_bytes / 1e6:.2g} MB of gradients", False
    if config.bucket_cap_mb is not None or config.find_unused_parameters:
        reason = "distributed.bucket_cap_mb or find_unused_parameters is set, which are settings of buckets"
    elif not on_cpu:
        reason = "on GPUs the buckets are reduced while the backward runs"
    elif not joint_bytes:
        reason = "the parameters are not all contiguous and of one type, float32 or float64"
    elif joint_bytes > FIRST_BUCKET_BYTES:
        reason = f"{size} fill more than DDP's first bucket (1 MiB): the others are reduced during the backward"
    else:
        joint, reason = True, f"{size} fit in DDP's first bucket (1 MiB): nothing to overlap with the backward"
    return Decision("one_message", "gradients", joint, reason, "one message" if joint else "buckets")
