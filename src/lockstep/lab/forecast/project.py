"""``lockstep forecast``: measure or model one device's step, then predict many, with error bars and reasons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.engine.training_data import training_source
from lockstep.errors import RunError, UsageError, many
from lockstep.lab.bench.loader import EPOCHS, loading_rate
from lockstep.lab.bench.report import BenchReport, Say
from lockstep.lab.bench.step import RARER_MESSAGES, measure_all
from lockstep.lab.bench.trials import Subject, new_trials
from lockstep.lab.forecast.collectives import Cluster, cluster_of
from lockstep.lab.forecast.footprint import Footprint, blocking_messages
from lockstep.lab.forecast.memory import MOST, Counting, choose_strategy, gigabytes, refuse_hybrid, total
from lockstep.lab.forecast.roofline import modelled_step
from lockstep.lab.forecast.scaling import Setting, Step, buckets, with_error_bars
from lockstep.launch.prepare import RunInputs
from lockstep.planning.resolve import resolve_reduction
from lockstep.strategies import auto_strategy, find_strategy
from lockstep.telemetry.console import duration

#: Links by kind of device, where the request names none: the nodes of a CPU cluster are joined by Ethernet.
LINKS = {"gpu": "nvlink,ib400", "cpu": "25gbe"}
#: Share of a step from which a part other than computation is worth a word.
WORTH = 0.03
WARM_UP = 5
#: How long the input is measured, seconds.
INPUT_S = 1.0
#: Quartiles lie this many standard deviations apart (normal distribution).
IQR_PER_STD = 1.349
#: What shortens each part of a step.
_ADVICE = {
    "communication": RARER_MESSAGES,
    "data": "more --num-workers, or cheaper preprocessing",
    "straggler": "find what makes steps uneven (`bench step`)",
}


@dataclass(frozen=True)
class Wish:
    """The request for a forecast: numbers of devices ``gpus``, ``per_node`` of them a node.

    ``interconnect``: as for :func:`~lockstep.lab.forecast.collectives.cluster_of`; ``None``: :data:`LINKS`. ``gpu``: a
    hypothetical one, whose step is modelled. ``memory``: bytes of each device, to choose the strategy, unless
    ``strategy`` is ``ddp`` or ``fsdp``. ``steps``, ``repeats``: of the measurement.
    """

    gpus: tuple[int, ...]
    interconnect: str | None = None
    per_node: int = 8
    gpu: str | None = None
    memory: float | None = None
    strategy: str | None = None
    steps: int = 30
    repeats: int = 3


def forecast(subject: Subject, wish: Wish, *, say: Say = lambda line: None) -> BenchReport:
    """Predict samples a second and efficiency for each of ``wish.gpus``, with a constant batch per device.

    Raises :class:`UsageError` for contradictions, :class:`RunError` if the step could not be measured.
    """
    base = subject.base
    device = wish.gpu or base.placement.devices[0]
    cluster = _checked(wish, base)
    counting = Counting(subject, None if wish.gpu is None else max(wish.gpus))
    report = BenchReport("forecast", subject.name, {"devices": [device], "batch_size": counting.size})
    if counting.size < base.plan.batch.batch_size:
        report.notes.append(f"there are only {counting.size} samples for a batch of {base.plan.batch.batch_size}")
    footprint = counting.footprint(counting.size, True)
    if wish.gpu is not None:
        step, notes = modelled_step(footprint, wish.gpu)
    else:
        with report.kept():
            step, notes = _measured(subject, footprint, wish, say)
        if report.partial:
            report.verdict = "no forecast available: the measurement was stopped"
            return report
    setting, strategy_notes = _setting(cluster, counting, wish)
    is_measured = wish.gpu is None and base.config.training.activation_checkpointing
    if base.config.recomputes_activations(setting.strategy) and not is_measured:
        step = replace(step, backward_s=step.backward_s + step.forward_s)
        strategy_notes.append("activation_checkpointing: a forward more in every backward")
    report.rows = [_row(step, count, setting, base) for count in sorted(set(wish.gpus))]
    report.settings |= {
        "interconnect": wish.interconnect or LINKS["cpu" if device == "cpu" else "gpu"],
        "per_node": cluster.per_node,
        "accumulate": setting.accumulate,
        "strategy": setting.strategy,
        "precision": base.placement.precision,
    }
    largest = report.rows[-1]
    report.verdict = (
        f"{largest['gpus']} {'CPUs' if device == 'cpu' else 'GPUs'}: {largest['samples_per_s']:,.0f} samples/s "
        f"({largest['samples_per_s_low']:,.0f} to {largest['samples_per_s_high']:,.0f}), efficiency "
        f"{largest['efficiency']:.0%} ({largest['efficiency_low']:.0%} to {largest['efficiency_high']:.0%}); an epoch "
        f"takes {duration(largest['epoch_s'])}, the run {duration(largest['run_s'])}, without evaluations"
    )
    rate = _input_rate(base)
    needed = largest["samples_per_s"] / largest["gpus"]
    processes = "which is enough" if rate >= needed else f"--num-workers {math.ceil(needed / rate)} or more"
    notes.append(f"one process reads {rate:,.0f} samples/s here, and a rank needs {needed:,.0f}: {processes}")
    report.extra = {"advice": list(_advice(largest)), "input_samples_per_s": rate}
    report.notes = [*report.extra["advice"], *strategy_notes, *report.notes, *notes, *_assumptions(step, setting)]
    return report


def _checked(wish: Wish, base: RunInputs) -> Cluster:
    """Refuse a wish that cannot be fulfilled; returns its links."""
    if not wish.gpus or min(wish.gpus) < 1 or max(wish.gpus) > MOST or wish.steps < 2 or wish.repeats < 1:
        problem = "a forecast needs numbers of GPUs, steps and repeats"
        raise UsageError(
            problem,
            why=f"1 to {MOST:,} GPUs, 2 steps or more, 1 repetition or more",
            fix="write for example --gpus 8,64,512",
        )
    if wish.strategy is not None and find_strategy(wish.strategy).devices == "one":
        raise UsageError(
            f"a forecast of several devices cannot use strategy {wish.strategy}, which takes one",
            fix="leave --strategy out; one device is a row of it: --gpus 1,8",
        )
    if base.config.training.global_batch_size is not None:
        raise UsageError(
            f"a forecast cannot hold the global batch at {base.config.training.global_batch_size}",
            why="it measures the step of one device and holds that device's batch: other batches take other times",
            fix="set training.global_batch_size=null, and set --batch-size and --grad-accum-steps of a device",
        )
    if wish.gpu is not None or base.placement.accelerator == "gpu":
        return cluster_of(wish.interconnect or LINKS["gpu"], wish.per_node)
    if wish.interconnect not in (None, LINKS["cpu"]):
        raise UsageError(
            f"a CPU's step cannot be combined with --interconnect {wish.interconnect}",
            why="the step was measured on a CPU, and that link joins GPUs",
            fix='name the GPU, such as --gpu "NVIDIA H100 80GB HBM3", or leave --interconnect out (25gbe)',
        )
    return cluster_of(LINKS["cpu"], 1)


def _input_rate(base: RunInputs) -> float:
    """Measure samples that this process reads in a second, on the batches of the run."""
    plan = base.plan.model_copy(update={"epochs": EPOCHS})
    source = training_source(base.task, base.datasets, plan)
    rate: float = loading_rate(source, plan, 0, INPUT_S, check=lambda: None)["samples_per_s"]
    return rate


def _row(step: Step, count: int, setting: Setting, base: RunInputs) -> dict[str, Any]:
    row = with_error_bars(step, count, setting)
    plan = base.plan
    max_steps = base.config.training.max_steps
    epoch_s = (plan.order.positions or plan.task.train_samples) / row["samples_per_s"]
    run_s = plan.epochs * epoch_s if max_steps is None else max_steps * row["step_ms"] / 1e3
    return {**row, "epoch_s": epoch_s, "run_s": run_s, "strategy": setting.strategy, "status": "ok"}


def _measured(subject: Subject, footprint: Footprint, wish: Wish, say: Say) -> tuple[Step, list[str]]:
    """Measure the step of the first device, ``wish.repeats`` times."""
    base = subject.base
    device = base.placement.devices[0]
    threads = base.config.training.threads or (1 if base.placement.accelerator == "cpu" else None)
    sizes = {"batch_size": footprint.batch_size, "global_batch_size": None, "accumulate": 1, "threads": threads}
    changes = {"training": sizes, "hardware": {"selected_devices": [device], "strategy": "auto"}}
    case = subject.case({}, changes, steps=wish.steps, warm_up=WARM_UP)
    say(f"{wish.repeats} times {wish.steps} steps of one device")
    with new_trials() as trials:
        rows = measure_all(subject, trials, [case] * wish.repeats)
    if not rows or rows[-1]["status"] != "ok":
        raise RunError("the step could not be measured", why=rows[-1]["reason"] if rows else "")
    step = step_of(footprint, rows, ignores_jitter=base.plan.order.bucketed)
    return step, [
        f"the step was measured on {device}: {step.seconds * 1e3:.3g} ms (within {step.spread:.0%}), waiting for input "
        f"included; jitter {step.jitter_s * 1e3:.2g} ms"
    ]


def step_of(footprint: Footprint, rows: Sequence[dict[str, Any]], *, ignores_jitter: bool) -> Step:
    """Make a step from rows of ``bench step``.

    Jitter is estimated from quartiles. ``ignores_jitter``: batches differ by design (buckets of lengths), equally on
    all ranks, so differences from step to step are no jitter.
    """
    rows = sorted(rows, key=lambda row: row["mean_ms"])
    parts = rows[len(rows) // 2]["parts_ms"]
    quartiles_apart = statistics.median(row["step_ms_high"] - row["step_ms_low"] for row in rows)
    return Step(
        batch_size=footprint.batch_size,
        **{f"{name}_s": parts[name] / 1e3 for name in ("data", "forward", "backward", "optimizer", "other")},
        jitter_s=0.0 if ignores_jitter else quartiles_apart / IQR_PER_STD / 1e3,
        spread=(rows[-1]["mean_ms"] / rows[0]["mean_ms"]) ** 0.5 - 1,
        gradients=footprint.gradients,
        ready=footprint.ready_by(lambda work: work.flops + work.moved),
        blocks=footprint.blocks,
    )


def _setting(cluster: Cluster, counting: Counting, wish: Wish) -> tuple[Setting, list[str]]:
    """Choose the strategy of ``wish``, or as ``auto`` does, and its messages."""
    ranks = max(wish.gpus)
    notes = list[str]()
    chosen = wish.strategy
    whole = auto_strategy(MOST)
    base = counting.base
    distributed = base.config.distributed
    if wish.memory is not None:
        names = (auto_strategy(1), whole, auto_strategy(MOST, fits=False))
        totals = {name: total(counting.memory(name, ranks, counting.size)) for name in names}
        best_strategy, reason = choose_strategy(totals, ranks, wish.memory)
        chosen = chosen or best_strategy
        as_set = f"as set ({whole}: {gigabytes(totals[whole])})"
        notes.append(f"strategy {chosen}: {reason if chosen == best_strategy else as_set}")
    setting = Setting(
        cluster,
        accumulate=base.plan.batch.accumulate,
        bucket_bytes=None if distributed.bucket_cap_mb is None else int(distributed.bucket_cap_mb * 2**20),
        blocking=blocking_messages(base.task, base.config),
    )
    if chosen is None or find_strategy(chosen).messages != "gather":
        joint = resolve_reduction(distributed, base.facts.joint_bytes, on_cpu=not counting.on_gpu)
        return replace(setting, strategy=whole, joint=bool(joint.value)), notes
    refuse_hybrid(base.config)
    if base.config.fsdp.cpu_offload:
        notes.append("fsdp.cpu_offload: the transfer to host memory and back takes time that is not included")
    # As lockstep.engine.strategies.fsdp gathers them; gradients are summed in single precision.
    shrink = 0.5 if base.placement.number_format.is_half else 1.0
    return replace(setting, strategy=chosen, shrink=shrink), notes


def _advice(row: dict[str, Any]) -> Iterator[str]:
    """Yield what shortens the parts of a step that are not computation, the longest first."""
    shares = {name: row["parts_ms"][name] / row["step_ms"] for name in _ADVICE}
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share > WORTH:
            yield f"{name} takes {share:.0%} of a step on {many(row['gpus'], 'device')}: {_ADVICE[name]}"


def _assumptions(step: Step, setting: Setting) -> Iterator[str]:
    cluster = setting.cluster
    levels = {"inside a node": cluster.node, "between nodes": cluster.network}
    for scope, level in list(levels.items())[cluster.per_node == 1 :]:
        low, typical, high = (bandwidth / 1e9 for bandwidth in level.bandwidth)
        each = " for each device" if level.per_device else ""
        hop = f"{level.alpha_s[1] * 1e6:.3g} µs a hop; {level.source}"
        yield f"{scope}: {level.name}, {typical:.3g} GB/s ({low:.3g} to {high:.3g}){each}, {hop}"
    if not setting.sharded:
        count = len(buckets(step.gradients, step.ready, setting.bucket_bytes))
        messages = "one message, after the backward" if setting.joint else f"{many(count, 'bucket')}, as they are ready"
        yield f"ddp sends {sum(step.gradients) / 1e6:.3g} MB of gradients in {messages}"
    if setting.blocking:
        yield f"synchronised BatchNorm waits for {setting.blocking} short messages in every micro-batch"
    yield "every node brings input as fast as here; a device that is always slow is not modelled"
    yield "error bars: measured spread, α and β of the links, jitter halved or doubled, overlap down to 80 %"
