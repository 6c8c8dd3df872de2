"""``bench loader``: loading rate with 0, 1, 2, … workers, against the demand of the training step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from lockstep.data.loader import make_loader
from lockstep.data.requests import Source
from lockstep.engine.training_data import training_source, walk
from lockstep.errors import many
from lockstep.hardware.detect import usable_cores
from lockstep.hardware.world import World
from lockstep.lab.bench.measure import measure
from lockstep.lab.bench.report import BenchReport, Say
from lockstep.lab.bench.timing import on_site
from lockstep.lab.bench.trials import Case, Subject, TrialRank, new_trials
from lockstep.planning import Plan
from lockstep.planning.loader import CLOSE

WARM_UP = 3
STEPS = 12
#: More epochs than a measurement reads.
EPOCHS = 100_000
#: Minimum ratio of the loading rate to the rate of the step, so that a slow batch does not stop the step.
HEADROOM = 1.2


class Recommendation(NamedTuple):
    """``bound``: the bottleneck with this setting, ``compute`` or ``data``."""

    num_workers: int
    bound: str
    reason: str


def recommend(rates: Mapping[int, float], demand: float) -> Recommendation:
    """Recommend a number of loader processes: the fewest that keep up with the step, else the fastest.

    Args:
        rates: samples per second by number of workers.
        demand: samples per second of a step that never waits for data.
    """
    sufficient = [workers for workers, rate in sorted(rates.items()) if rate >= HEADROOM * demand]
    best = sufficient[0] if sufficient else min(n for n, rate in rates.items() if rate >= CLOSE * max(rates.values()))
    waits = max(0.0, 1 - rates[best] / demand)
    reason = f"{rates[best]:,.0f} samples/s with {many(best, 'worker')}, a step needs {demand:,.0f}"
    if waits:
        reason += f": training waits for data {waits:.0%} of the time, and no number is faster"
    return Recommendation(best, "data" if waits else "compute", reason)


def worker_counts(cores: int) -> list[int]:
    """Return 0, the powers of two up to ``cores``, and ``cores``."""
    return sorted({0, cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)})


def bench_loader(
    subject: Subject, *, workers: Sequence[int] | None = None, seconds: float = 2.0, say: Say = lambda line: None
) -> BenchReport:
    """Measure the input of one rank for about ``seconds`` with each number of ``workers``."""
    base = subject.base
    ranks = base.placement.world_size
    counts = list(workers) if workers is not None else worker_counts(max(1, usable_cores() // ranks))
    planned = base.plan.batch.batch_size
    samples = base.plan.task.train_samples
    first_device = {"selected_devices": [base.placement.devices[0]], "strategy": "auto"}
    sizes = {"batch_size": min(planned, samples), "global_batch_size": None, "accumulate": 1}
    step = subject.case({}, {"hardware": first_device, "training": sizes}, steps=STEPS, warm_up=WARM_UP)
    settings = {
        "device": base.placement.devices[0],
        "ranks": ranks,
        "batch_size": step.plan.batch.batch_size,
        "workers": counts,
        "seconds": seconds,
        "planned_workers": base.plan.loader.num_workers,
    }
    report = BenchReport("loader", subject.name, settings)
    if samples < planned:
        report.notes.append(f"the data set has only {samples} samples for a batch of {planned}")
    with report.kept(), new_trials() as trials:
        say(f"workers: {', '.join(map(str, counts))}")
        outcome = trials.run_case(measure_loader, step, counts, seconds, task=base.task)
        report.rows = [{**row, "status": "ok"} for row in outcome.rows if "demand" not in row]
        demand = next((row["demand"] for row in outcome.rows if "demand" in row), None)
        if outcome.error:  # the step is measured first, then each number of workers
            left = counts[len(report.rows) :] if demand is not None else []
            culprit = f"{left[0]} workers" if left else "after everything was measured" if demand else "the step"
            report.notes.append(f"{culprit}: {outcome.ended} ({outcome.error})")
            report.rows += [{"num_workers": n, "status": outcome.ended, "reason": outcome.error} for n in left[:1]]
        conclude(report, demand)
    return report


def conclude(report: BenchReport, demand: float | None) -> None:
    """Write the verdict; ``demand``: samples per second of a step that never waits; ``None``: not measured."""
    measured = {row["num_workers"]: row for row in report.rows if row["status"] == "ok"}
    if not measured or demand is None:
        report.verdict = "nothing could be measured"
        return
    for row in measured.values():
        row["of_demand"] = row["samples_per_s"] / demand
    advice = recommend({workers: row["samples_per_s"] for workers, row in measured.items()}, demand)
    planned = report.settings["planned_workers"]
    report.extra = {"demand_samples_per_s": demand, "recommended": advice._asdict()}
    report.verdict = f"use --num-workers {advice.num_workers}: {advice.reason}"
    report.notes.append(f"the plan takes {planned} for this task" + (", too" * (planned == advice.num_workers)))


def measure_loader(rank: TrialRank, step: Case, counts: Sequence[int], seconds: float) -> None:
    """Measure as one rank: first the demand of the step, then the rate of each number of workers."""
    with on_site(rank, step.config, step.plan) as site:
        row = measure(site, step)
        needed = row["mean_ms"] - row["parts_ms"]["data"]
        rank.report({"demand": step.plan.batch.global_batch / needed * 1e3})
        endless = step.plan.model_copy(update={"epochs": EPOCHS})
        source = training_source(site.task, site.datasets, endless)
        for workers in counts:
            rank.report(loading_rate(source, endless, workers, seconds, check=rank.check))


def loading_rate(
    source: Source, plan: Plan, workers: int, seconds: float, *, check: Callable[[], None]
) -> dict[str, Any]:
    """Load the batches of a single rank for about ``seconds``, after the first batch, which waits for the workers."""
    loader_plan = plan.loader.model_copy(update={"num_workers": workers, "most_workers": 0})
    walks = (chain.from_iterable(window.requests for window in walk(plan, World())) for _ in range(2))
    loader = make_loader(source, next(walks), loader_plan, 0, largest=plan.batch.batch_size)
    first = 0.0
    samples = 0
    loaded = 0
    started = now = time.perf_counter()
    with contextlib.closing(loader):
        for _, request in zip(loader, next(walks), strict=False):
            check()
            now = time.perf_counter()
            if not first:
                first = now - started
                started = now
                continue
            samples = samples + request.size
            loaded = loaded + 1
            if now - started > seconds:
                break
        taken = time.perf_counter() - started
    return {
        "num_workers": workers,
        "samples_per_s": samples / taken if taken > 0 else 0.0,
        "load_ms": taken / max(1, loaded) * 1e3,
        "first_batch_s": first,
        "batches": loaded,
    }
