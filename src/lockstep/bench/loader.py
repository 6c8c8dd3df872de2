"""``bench loader``: how fast the data comes with 0, 1, 2, … workers, against what the training step needs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal

import torch

from lockstep.bench.measure import measure
from lockstep.bench.rank import Rank
from lockstep.bench.report import BenchReport, Say
from lockstep.bench.timing import on_site
from lockstep.bench.trials import Case, Outcome, Subject, new_trials
from lockstep.data.loader import make_loader
from lockstep.data.requests import Source
from lockstep.engine.distributed.staging import finish, to_device
from lockstep.engine.training_data import training_source, walk
from lockstep.hardware.host import usable_cores
from lockstep.hardware.world import World
from lockstep.planning import Plan
from lockstep.planning.loader import CLOSE, recommend, worker_counts

WARM_UP, STEPS = 3, 12
#: More epochs than a measurement reads.
EPOCHS = 100_000


def bench_loader(
    subject: Subject, *, workers: Sequence[int] | None = None, seconds: float = 2.0, say: Say = lambda line: None
) -> BenchReport:
    """Measure the input of one rank, for each number of workers.

    Args:
        workers: which numbers; ``None``: 0, 1, 2, 4, … up to the cores that each rank has.
        seconds: how long to load with each of them.
    """
    base = subject.base
    ranks = base.placement.world_size
    counts = list(workers) if workers is not None else worker_counts(max(1, usable_cores() // ranks))
    one = {"hardware": {"selected_devices": [base.placement.devices[0]], "strategy": "auto"}}
    planned, samples = base.plan.batch.batch_size, base.plan.task.train_samples
    held = {"training": {"batch_size": min(planned, samples), "global_batch_size": None, "accumulate": 1}}
    step = subject.case({}, {**one, **held}, steps=STEPS, warm_up=WARM_UP)
    endless = step.plan.model_copy(update={"epochs": EPOCHS})
    report = BenchReport(
        "loader",
        subject.name,
        {
            "device": base.placement.devices[0],
            "ranks": ranks,
            "batch_size": step.plan.batch.batch_size,
            "workers": counts,
            "seconds": seconds,
            "planned_workers": base.plan.loader.num_workers,
            "pin_memory": step.plan.loader.pin_memory,
        },
    )
    if samples < planned:
        report.notes.append(f"the data set has only {samples} samples for a batch of {planned}")
    with report.kept(), new_trials() as trials:
        say(f"workers: {', '.join(map(str, counts))}")
        outcome = trials.run_case(measure_loader, step, endless, counts, seconds, task=base.task)
        demands = [row["demand"] for row in outcome.rows if "demand" in row]
        report.rows += [{**row, "status": "ok"} for row in outcome.rows if "demand" not in row]
        if outcome.ended in {"out of memory", "failed"}:
            _blame(report, bool(demands), outcome)
        conclude(report, demands[0] if demands else None)
    return report


def _blame(report: BenchReport, step_is_known: bool, outcome: Outcome) -> None:
    """Say what was being measured when the trial ended: the step comes first, then each number of workers."""
    left = report.settings["workers"][len(report.rows) :] if step_is_known else []
    if left:
        report.rows.append({"num_workers": left[0], "status": outcome.ended, "reason": outcome.error})
    culprit = "after everything was measured" if step_is_known else "the step"
    report.notes.append(f"{f'{left[0]} workers' if left else culprit}: {outcome.ended} ({outcome.error})")


def holds_up(load_ms: float, transfer_ms: float, step_ms: float) -> Literal["load", "transfer", "compute"]:
    """What a step waits for, if each batch takes so long to load and to bring to the GPU, both beside the step before.

    Args:
        step_ms: of a step whose batch is loaded. Where the transfer is slower than the computing, it takes as long as
            the transfer.
    """
    if load_ms > max(step_ms, transfer_ms):
        return "load"
    return "transfer" if transfer_ms >= CLOSE * step_ms else "compute"


def conclude(report: BenchReport, demand: float | None) -> None:
    """The verdict of the report's rows.

    Args:
        demand: samples per second that the step would take if it never waited for its batch; ``None``: not measured.
    """
    rates = {row["num_workers"]: row["samples_per_s"] for row in report.rows if row["status"] == "ok"}
    if not rates or demand is None:
        report.verdict = "nothing could be measured"
        return
    for row in report.rows:
        if row["status"] == "ok":
            row["of_demand"] = row["samples_per_s"] / demand
    advice = recommend(rates, demand)
    planned = report.settings["planned_workers"]
    report.extra = {"demand_samples_per_s": demand, "recommended": advice._asdict()}
    report.verdict = f"use --num-workers {advice.num_workers}: {advice.reason}"
    report.notes.append(f"the plan takes {planned} for this task" + (", too" * (planned == advice.num_workers)))
    chosen = next(row for row in report.rows if row["num_workers"] == advice.num_workers)
    if chosen["transfer_ms"] is not None:
        _weigh_transfer(report, chosen["load_ms"], chosen["transfer_ms"], report.settings["batch_size"] / demand * 1e3)


def _weigh_transfer(report: BenchReport, load_ms: float, transfer_ms: float, step_ms: float) -> None:
    """Say whether loading or the transfer to the GPU holds the step up, and what to set."""
    pinned, found = report.settings["pin_memory"], holds_up(load_ms, transfer_ms, step_ms)
    report.extra["holds_up"] = found
    times = f"a batch takes {load_ms:.3g} ms to load and {transfer_ms:.3g} ms to the GPU, a step {step_ms:.3g} ms"
    if found == "transfer":
        fix = "smaller types that become floats on the GPU" if pinned else "--set data.pin_memory=true"
        report.verdict = f"the transfer holds the step up ({times}): {fix}. For loading, {report.verdict}"
    else:
        culprit = "loading holds the step up" if found == "load" else "neither holds the step up"
        report.notes.append(f"{times}: {culprit}")
        if not pinned:
            report.notes.append("data.pin_memory is off: the host waits for each copy to the GPU")


def measure_loader(rank: Rank, step: Case, endless: Plan, counts: Sequence[int], seconds: float) -> None:
    """On a rank: first what the step needs, then the rate of each number of workers."""
    with on_site(rank, step.config, step.plan) as site:
        row = measure(site, step)
        needed = row["mean_ms"] - row["parts_ms"]["data"]
        rank.report({"demand": step.plan.batch.global_batch / needed * 1e3})
        source = training_source(site.task, site.datasets, endless)
        for workers in counts:
            rank.report(loading_rate(source, endless, workers, seconds, device=site.device, check=rank.check))


def loading_rate(
    source: Source, plan: Plan, workers: int, seconds: float, *, device: torch.device, check: Callable[[], None]
) -> dict[str, Any]:
    """Load the batches of a single rank for about ``seconds``, after the first one, whose workers have to start.

    Args:
        device: where to bring some of the batches, to see how long that takes; only a GPU takes any time.
        check: called with every batch; may raise to end it.
    """
    how = plan.loader.model_copy(update={"num_workers": workers, "most_workers": 0, "persistent_workers": workers > 0})
    walks = (chain.from_iterable(window.requests for window in walk(plan, World())) for _ in range(2))
    loader = make_loader(source, next(walks), how, 0, largest=plan.batch.batch_size)
    first, samples, loaded, transfers = 0.0, 0, 0, list[float]()
    started = now = time.perf_counter()
    with contextlib.closing(loader):
        for batch, request in zip(loader, next(walks), strict=False):
            check()
            now = time.perf_counter()
            if not first:
                first, started = now - started, now
                continue
            samples, loaded = samples + request.size, loaded + 1
            if loaded <= 10 and device.type == "cuda":
                transfers.append(_transfer(batch, device))
            if now - started > seconds:
                break
        taken = time.perf_counter() - started - sum(transfers)
    return {
        "num_workers": workers,
        "samples_per_s": samples / taken if taken > 0 else 0.0,
        "load_ms": taken / max(1, loaded) * 1e3,
        "transfer_ms": statistics.median(transfers) * 1e3 if transfers else None,
        "first_batch_s": first,
        "batches": loaded,
    }


def _transfer(batch: Any, device: torch.device) -> float:
    """Seconds to bring a batch to a GPU."""
    finish(device)
    started = time.perf_counter()
    to_device(batch, device)
    finish(device)
    return time.perf_counter() - started
