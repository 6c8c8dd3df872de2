"""``lockstep forecast``: measure or model one device's step, then predict many, with error bars, reasons and advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from lockstep._compat.torch import BatchNorm
from lockstep.bench.comm import bench_comm
from lockstep.bench.loader import bench_loader
from lockstep.bench.measure import Case
from lockstep.bench.results import BenchReport
from lockstep.bench.trials import Trials, new_trials
from lockstep.bench.workload import Subject
from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.inspection import blueprint
from lockstep.engine.task import Task
from lockstep.errors import LockstepError, RunError, UsageError
from lockstep.forecast.advice import advise
from lockstep.forecast.collectives import Cluster, cluster_of, measured_cluster
from lockstep.forecast.contention import contention, counts_beside, jitter, meeting
from lockstep.forecast.estimate import Counting
from lockstep.forecast.footprint import Footprint
from lockstep.forecast.measure import measure_alone
from lockstep.forecast.memory import MOST, choose_strategy, gigabytes
from lockstep.forecast.roofline import gpu_machine, seconds
from lockstep.forecast.scaling import Setting, Step, as_row, step_buckets, with_error_bars
from lockstep.hardware.host import usable_cores
from lockstep.planning.resolve import resolve_reduction
from lockstep.strategies import auto_strategy, find_strategy

WARM_UP = 5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What to forecast.

    Attributes:
        gpus: numbers of devices.
        interconnect: as for :func:`~lockstep.forecast.collectives.cluster_of`, or ``measured``: between the devices
            that are chosen, which are here.
        per_node: devices a node.
        gpu: a GPU that is not here, by its driver's name: the step is modelled; ``None``: measured on the first
            device.
        memory: bytes of each device, to choose the strategy; ``None``: not known.
        strategy: ``ddp``, ``fsdp``, or ``None`` to choose.
        steps, repeats: of each measurement.
    """

    gpus: tuple[int, ...]
    interconnect: str = "nvlink,ib400"
    per_node: int = 8
    gpu: str | None = None
    memory: float | None = None
    strategy: str | None = None
    steps: int = 30
    repeats: int = 3


def forecast(subject: Subject, wish: Wish, *, say: Say = lambda line: None) -> BenchReport:
    """Predict samples a second and efficiency for each of ``wish.gpus``, the batch per device held.

    Raises:
        UsageError: settings that contradict each other. RunError: the step could not be measured.
    """
    base = subject.base
    devices, size = list(base.placement.devices), _batch(subject)
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
            step, setting, notes = _measured(subject, wish, cluster, say)
        if report.partial:
            report.verdict = "nothing is foreseen: the measurement was stopped"
            return report
        counting = Counting(subject, per_node=setting.cluster.per_node)
    on_cpu = wish.gpu is None and base.placement.accelerator == "cpu"
    joint = bool(resolve_reduction(base.config.distributed, base.facts.joint_bytes, on_cpu=on_cpu).value)
    step, setting, ddp_fits, how = _strategy(step, setting, counting, wish)
    setting = replace(
        setting,
        accumulate=base.plan.batch.accumulate,
        bucket_bytes=_cap(subject),
        blocking=blocking_messages(base.task, base.config),
        joint=not setting.sharded and joint,
    )
    report.rows = [
        {**as_row(with_error_bars(step, count, setting)), "strategy": setting.strategy, "status": "ok"}
        for count in sorted(set(wish.gpus))
    ]
    report.settings |= {"interconnect": wish.interconnect, "per_node": setting.cluster.per_node}
    report.settings |= {"accumulate": setting.accumulate, "strategy": setting.strategy}
    report.settings |= {"precision": base.placement.precision}
    report.notes = [*how, *report.notes, *notes, *assumptions(step, setting)]
    _conclude(report, step, setting, ddp_fits)
    return report


def _checked(wish: Wish, devices: Sequence[str], config: RunConfig) -> Cluster | None:
    """The links of a wish that can be fulfilled; ``None``: they are to be measured."""
    if not wish.gpus or min(wish.gpus) < 1 or max(wish.gpus) > MOST or wish.steps < 2 or wish.repeats < 1:
        raise UsageError(
            "a forecast needs numbers of GPUs, steps and repeats",
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
            fix="set training.global_batch_size=null, and say with --batch-size and --grad-accum-steps what each takes",
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


def blocking_messages(task: Task, config: RunConfig) -> int:
    """Messages in a forward and backward that wait for all ranks: two for each BatchNorm that is synchronised."""
    if config.distributed.sync_batchnorm == "off":
        return 0
    return 2 * sum(isinstance(module, BatchNorm) for module in blueprint(task).modules())


def _batch(subject: Subject) -> int:
    return Counting(subject).size


def _cap(subject: Subject) -> int | None:
    cap = subject.base.config.distributed.bucket_cap_mb
    return None if cap is None else int(cap * 2**20)


def modelled_step(footprint: Footprint, gpu: str) -> tuple[Step, list[str]]:
    """A step on a GPU that is not here: the roofline of every operator that the task's own step starts."""
    slow, middle, fast = (gpu_machine(gpu, place) for place in range(3))
    parts = (footprint.forward, footprint.backward, footprint.optimizer)
    times = [[seconds(part, machine) for part in parts] for machine in (slow, middle, fast)]
    totals = [sum(row) for row in times]
    passed = [0.0, *accumulate(seconds([work], middle) for work in footprint.backward)]
    step = Step(
        batch_size=footprint.batch_size,
        forward_s=times[1][0],
        backward_s=times[1][1],
        optimizer_s=times[1][2],
        gradients=footprint.gradients,
        ready=tuple(passed[place] / passed[-1] for place in footprint.ready),
        spread=(totals[0] / totals[2]) ** 0.5 - 1,
        blocks=footprint.blocks,
    )
    flops = sum(work.flops for part in parts for work in part)
    note = (
        f"the step is modelled, not measured: {len(footprint.forward) + len(footprint.backward)} operators, "
        f"{flops / 1e12:.3g} TFLOP, on {gpu} ({middle.source}) at {middle.flops / 1e12:.3g} TFLOP/s "
        f"({middle.half_flops / 1e12:.3g} in 16 bits), {middle.bandwidth / 1e9:.0f} GB/s and "
        f"{middle.launch_s * 1e6:.0f} µs a kernel; between the cautious and the good case lies a factor of "
        f"{totals[0] / totals[2]:.2g}"
    )
    return step, [note, "input is taken to keep up, and every GPU to be equally fast"]


def _measured(subject: Subject, wish: Wish, cluster: Cluster | None, say: Say) -> tuple[Step, Setting, list[str]]:
    """One device's step, and what ranks on one machine do to each other where ``cluster`` is to be measured."""
    base = subject.base
    devices, on_cpu = list(base.placement.devices), base.placement.accelerator == "cpu"
    counts = counts_beside(wish.gpus, len(devices)) if cluster is None else []
    found: list[list[dict[str, Any]]] = []
    with new_trials() as trials:
        for count in counts or [1]:
            say(f"{wish.repeats} times {wish.steps} steps of {count} device(s), without communication")
            found.append(_trial(subject, trials, devices[:count], wish))
    step = step_of(_batch(subject), found[0], _loader_rate(subject, say), alike=base.plan.order.bucketed)
    notes = [
        f"the step was measured on {devices[0]}: {step.seconds * 1e3:.3g} ms (within {step.spread:.0%}), jitter "
        f"{step.jitter_s * 1e3:.2g} ms"
    ]
    if cluster is not None:
        return step, Setting(cluster), notes
    say(f"messages between {len(devices)} devices")
    comm = _unless_stopped(bench_comm(subject.given, most=max(1 << 20, min(64 << 20, sum(step.gradients))), say=say))
    fit = comm.extra.get("fits", {}).get("all_reduce")
    if fit is None:
        raise RunError("the messages between the devices could not be measured", why="; ".join(comm.notes))
    cluster = measured_cluster(fit["alpha_s"], fit["beta_s_per_byte"], len(devices), max(fit["error"], 0.1))
    collective = wish.strategy is not None and find_strategy(wish.strategy).forward_is_collective
    waits = collective or blocking_messages(base.task, base.config) > 0
    slowed = {count: contention(rows, count if on_cpu else 0, waits) for count, rows in zip(counts, found, strict=True)}
    costs = meeting(found[-1], counts[-1], fit["alpha_s"] / 2) if on_cpu else 0.0
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
        notes.append(f"a message in mid-step costs these ranks {costs * 1e3:.2g} ms beside its own time, measured")
    return step, Setting(cluster, overlap=overlap, contention=slowed, meeting_s=costs), notes


def _unless_stopped(report: BenchReport) -> BenchReport:
    """Raises :class:`KeyboardInterrupt` where a signal ended it: then it ends the forecast too."""
    if report.partial:
        raise KeyboardInterrupt
    return report


def _trial(subject: Subject, trials: Trials, devices: Sequence[str], wish: Wish) -> list[dict[str, Any]]:
    """Rows of :func:`~lockstep.forecast.measure.measure_alone` on ``devices``."""
    together, alone = cases(subject, devices, wish.steps)
    outcome = trials.run(
        partial(measure_alone, together=together, alone=alone, rounds=wish.repeats),
        ranks=len(devices),
        config=together.config,
        task=subject.base.task,
        threads=together.plan.threads,
    )
    if outcome.ended == "stopped":
        raise KeyboardInterrupt
    if not outcome.rows or outcome.ended != "done":
        raise RunError("the step could not be measured", why=outcome.error or outcome.ended)
    return outcome.rows


def cases(subject: Subject, devices: Sequence[str], steps: int, strategy: str = "auto") -> tuple[Case, Case]:
    """The same batch per device on all ``devices`` together, and on the first alone; a thread a rank on the CPU."""
    base = subject.base
    threads = base.config.training.threads or (1 if base.placement.accelerator == "cpu" else None)
    sized = {"batch_size": _batch(subject), "global_batch_size": None, "accumulate": 1, "threads": threads}
    changes = {"training": sized, "hardware": {"selected_devices": list(devices), "strategy": strategy}}
    one = merge(changes, {"hardware": {"selected_devices": [devices[0]], "strategy": "auto"}})
    # The ranks take separate steps, so the batches of all devices may be more than the data set.
    all_of_them = merge(changes, {"training": {"tail": "spread"}})
    together, alone = (subject.case({}, what, steps=steps, warm_up=WARM_UP) for what in (all_of_them, one))
    return together, alone


def _loader_rate(subject: Subject, say: Say) -> float | None:
    """Samples a second of the loader that the plan takes, or ``None``."""
    workers = subject.base.plan.loader.num_workers
    try:
        rows = _unless_stopped(bench_loader(subject, workers=[workers], seconds=1.0, say=say)).rows
    except LockstepError:
        return None
    rates = [row["samples_per_s"] for row in rows if row["status"] == "ok" and row["samples_per_s"] > 0]
    return rates[0] if rates else None


def step_of(batch_size: int, measured: Sequence[dict[str, Any]], loader_rate: float | None, *, alike: bool) -> Step:
    """A step from rows of :func:`~lockstep.forecast.measure.measure_alone`; ``alike``: ranks' parts are equal work."""
    gradients = next(row for row in measured if "gradients" in row)
    rows = sorted((row for row in measured if row.get("count") == 1), key=lambda row: row["step_ms"])
    middle = rows[len(rows) // 2]
    parts = {name: milliseconds / 1e3 for name, milliseconds in middle["parts_ms"].items()}
    times = [row["step_ms"] for row in rows]
    return Step(
        batch_size=batch_size,
        data_s=parts["data"],
        forward_s=parts["forward"],
        backward_s=parts["backward"],
        optimizer_s=parts["optimizer"],
        other_s=parts["other"],
        jitter_s=jitter(rows, alike),
        spread=(max(times) / min(times)) ** 0.5 - 1,
        gradients=tuple(gradients["gradients"]),
        ready=tuple(gradients["ready"]),
        loader_rate=loader_rate,
    )


def _strategy(
    step: Step, setting: Setting, counting: Counting, wish: Wish
) -> tuple[Step, Setting, bool | None, list[str]]:
    """What ``auto`` would take, unless another one is wished for; and whether the whole model fits, if known."""
    ranks, notes, chosen, ddp_fits = max(wish.gpus), list[str](), wish.strategy, None
    whole, sharded = auto_strategy(MOST), auto_strategy(MOST, fits=False)
    config = counting.subject.base.config.fsdp
    if wish.memory is not None:
        names = (auto_strategy(1), whole, sharded)
        totals = {name: counting.memory(name, ranks, step.batch_size).total for name in names}
        fitting, why = choose_strategy(totals, ranks, wish.memory)
        ddp_fits = totals[whole] <= wish.memory
        chosen = chosen or fitting
        notes.append(
            f"strategy {chosen}: " + (why if chosen == fitting else f"as set ({whole}: {gigabytes(totals[whole])})")
        )
    if chosen is None or find_strategy(chosen).messages != "gather":
        return step, replace(setting, strategy=whole), ddp_fits, notes
    if not step.blocks:
        step = replace(step, blocks=counting.footprint(step.batch_size, True).blocks)
    if config.activation_checkpointing:
        step = replace(step, backward_s=step.backward_s + step.forward_s)
        notes.append("fsdp.activation_checkpointing: a forward more in every backward")
    if config.cpu_offload:
        notes.append("fsdp.cpu_offload: the way to host memory and back is not foreseen, and takes time")
    # As lockstep.engine.strategies.fsdp gathers them; gradients are summed in single precision.
    half = counting.subject.base.placement.precision != "32"
    setting = replace(setting, strategy=chosen, half=half, hybrid=config.sharding == "hybrid")
    return step, setting, ddp_fits, notes


def assumptions(step: Step, setting: Setting) -> list[str]:
    """What the figures rest on, for people."""
    cluster = setting.cluster
    levels = [("inside a node", cluster.node), ("between nodes", cluster.network)]
    if cluster.node is cluster.network:
        levels = [("between devices", cluster.node)]
    lines = [
        f"{where}: {level.name}, {level.bandwidth[1] / 1e9:.3g} GB/s ({level.bandwidth[0] / 1e9:.3g} to "
        f"{level.bandwidth[2] / 1e9:.3g}){' for each device' if level.per_device else ''}, "
        f"{level.alpha_s[1] * 1e6:.3g} µs a hop; {level.source}"
        for where, level in levels
    ]
    if setting.joint:
        lines.append(f"ddp sends {sum(step.gradients) / 1e6:.3g} MB of gradients in one message, after the backward")
    elif not setting.sharded:
        sizes = [bucket.size for bucket in step_buckets(step, setting)]
        lines.append(
            f"ddp sends {sum(sizes) / 1e6:.3g} MB of gradients in {len(sizes)} bucket(s), as they become ready"
        )
    if setting.blocking:
        lines.append(f"synchronised BatchNorm waits for {setting.blocking} short messages in every micro-batch")
    if step.loader_rate is not None:
        lines.append(f"every rank's loader brings {step.loader_rate:,.0f} samples/s, as here: a node has cores enough")
    lines.append("steps vary independently of each other; a device that is always slow is not foreseen")
    half = ", what a message in mid-step costs by half" if setting.meeting_s else ""
    lines.append(
        f"error bars: measured spread, α and β of the links, jitter halved or doubled, overlap down to 80 %{half}"
    )
    return lines


def _conclude(report: BenchReport, step: Step, setting: Setting, ddp_fits: bool | None) -> None:
    most = report.rows[-1]
    report.verdict = (
        f"{most['gpus']} GPUs: {most['samples_per_s']:,.0f} samples/s "
        f"({most['samples_per_s_low']:,.0f} to {most['samples_per_s_high']:,.0f}), efficiency "
        f"{most['efficiency']:.0%} ({most['efficiency_low']:.0%} to {most['efficiency_high']:.0%})"
    )
    report.extra = {"advice": advise(step, most["gpus"], setting, ddp_fits=ddp_fits)}
    report.notes = [*(f"advice: {line}" for line in report.extra["advice"]), *report.notes]
