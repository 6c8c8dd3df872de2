"""``bench loader``: how fast the data comes with 0, 1, 2, … workers, against what the training step needs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lockstep.bench.measure import Case, Site, measure, on_site, requests_of
from lockstep.bench.rank import Rank
from lockstep.bench.report import BenchReport
from lockstep.bench.subject import Subject
from lockstep.bench.trials import new_trials
from lockstep.data.loader import make_loader
from lockstep.engine.source import training_source
from lockstep.engine.strategy import to_device
from lockstep.hardware.host import usable_cores
from lockstep.plan import LoaderPlan, Plan

#: Data should come this much faster than the step takes it, so that a slow batch does not stop it.
HEADROOM = 1.2
#: Rates closer than this are the same.
CLOSE = 0.95
WARM_UP, STEPS = 3, 12
#: Batches at most for each worker count.
BATCHES = 400


class Recommendation(NamedTuple):
    """``bound``: what limits training with this setting."""

    num_workers: int
    bound: str
    reason: str


def recommend(rates: Mapping[int, float], demand: float) -> Recommendation:
    """How many loader processes to use, and why: the fewest that keep up with the step, else the fastest.

    Args:
        rates: samples per second by number of workers; at least one.
        demand: samples per second that the step would take if it never waited.
    """
    enough = [workers for workers, rate in sorted(rates.items()) if rate >= HEADROOM * demand]
    if enough:
        few = enough[0]
        return Recommendation(
            few,
            "compute",
            f"{few} worker(s) load {rates[few]:,.0f} samples/s, and the step takes at most {demand:,.0f}: more would "
            "only take cores from it",
        )
    fastest = max(rates.values())
    best = min(workers for workers, rate in rates.items() if rate >= CLOSE * fastest)
    if rates[best] >= demand:
        bound, end = "compute", f"just enough for the step's {demand:,.0f}"
    else:
        bound, end = (
            "data",
            f"less than the step's {demand:,.0f}: training waits for data {1 - rates[best] / demand:.0%}",
        )
    return Recommendation(best, bound, f"no count is faster: {best} worker(s) load {rates[best]:,.0f} samples/s, {end}")


def worker_counts(cores: int) -> list[int]:
    """0, 1, 2, 4, … up to ``cores``, and ``cores`` itself."""
    return sorted({0, cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)})


def bench_loader(
    subject: Subject,
    *,
    workers: Sequence[int] | None = None,
    seconds: float = 2.0,
    say: Callable[[str], None] = lambda line: None,
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
    held = {"training": {"batch_size": base.plan.batch.batch_size, "global_batch_size": None, "accumulate": 1}}
    step = subject.case({}, {**one, **held}, steps=STEPS, warm_up=WARM_UP)
    endless = step.plan.model_copy(update={"epochs": BATCHES})
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
        },
    )
    with report.kept(), new_trials() as trials:
        say(f"workers: {', '.join(map(str, counts))}")
        outcome = trials.run(
            measure_loader,
            *(step, endless, counts, seconds),
            ranks=1,
            config=step.config,
            task=base.task,
            threads=step.plan.threads,
        )
        demands = [row["demand"] for row in outcome.rows if "demand" in row]
        report.rows += [{**row, "status": "ok"} for row in outcome.rows if "demand" not in row]
        if outcome.ended in {"out of memory", "failed"}:
            failed = counts[min(len(report.rows), len(counts) - 1)]
            report.rows.append({"num_workers": failed, "status": outcome.ended, "reason": outcome.error})
            report.notes.append(f"{failed} workers: {outcome.ended} ({outcome.error})")
        _conclude(report, demands[0] if demands else None)
        if outcome.ended == "stopped":
            raise KeyboardInterrupt
    return report


def _conclude(report: BenchReport, demand: float | None) -> None:
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


def measure_loader(rank: Rank, step: Case, endless: Plan, counts: Sequence[int], seconds: float) -> None:
    """On a rank: first what the step needs, then the rate of each number of workers."""
    with on_site(rank, step.config, step.plan) as site:
        row = measure(site, step)
        needed = row["mean_ms"] - row["parts_ms"]["data"]
        rank.report({"demand": step.plan.batch.global_batch / needed * 1e3})
        for workers in counts:
            rank.report({"num_workers": workers, **_rate(site, endless, workers, seconds)})


def _rate(site: Site, plan: Plan, workers: int, seconds: float) -> dict[str, Any]:
    """Load for about ``seconds``, after the first batch, whose workers have to start."""
    how = LoaderPlan(
        num_workers=workers,
        prefetch_factor=plan.loader.prefetch_factor,
        persistent_workers=workers > 0,
        pin_memory=plan.loader.pin_memory,
    )
    world = site.rank.world
    loader = make_loader(
        training_source(site.task, site.datasets.train, plan), requests_of(plan, world), how, world.rank
    )
    sizes = [request.size for request, _ in zip(requests_of(plan, world), range(BATCHES), strict=False)]
    started = time.perf_counter()
    first, samples, transfers, loaded = 0.0, 0, [], 0
    with contextlib.closing(loader):
        for batch, size in zip(iter(loader), sizes, strict=False):
            site.rank.check()
            now = time.perf_counter()
            if not first:
                first, started = now - started, now
                continue
            samples, loaded = samples + size, loaded + 1
            if loaded <= 10 and site.device.type == "cuda":
                transfers.append(_transfer(batch, site.device))
            if now - started > seconds:
                break
        taken = time.perf_counter() - started - sum(transfers)
    return {
        "samples_per_s": samples / taken if taken > 0 else 0.0,
        "load_ms": taken / max(1, loaded) * 1e3,
        "transfer_ms": statistics.median(transfers) * 1e3 if transfers else None,
        "first_batch_s": first,
        "batches": loaded,
    }


def _transfer(batch: Any, device: torch.device) -> float:
    """Seconds to bring a batch to a GPU."""
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    to_device(batch, device)
    torch.cuda.synchronize(device)
    return time.perf_counter() - started
