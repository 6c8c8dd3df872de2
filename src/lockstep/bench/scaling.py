"""``bench scaling``: 1, 2, … N devices, with the work for each held (weak) or the work in all (strong)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lockstep.bench.results import BenchReport
from lockstep.bench.script import bench_script
from lockstep.bench.step import MUCH_COMMUNICATION, check_steps, measure_all
from lockstep.bench.summary import device_counts, slow_ranks, speed_up, spread
from lockstep.bench.trials import Case, Subject, new_trials
from lockstep.errors import LockstepError, UsageError
from lockstep.planning.notes import FILL
from lockstep.strategies import auto_strategy, find_strategy

__all__ = ["Mode", "bench_scaling", "bench_script", "lost_repeats"]

Mode = Literal["weak", "strong"]
#: More than all devices can give together, caches aside.
DOUBTFUL = 1.1
#: Parts of a step that are computation.
_COMPUTE = ("forward", "backward", "optimizer", "other")


@dataclass
class Point:
    """A number of devices with a strategy: its cases (a mode each), and the rows of each repeat."""

    ranks: int
    strategy: str
    cases: list[Case]
    rows: list[list[dict[str, Any]]] = field(default_factory=list)


def bench_scaling(
    subject: Subject,
    *,
    strategies: Sequence[str] = ("ddp",),
    modes: Sequence[Mode] = ("weak", "strong"),
    steps: int = 30,
    warm_up: int = 5,
    repeats: int = 3,
    claims: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> BenchReport:
    """Measure the engine's own steps on parts of the chosen devices, in turns.

    Every rank has one intra-op thread on the CPU unless ``training.threads`` is set, so that two ranks have twice
    the threads of one.

    Args:
        strategies: of several devices; one that these devices or the task refuse gets a row that says so. The samples
            of a step are those of the others under ``pipeline`` too, in enough micro-batches to keep it busy.
        repeats: how often each point is measured, interleaved with the others; a median and quartiles come of it.
        claims: lay what guides claim for this task beside the measured figures; a note where they do not speak of it.

    Raises:
        UsageError: one device, or settings that contradict each other.
    """
    base = subject.base
    devices = list(base.placement.devices)
    if len(devices) < 2:
        raise UsageError(
            f"{devices[0]} is one device: nothing scales",
            fix="name two devices or more: --devices gpu:0,gpu:1, or two CPU ranks with --devices cpu,cpu",
        )
    check_steps(steps, warm_up)
    if repeats < 1:
        raise UsageError(f"{repeats} repeats measure nothing", fix="take --repeats 3, or any number from 1 on")
    report = _empty_report(subject, strategies, modes, {"steps": steps, "warm_up": warm_up, "repeats": repeats})
    points = [
        _point(subject, devices[:count], strategy, modes, report.settings)
        for count in device_counts(len(devices))
        for strategy in (strategies if count > 1 else (auto_strategy(1),))
    ]
    measured = [point for point in points if isinstance(point, Point)]
    refused = [row for point in points if not isinstance(point, Point) for row in point]
    with report.kept(), new_trials() as trials:
        for repeat, point in itertools.product(range(repeats), measured):
            if trials.stopped:
                break
            say(f"repeat {repeat + 1} of {repeats}: {point.ranks} device(s), {point.strategy}")
            point.rows.append(measure_all(subject, trials, point.cases)[0])
    report.rows += _rows(measured, subject.name if claims else None) + refused
    _conclude(report)
    report.notes += [note for point in measured for note in lost_repeats(point)]
    if claims and (note := claims_note(subject.name, base.facts.parameters)):
        report.notes.append(note)
    return report


def _empty_report(
    subject: Subject, strategies: Sequence[str], modes: Sequence[Mode], lengths: Mapping[str, int]
) -> BenchReport:
    base = subject.base
    on_cpu = base.placement.accelerator == "cpu"
    threads = base.config.training.threads or (1 if on_cpu else None)
    settings = {
        "devices": list(base.placement.devices),
        "strategies": list(strategies),
        "modes": list(modes),
        "batch_size": base.plan.batch.batch_size,
        "strong_global_batch": base.plan.batch.global_batch,
        "threads_per_rank": threads,
        **lengths,
    }
    report = BenchReport("scaling", subject.name, settings)
    if on_cpu:
        report.notes.append(f"each rank computes with {threads} thread(s); the ranks share one machine's memory")
    return report


def _point(
    subject: Subject,
    devices: Sequence[str],
    strategy: str,
    modes: Sequence[Mode],
    settings: Mapping[str, Any],
) -> Point | list[dict[str, Any]]:
    """What to measure; or rows that say why these devices refuse the strategy."""
    count, base = len(devices), subject.base.plan.batch
    samples: dict[Mode, int] = {"weak": base.batch_size * count, "strong": base.global_batch}
    # A pipeline's devices take part in the same micro-batches; others take one each.
    parts = FILL * count if find_strategy(strategy).state == "staged" else count
    sizes: dict[Mode, dict[str, Any]] = {
        mode: {"batch_size": -(-size // parts), "global_batch_size": size, "accumulate": 1}
        for mode, size in samples.items()
    }
    place = {"selected_devices": list(devices), "strategy": "auto" if count == 1 else strategy}
    label = {"devices": list(devices), "ranks": count, "strategy": strategy}
    try:
        cases = [
            subject.case(
                {**label, "mode": mode},
                {"hardware": place, "training": {**sizes[mode], "threads": settings["threads_per_rank"]}},
                steps=settings["steps"],
                warm_up=settings["warm_up"],
            )
            for mode in modes
        ]
    except LockstepError as error:
        return [{**label, "mode": mode, "status": "refused", "reason": str(error.what)} for mode in modes]
    return Point(count, strategy, cases)


def _rows(points: Sequence[Point], claimed: str | None) -> list[dict[str, Any]]:
    """A row for each point and mode, over its repeats; with what is claimed for the task ``claimed``."""
    rows = [row for point in points for row in _merged(point)]
    baselines = {row["mode"]: row["samples_per_s"] for row in rows if row["ranks"] == 1 and row["status"] == "ok"}
    for row in rows:
        if claimed is not None:
            row |= claim_of(claimed, row["strategy"], row["ranks"])
        if row["status"] == "ok" and row["mode"] in baselines:
            row["speed_up"], row["efficiency"] = speed_up(row["samples_per_s"], baselines[row["mode"]], row["ranks"])
    return rows


def lost_repeats(point: Point) -> Iterator[str]:
    """A note where some repeats of ``point`` failed and others did not: its rows are of fewer than were asked for."""
    failed = [row for rows in point.rows for row in rows if row["status"] != "ok"]
    if failed and any(row["status"] == "ok" for rows in point.rows for row in rows):
        yield (
            f"{point.ranks} device(s), {point.strategy}: {len(failed)} of {len(point.rows)} repeats ended early, the "
            f"first one {failed[0]['status']} ({failed[0]['reason']})"
        )


def _merged(point: Point) -> Iterator[dict[str, Any]]:
    for place, case in enumerate(point.cases):
        found = [rows[place] for rows in point.rows if len(rows) > place]
        good = [row for row in found if row["status"] == "ok"]
        if not good:
            yield from found[:1]
            continue
        rates = spread([row["samples_per_s"] for row in good])
        shares = {name: statistics.fmean(row["shares"][name] for row in good) for name in good[0]["shares"]}
        yield {
            **case.label,
            "status": "ok",
            "global_batch": case.plan.batch.global_batch,
            "accumulate": case.plan.batch.accumulate,
            "repeats": len(good),
            "samples_per_s": rates.median,
            "samples_per_s_low": rates.low,
            "samples_per_s_high": rates.high,
            "epoch_s": case.plan.task.train_samples / rates.median,
            "step_ms": statistics.median(row["step_ms"] for row in good),
            "memory_mb": max(row["memory_mb"] for row in good),
            "memory_mb_per_device": [max(peaks) for peaks in _each(good, "memory_mb_per_device")],
            "utilisation_per_device": [
                None if None in measured else statistics.fmean(measured)
                for measured in _each(good, "utilisation_per_device")
            ],
            "shares": _shares(point.strategy, shares),
            "parts": shares,
            "busy_ms": [statistics.median(own) for own in _each(good, "busy_ms")],
        }


def _each(rows: Sequence[Mapping[str, Any]], name: str) -> Iterator[tuple[Any, ...]]:
    """The values of ``name`` in all rows, for each device or rank."""
    return zip(*(row[name] for row in rows), strict=True)


def _shares(strategy: str, parts: Mapping[str, float]) -> dict[str, float | None]:
    """Input, computing, communication and waiting for slower ranks as shares of a step; ``None``: not known."""
    if find_strategy(strategy).exchanges_inside:
        return {"data": parts["data"], "compute": None, "communication": None, "wait": None}
    compute = sum(parts[name] for name in _COMPUTE)
    return {"data": parts["data"], "compute": compute, "communication": parts["communication"], "wait": parts["wait"]}


def _conclude(report: BenchReport) -> None:
    good = [row for row in report.rows if row["status"] == "ok" and "efficiency" in row]
    several = [row for row in good if row["ranks"] > 1]
    if not several:
        report.verdict = "nothing could be compared"
    else:
        most = max(row["ranks"] for row in several)
        parts = [
            f"{row['strategy']} {row['mode']}: {row['speed_up']:.2f} times one (efficiency {row['efficiency']:.0%})"
            for row in several
            if row["ranks"] == most
        ]
        report.verdict = f"{most} devices, {'; '.join(parts)}"
    for row in several:
        share = row["shares"]["communication"]
        if share is not None and share > MUCH_COMMUNICATION:
            report.notes.append(
                f"communication takes {share:.0%} of a step on {row['ranks']} devices ({row['strategy']}, "
                f"{row['mode']}), above {MUCH_COMMUNICATION:.0%}: larger batches or --grad-accum-steps make it rarer"
            )
        report.notes += [
            f"rank {rank} is slow on {row['ranks']} devices ({row['strategy']}, {row['mode']})"
            for rank in slow_ranks(row["busy_ms"])
            if share is not None
        ]
    inside = sorted({row["strategy"] for row in several if find_strategy(row["strategy"]).exchanges_inside})
    if inside:
        report.notes.append(
            f"{' and '.join(inside)}: communication is inside forward and backward, so its share is not known; "
            "compare the samples/s"
        )
    report.notes += _both_strategies(several)
    if any(row["efficiency"] > DOUBTFUL for row in several):
        report.notes.append(
            f"an efficiency above {DOUBTFUL:.0%} says that something else disturbed the measurement of one device: "
            "repeat it on an idle machine, with more --repeats and --steps"
        )
    unmeasured: Mapping[str, None] = dict.fromkeys(
        f"{row['ranks']} devices, {row['strategy']}: {row['status']} ({row['reason']})"
        for row in report.rows
        if row["status"] != "ok"
    )
    report.notes += unmeasured
    if any(find_strategy(row["strategy"]).scatters and row["status"] == "refused" for row in report.rows):
        report.notes.append("DP against DDP can be compared on GPUs only: torch's DataParallel does not run on a CPU")


def _both_strategies(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """DataParallel against DistributedDataParallel, where both were measured."""
    rates = {(row["ranks"], row["mode"], row["strategy"]): row["samples_per_s"] for row in rows}
    for (ranks, mode, strategy), rate in rates.items():
        other = rates.get((ranks, mode, "ddp"))
        if find_strategy(strategy).scatters and other:
            yield f"on {ranks} devices ({mode}) ddp reaches {other / rate:.2f} times the samples/s of dp"


class Claim(NamedTuple):
    """``memory_gb``: by GPU. ``None``: the guide does not say."""

    samples_per_s: float | None
    speed_up: float
    memory_gb: tuple[float, ...] | None = None


#: What guides to multi-GPU training claim for two of the built-in tasks, by task, strategy and number of GPUs.
#: They name no method, machine or spread. ``har``: "Performance Comparison" and "Memory Usage" of a guide to
#: DataParallel and DistributedDataParallel (20 epochs, batch size 32 per GPU). ``speech``: "Expected Speedup with
#: Multiple GPUs" and "Current Single GPU Performance" of a guide to multi-GPU training of an LMU recogniser (7.16
#: million parameters, 1.1 s for a batch of 16).
CLAIMS: dict[tuple[str, str, int], Claim] = {
    ("har", "single", 1): Claim(150, 1.0, (5,)),
    ("har", "dp", 2): Claim(250, 1.7, (8, 5)),
    ("har", "dp", 4): Claim(450, 3.0, (11, 5, 5, 5)),
    ("har", "ddp", 2): Claim(300, 2.0, (5, 5)),
    ("har", "ddp", 4): Claim(600, 4.0, (5, 5, 5, 5)),
    ("har", "ddp", 8): Claim(1100, 7.3),
    ("speech", "single", 1): Claim(16 / 1.1, 1.0),
    ("speech", "ddp", 2): Claim(None, 1.8),
    ("speech", "ddp", 4): Claim(None, 3.5),
    ("speech", "ddp", 8): Claim(None, 6.5),
}
#: Parameters of the model that a guide's figures are of.
PARAMETERS = {"har": 86_200_000, "speech": 7_160_000}


def claims_note(task: str, parameters: int) -> str | None:
    """What keeps claims and measured figures from being comparable."""
    claimed = PARAMETERS.get(task)
    if claimed is None:
        return f"nothing is claimed for {task}: the guides speak of {' and '.join(PARAMETERS)}"
    if 0.9 < parameters / claimed < 1.1:
        return None
    return (
        f"the claims are of a model of {claimed:,} parameters, the measured figures of one of {parameters:,}: "
        "their rates, speed-ups and memory are not comparable"
    )


def claim_of(task: str, strategy: str, devices: int) -> dict[str, object]:
    """Columns of a row: what is claimed for it; nothing where nothing is."""
    claim = CLAIMS.get((task, strategy, devices))
    return {} if claim is None else {f"claimed_{name}": value for name, value in claim._asdict().items()}
