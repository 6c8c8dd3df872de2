"""``bench scaling``: 1, 2, … N devices, with constant work for each device (weak) or in total (strong)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lockstep.arithmetic import ceil_div
from lockstep.errors import LockstepError, UsageError, many
from lockstep.lab.bench.measure import slow_ranks, spread
from lockstep.lab.bench.report import BenchReport, Say
from lockstep.lab.bench.step import MUCH_COMMUNICATION, RARER_MESSAGES, check_steps, measure_all
from lockstep.lab.bench.trials import Case, Subject, new_trials
from lockstep.planning.notes import BUSY_MICRO_BATCHES
from lockstep.strategies import auto_strategy, find_strategy

Mode = Literal["weak", "strong"]
#: An efficiency above this suggests a disturbed measurement (caches may give a little more than 1).
DOUBTFUL = 1.1
#: Parts of a step that are computation.
_COMPUTE = ("forward", "backward", "optimizer", "other")
#: Keys that are equal in all repeats of a point.
_SAME = ("devices", "ranks", "strategy", "mode", "status", "global_batch", "accumulate")


def device_counts(devices: int) -> list[int]:
    """Return the numbers of devices to measure: all up to 4, then powers of two, and ``devices``."""
    smallest = range(1, min(devices, 4) + 1)
    powers = [2**power for power in range(3, devices.bit_length()) if 2**power <= devices]
    return sorted({*smallest, *powers, devices})


def bench_scaling(
    subject: Subject,
    *,
    strategies: Sequence[str] = ("ddp",),
    modes: Sequence[Mode] = ("weak", "strong"),
    steps: int = 30,
    warm_up: int = 5,
    repeats: int = 3,
    say: Say = lambda line: None,
) -> BenchReport:
    """Measure steps of the engine on parts of the chosen devices, ``repeats`` times in turns.

    Every rank has one intra-op thread on the CPU unless ``training.threads`` is set, so that two ranks have twice
    the threads of one.
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
    on_cpu = base.placement.accelerator == "cpu"
    threads = base.config.training.threads or (1 if on_cpu else None)
    settings = {
        "devices": devices,
        "strategies": list(strategies),
        "modes": list(modes),
        "batch_size": base.plan.batch.batch_size,
        "strong_global_batch": base.plan.batch.global_batch,
        "threads_per_rank": threads,
        "steps": steps,
        "warm_up": warm_up,
        "repeats": repeats,
    }
    report = BenchReport("scaling", subject.name, settings)
    if on_cpu and threads:
        report.notes.append(f"each rank computes with {many(threads, 'thread')}; the ranks share one machine's memory")
    points: dict[tuple[int, str], list[Case]] = {}
    refused: list[dict[str, Any]] = []
    for count in device_counts(len(devices)):
        for strategy in strategies if count > 1 else (auto_strategy(1),):
            label = {"devices": devices[:count], "ranks": count, "strategy": strategy}
            try:
                points[count, strategy] = [_case(subject, {**label, "mode": mode}, settings) for mode in modes]
            except LockstepError as error:
                refused += [{**label, "mode": mode, "status": "refused", "reason": error.what} for mode in modes]
    rows: list[dict[str, Any]] = []
    with report.kept(), new_trials() as trials:
        for repeat, ((count, strategy), cases) in itertools.product(range(repeats), points.items()):
            say(f"repeat {repeat + 1} of {repeats}: {many(count, 'device')}, {strategy}")
            rows += measure_all(subject, trials, cases)
    report.rows = [*merged(rows, report.notes), *refused]
    conclude(report)
    return report


def _case(subject: Subject, label: Mapping[str, Any], settings: Mapping[str, Any]) -> Case:
    """Make the case of a point. Raises :class:`LockstepError` if the devices or the task refuse the strategy."""
    count = label["ranks"]
    strategy = label["strategy"]
    samples = settings["batch_size"] * count if label["mode"] == "weak" else settings["strong_global_batch"]
    # A pipeline's devices take part in the same micro-batches; others take one each.
    parts = BUSY_MICRO_BATCHES * count if find_strategy(strategy).state == "staged" else count
    sizes = {"batch_size": ceil_div(samples, parts), "global_batch_size": samples, "accumulate": 1}
    hardware = {"selected_devices": label["devices"], "strategy": "auto" if count == 1 else strategy}
    changes = {"hardware": hardware, "training": {**sizes, "threads": settings["threads_per_rank"]}}
    return subject.case(label, changes, steps=settings["steps"], warm_up=settings["warm_up"])


def merged(measurements: Sequence[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """Merge the measurements of all repeats to a row for each point and mode, compared with one device.

    Adds a note for each point whose repeats failed in part.
    """
    points: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in measurements:
        points.setdefault((row["ranks"], row["strategy"], row["mode"]), []).append(row)
    rows = []
    for (ranks, strategy, mode), repeats in points.items():
        good, failed = ([row for row in repeats if (row["status"] == "ok") is ok] for ok in (True, False))
        rows.append(_median(good) if good else failed[0])
        if good and failed:
            notes.append(
                f"{many(ranks, 'device')}, {strategy} {mode}: {len(failed)} of {len(repeats)} repeats ended early, the "
                f"first one {failed[0]['status']} ({failed[0]['reason']})"
            )
    baselines = {row["mode"]: row["samples_per_s"] for row in rows if row["ranks"] == 1 and row["status"] == "ok"}
    for row in rows:
        if row["status"] == "ok" and row["mode"] in baselines:
            # Of samples per second, for weak and strong scaling; efficiency is the contribution of each device.
            row["speed_up"] = row["samples_per_s"] / baselines[row["mode"]]
            row["efficiency"] = row["speed_up"] / row["ranks"]
    return rows


def _median(good: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row = {
        **{name: good[0][name] for name in _SAME},
        "repeats": len(good),
        **spread("samples_per_s", [row["samples_per_s"] for row in good]),
        **{name: statistics.median(row[name] for row in good) for name in ("epoch_s", "step_ms")},
    }

    def each(name: str) -> Iterator[tuple[Any, ...]]:
        """Return the values of ``name`` in all repeats, for each device or rank."""
        return zip(*(row[name] for row in good), strict=True)

    parts = {name: statistics.fmean(row["shares"][name] for row in good) for name in good[0]["shares"]}
    # Input, computing, communication and waiting for slower ranks as shares of a step; None: not known.
    shares = {"data": parts["data"], "compute": None, "communication": None, "wait": None}
    if not find_strategy(row["strategy"]).exchanges_inside:
        shares |= {"compute": sum(parts[name] for name in _COMPUTE)}
        shares |= {name: parts[name] for name in ("communication", "wait")}
    return {
        **row,
        "memory_mb": max(row["memory_mb"] for row in good),
        "memory_mb_per_device": [max(peaks) for peaks in each("memory_mb_per_device")],
        "shares": shares,
        "parts": parts,
        "busy_ms": [statistics.median(milliseconds) for milliseconds in each("busy_ms")],
    }


def conclude(report: BenchReport) -> None:
    notes = report.notes
    several = [row for row in report.rows if "efficiency" in row and row["ranks"] > 1]
    max_ranks = max((row["ranks"] for row in several), default=0)
    parts = [
        f"{row['strategy']} {row['mode']}: {row['speed_up']:.2f} times one (efficiency {row['efficiency']:.0%})"
        for row in several
        if row["ranks"] == max_ranks
    ]
    report.verdict = f"{max_ranks} devices, {'; '.join(parts)}" if several else "nothing could be compared"
    for row in several:
        share = row["shares"]["communication"]
        label = f"{row['ranks']} devices ({row['strategy']}, {row['mode']})"
        if share is None:
            notes.append(f"{label}: communication is inside forward and backward, so its share is not known")
            continue
        if share > MUCH_COMMUNICATION:
            notes.append(f"communication takes {share:.0%} of a step on {label}: {RARER_MESSAGES}")
        notes += [f"rank {rank} is slow on {label}" for rank in slow_ranks(row["busy_ms"])]
    if any(row["efficiency"] > DOUBTFUL for row in several):
        notes.append(
            f"an efficiency above {DOUBTFUL:.0%} says that something else disturbed the measurement of one device: "
            "repeat it on an idle machine, with more --repeats and --steps"
        )
    notes += dict.fromkeys(
        f"{row['ranks']} devices, {row['strategy']}: {row['status']} ({row['reason']})"
        for row in report.rows
        if row["status"] != "ok"
    )
