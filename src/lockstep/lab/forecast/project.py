"""``lockstep forecast``: measure or model one device's step, then predict many, with error bars, reasons and advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.config import RunConfig
from lockstep.errors import LockstepError, RunError, UsageError, many
from lockstep.hardware.detect import usable_cores
from lockstep.hardware.peaks import PEAKS
from lockstep.lab.bench.comm import bench_comm
from lockstep.lab.bench.loader import bench_loader
from lockstep.lab.bench.report import BenchReport, Say
from lockstep.lab.bench.trials import Subject, new_trials
from lockstep.lab.forecast.collectives import Cluster, cluster_of, measured_cluster
from lockstep.lab.forecast.footprint import Footprint, Work, blocking_messages
from lockstep.lab.forecast.measured import Row, cases, contention, counts_beside, measure_alone, meeting, step_of
from lockstep.lab.forecast.memory import MOST, Counting, choose_strategy, gigabytes, total
from lockstep.lab.forecast.scaling import Setting, Step, Wish, buckets, predict, with_error_bars
from lockstep.planning.resolve import resolve_reduction
from lockstep.strategies import auto_strategy, find_strategy

#: A change is worth a word from this gain in samples a second on.
WORTH = 0.03
BUCKETS_MB = (1, 5, 10, 25, 50, 100, 200)


def forecast(subject: Subject, wish: Wish, *, say: Say = lambda line: None) -> BenchReport:
    """Predict samples a second and efficiency for each of ``wish.gpus``, with a constant batch per device.

    Raises :class:`UsageError` for contradictions, :class:`RunError` if the step could not be measured.
    """
    base = subject.base
    devices = list(base.placement.devices)
    counting = Counting(subject)
    size = counting.size
    blocking = blocking_messages(base.task, base.config)
    cluster = _checked(wish, devices, base.config)
    report = BenchReport("forecast", subject.name, {"devices": [wish.gpu or devices[0]], "batch_size": size})
    if size < base.plan.batch.batch_size:
        report.notes.append(f"there are only {size} samples for a batch of {base.plan.batch.batch_size}")
    if wish.gpu is not None and cluster is not None:
        counting = Counting(subject, max(wish.gpus), wish.per_node)
        step, notes = modelled_step(counting.footprint(size, True), wish.gpu)
        setting = Setting(cluster)
    else:
        with report.kept():
            collective = wish.strategy is not None and find_strategy(wish.strategy).forward_is_collective
            step, setting, notes = _measured(counting, wish, cluster, collective or blocking > 0, say)
        if report.partial:
            report.verdict = "no forecast available: the measurement was stopped"
            return report
        counting = Counting(subject, per_node=setting.cluster.per_node)
    on_cpu = wish.gpu is None and base.placement.accelerator == "cpu"
    distributed = base.config.distributed
    joint = bool(resolve_reduction(distributed, base.facts.joint_bytes, on_cpu=on_cpu).value)
    step, setting, ddp_fits, strategy_notes = _strategy(step, setting, counting, wish)
    setting = replace(
        setting,
        accumulate=base.plan.batch.accumulate,
        bucket_bytes=None if distributed.bucket_cap_mb is None else int(distributed.bucket_cap_mb * 2**20),
        blocking=blocking,
        joint=not setting.sharded and joint,
    )
    report.rows = [
        {**with_error_bars(step, count, setting), "strategy": setting.strategy, "status": "ok"}
        for count in sorted(set(wish.gpus))
    ]
    report.settings |= {
        "interconnect": wish.interconnect,
        "per_node": setting.cluster.per_node,
        "accumulate": setting.accumulate,
        "strategy": setting.strategy,
        "precision": base.placement.precision,
    }
    largest = report.rows[-1]
    report.verdict = (
        f"{largest['gpus']} GPUs: {largest['samples_per_s']:,.0f} samples/s "
        f"({largest['samples_per_s_low']:,.0f} to {largest['samples_per_s_high']:,.0f}), efficiency "
        f"{largest['efficiency']:.0%} ({largest['efficiency_low']:.0%} to {largest['efficiency_high']:.0%})"
    )
    advice = advise(step, largest["gpus"], setting, ddp_fits=ddp_fits)
    report.extra = {"advice": advice}
    advice_notes = [f"advice: {line}" for line in advice]
    report.notes = [*advice_notes, *strategy_notes, *report.notes, *notes, *_assumptions(step, setting)]
    return report


def _checked(wish: Wish, devices: Sequence[str], config: RunConfig) -> Cluster | None:
    """Refuse a wish that cannot be fulfilled; returns its links, or ``None`` if they are to be measured."""
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
    if config.training.global_batch_size is not None:
        raise UsageError(
            f"a forecast cannot hold the global batch at {config.training.global_batch_size}",
            why="it measures the step of one device and holds that device's batch: other batches take other times",
            fix="set training.global_batch_size=null, and set --batch-size and --grad-accum-steps of a device",
        )
    if wish.interconnect != "measured":
        return cluster_of(wish.interconnect, wish.per_node)
    if wish.gpu is not None or len(devices) < 2:
        between = f"{devices[0]} and itself" if wish.gpu is None else f"hypothetical GPUs ({wish.gpu})"
        raise UsageError(
            f"nothing can be measured between {between}",
            fix="name the devices with --devices, two or more, or choose --interconnect nvlink,ib400",
        )
    return None


def _measured(
    counting: Counting, wish: Wish, cluster: Cluster | None, waits: bool, say: Say
) -> tuple[Step, Setting, list[str]]:
    """Measure one device's step, and the contention of ranks on one machine if ``cluster`` is to be measured.

    ``waits``: ranks wait for each other in mid-step.
    """
    subject = counting.subject
    base = counting.base
    size = counting.size
    devices = list(base.placement.devices)
    on_cpu = base.placement.accelerator == "cpu"
    counts = counts_beside(wish.gpus, len(devices)) if cluster is None else [1]
    turns: list[Sequence[Row]] = []
    with new_trials() as trials:
        for count in counts:
            say(f"{wish.repeats} times {wish.steps} steps of {many(count, 'device')}, without communication")
            together, alone = cases(subject, devices[:count], size, wish.steps)
            outcome = trials.run_case(measure_alone, together, alone, wish.repeats, task=base.task)
            if outcome.ended == "stopped":
                raise KeyboardInterrupt
            if not outcome.rows or outcome.ended != "done":
                raise RunError("the step could not be measured", why=outcome.error or outcome.ended)
            turns.append(outcome.rows)
    rate = _loader_rate(subject, say)
    alike = base.plan.order.bucketed
    step = step_of(counting.footprint(size, True), turns[0], rate, alike=alike)
    notes = [
        f"the step was measured on {devices[0]}: {step.seconds * 1e3:.3g} ms (within {step.spread:.0%}), jitter "
        f"{step.jitter_s * 1e3:.2g} ms"
    ]
    if cluster is not None:
        return step, Setting(cluster), notes
    say(f"messages between {len(devices)} devices")
    max_bytes = max(1 << 20, min(64 << 20, sum(step.gradients)))
    comm = _unless_stopped(bench_comm(subject.given, max_bytes=max_bytes, say=say))
    fit = comm.extra.get("fits", {}).get("all_reduce")
    if fit is None:
        raise RunError("the messages between the devices could not be measured", why="; ".join(comm.notes))
    cluster = measured_cluster(fit["alpha_s"], fit["beta_s_per_byte"], len(devices), max(fit["error"], 0.1))
    slowed = {count: contention(each, count if on_cpu else 0, waits) for count, each in zip(counts, turns, strict=True)}
    costs = meeting(turns[-1], counts[-1], fit["alpha_s"] / 2) if on_cpu else 0.0
    spare = max(0.0, usable_cores() - len(devices) * (base.config.training.threads or 1)) / len(devices)
    overlap = min(1.0, spare) if on_cpu else 1.0
    notes.append(f"messages were measured between {', '.join(devices)}: {comm.verdict}")
    notes += [
        f"{count} devices of this machine, without communication, take {by:.2f} times as long"
        for count, by in slowed.items()
    ]
    if on_cpu and overlap < 1:
        notes.append(f"the ranks' cores carry the messages too: {overlap:.0%} of the backward hides them")
    if costs > 0:
        notes.append(f"a message in mid-step costs these ranks {costs * 1e3:.2g} ms in addition to its time, measured")
    return step, Setting(cluster, overlap=overlap, contention=slowed, meeting_s=costs), notes


def _unless_stopped(report: BenchReport) -> BenchReport:
    """Raise :class:`KeyboardInterrupt` if a signal ended the measurement, to end the forecast too."""
    if report.partial:
        raise KeyboardInterrupt
    return report


def _loader_rate(subject: Subject, say: Say) -> float | None:
    """Measure the plan's loader in samples a second; ``None``: not measured."""
    workers = subject.base.plan.loader.num_workers
    try:
        rows = _unless_stopped(bench_loader(subject, workers=[workers], seconds=1.0, say=say)).rows
    except LockstepError:
        return None
    rates = [row["samples_per_s"] for row in rows if row["status"] == "ok" and row["samples_per_s"] > 0]
    return rates[0] if rates else None


def _strategy(
    step: Step, setting: Setting, counting: Counting, wish: Wish
) -> tuple[Step, Setting, bool | None, list[str]]:
    """Choose the strategy of ``wish``, or as ``auto`` does; returns also whether the whole model fits, if known."""
    ranks = max(wish.gpus)
    notes = list[str]()
    chosen = wish.strategy
    ddp_fits = None
    whole = auto_strategy(MOST)
    sharded = auto_strategy(MOST, fits=False)
    config = counting.config
    fsdp = counting.config.fsdp
    if wish.memory is not None:
        names = (auto_strategy(1), whole, sharded)
        totals = {name: total(counting.memory(name, ranks, step.batch_size)) for name in names}
        fitting, reason = choose_strategy(totals, ranks, wish.memory)
        ddp_fits = totals[whole] <= wish.memory
        chosen = chosen or fitting
        as_set = f"as set ({whole}: {gigabytes(totals[whole])})"
        notes.append(f"strategy {chosen}: {reason if chosen == fitting else as_set}")
    if chosen is None or find_strategy(chosen).messages != "gather":
        return step, replace(setting, strategy=whole), ddp_fits, notes
    if fsdp.activation_checkpointing or config.training.activation_checkpointing:
        step = replace(step, backward_s=step.backward_s + step.forward_s)
        notes.append("activation_checkpointing: a forward more in every backward")
    if fsdp.cpu_offload:
        notes.append("fsdp.cpu_offload: the transfer to host memory and back takes time that is not included")
    # As lockstep.engine.strategies.fsdp gathers them; gradients are summed in single precision.
    shrink = 1.0 if counting.base.placement.precision == "32" else 0.5
    hybrid = fsdp.sharding == "hybrid"
    return step, replace(setting, strategy=chosen, shrink=shrink, hybrid=hybrid), ddp_fits, notes


def _assumptions(step: Step, setting: Setting) -> Iterator[str]:
    cluster = setting.cluster
    levels = {"inside a node": cluster.node, "between nodes": cluster.network}
    if cluster.node is cluster.network:
        levels = {"between devices": cluster.node}
    for scope, level in levels.items():
        low, typical, high = (bandwidth / 1e9 for bandwidth in level.bandwidth)
        each = " for each device" if level.per_device else ""
        hop = f"{level.alpha_s[1] * 1e6:.3g} µs a hop; {level.source}"
        yield f"{scope}: {level.name}, {typical:.3g} GB/s ({low:.3g} to {high:.3g}){each}, {hop}"
    gradients = f"ddp sends {sum(step.gradients) / 1e6:.3g} MB of gradients in"
    if setting.joint:
        yield f"{gradients} one message, after the backward"
    elif not setting.sharded:
        count = len(buckets(step.gradients, step.ready, setting.bucket_bytes))
        yield f"{gradients} {many(count, 'bucket')}, as they become ready"
    if setting.blocking:
        yield f"synchronised BatchNorm waits for {setting.blocking} short messages in every micro-batch"
    if step.loader_rate is not None:
        yield f"every rank's loader brings {step.loader_rate:,.0f} samples/s, as here: a node has cores enough"
    yield "steps vary independently of each other; a device that is always slow is not modelled"
    half = ", the cost of a message in mid-step by half" if setting.meeting_s else ""
    yield f"error bars: measured spread, α and β of the links, jitter halved or doubled, overlap down to 80 %{half}"


def advise(step: Step, devices: int, setting: Setting, *, ddp_fits: bool | None = None) -> list[str]:
    """List changes with their gain on ``devices`` devices, the largest first; each is predicted separately.

    ``ddp_fits``: whether the whole model fits a device; ``None``: unknown.
    """
    if devices == 1:
        return []
    now = predict(step, devices, setting)
    lines = sorted(_options(step, devices, setting, now.samples_per_s), reverse=True)
    advice = [f"{text}: {gain:+.0%} samples/s on {devices} GPUs" for gain, text in lines if gain >= WORTH]
    if ddp_fits is False and not setting.sharded:
        sharded = auto_strategy(devices, fits=False)
        advice.insert(0, f"--strategy {sharded}: the model with its gradients and optimizer does not fit one GPU")
    share = {name: seconds / now.step_s for name, seconds in now.parts.items()}
    if share["data"] > WORTH:
        advice.append(f"input takes {share['data']:.0%} of the step: more --num-workers, or cheaper preprocessing")
    if share["straggler"] > WORTH:
        advice.append(
            f"waiting for the slowest takes {share['straggler']:.0%}: find what makes steps uneven (`bench step`)"
        )
    return advice or ["nothing to gain: computation is " + f"{share['compute']:.0%} of the step"]


def _options(step: Step, devices: int, setting: Setting, rate: float) -> Iterator[tuple[float, str]]:
    def gain(changed: Step = step, **changes: Any) -> float:
        return predict(changed, devices, replace(setting, **changes)).samples_per_s / rate - 1

    for factor in (2, 4):
        times = ("forward_s", "backward_s", "data_s")
        larger = replace(step, batch_size=step.batch_size * factor, **{t: getattr(step, t) * factor for t in times})
        yield gain(larger), f"--batch-size {larger.batch_size}"
        accumulate = setting.accumulate * factor
        yield gain(accumulate=accumulate), f"--grad-accum-steps {accumulate}"
    if setting.sharded:
        if setting.cluster.per_node > 1:
            yield gain(hybrid=True), "--set fsdp.sharding=hybrid (if the GPUs of one node have room for the model)"
    elif not setting.joint:
        best, cap = max((gain(bucket_bytes=cap << 20), cap) for cap in BUCKETS_MB)
        yield best, f"--set distributed.bucket_cap_mb={cap}"
        yield gain(shrink=0.5), "gradients sent in 16 bits (no setting of Lockstep)"


#: Shares of a data sheet's peak that large kernels reach: the middle, and the range that forecasts carry. Published
#: training runs use 35 to 60 % of the arithmetic (PaLM, https://arxiv.org/abs/2204.02311, table 3), and copies 70 to
#: 90 % of the memory's speed.
REACHED_FLOPS = (0.35, 0.5, 0.65)
REACHED_BANDWIDTH = (0.7, 0.8, 0.9)
#: Seconds between two kernels that eager torch starts from Python: low, middle, high.
LAUNCH_S = (3e-6, 5e-6, 8e-6)


class Machine(NamedTuple):
    """Operations (in 32 and in 16 bits) and bytes a second that programs reach, seconds to start a kernel."""

    flops: float
    half_flops: float
    bandwidth: float
    launch_s: float
    source: str


def gpu_machine(name: str, index: int = 1) -> Machine:
    """Look up a GPU by its driver's name. ``index``: 0 slow, 1 typical, 2 fast."""
    peaks = PEAKS.get(name)
    if peaks is None:
        raise UsageError(
            f"no data sheet figures for {name!r}",
            why="a modelled step needs the peaks of its arithmetic and memory",
            fix=f"name one of: {', '.join(PEAKS)}; or measure on a local device with --devices",
        )
    share = 1e12 * REACHED_FLOPS[index]
    bandwidth = 1e9 * REACHED_BANDWIDTH[index]
    single = peaks.fp32 * share
    half = peaks.half * share
    launch_s = LAUNCH_S[2 - index]
    return Machine(single, half, peaks.memory * bandwidth, launch_s, f"{peaks.source}: fp32")


def seconds(work: Sequence[Work], machine: Machine) -> float:
    """Sum the roofline of each operator (Williams, Waterman, Patterson 2009, https://doi.org/10.1145/1498765.1498785).

    One after another, each as slow as the slowest of its arithmetic, its memory traffic and its launch.
    """
    rates = {False: machine.flops, True: machine.half_flops}
    return sum(max(op.flops / rates[op.half], op.moved / machine.bandwidth, machine.launch_s) for op in work)


def modelled_step(footprint: Footprint, gpu: str) -> tuple[Step, list[str]]:
    """Model a step on a hypothetical GPU: the roofline of every operator that the task's step starts."""
    slow, typical, fast = (gpu_machine(gpu, index) for index in range(3))
    parts = (footprint.forward, footprint.backward, footprint.optimizer)
    longest, shortest = (sum(seconds(part, machine) for part in parts) for machine in (slow, fast))
    forward_s, backward_s, optimizer_s = (seconds(part, typical) for part in parts)
    step = Step(
        batch_size=footprint.batch_size,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        gradients=footprint.gradients,
        ready=footprint.ready_by(lambda work: seconds([work], typical)),
        spread=(longest / shortest) ** 0.5 - 1,
        blocks=footprint.blocks,
    )
    flops = sum(work.flops for part in parts for work in part)
    note = (
        f"the step is modelled, not measured: {len(footprint.forward) + len(footprint.backward)} operators, "
        f"{flops / 1e12:.3g} TFLOP, on {gpu} ({typical.source}) at {typical.flops / 1e12:.3g} TFLOP/s "
        f"({typical.half_flops / 1e12:.3g} in 16 bits), {typical.bandwidth / 1e9:.0f} GB/s and "
        f"{typical.launch_s * 1e6:.0f} µs a kernel; between the cautious and the good case lies a factor of "
        f"{longest / shortest:.2g}"
    )
    return step, [note, "input is taken to keep up, and every GPU to be equally fast"]
