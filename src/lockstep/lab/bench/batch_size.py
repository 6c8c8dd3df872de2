"""``bench batch-size``: the largest batch that the chosen ranks can take, found by trying.

Where a rank runs out of memory, its trial ends on all ranks, and the search continues with a smaller batch.
"""

from __future__ import annotations

from lockstep.errors import UsageError, many
from lockstep.lab.bench.measure import limit_memory, measure, memory_share
from lockstep.lab.bench.report import BenchReport, Say
from lockstep.lab.bench.timing import on_site
from lockstep.lab.bench.trials import Case, Subject, TrialRank, new_trials
from lockstep.planning import Plan

STEPS = 4
WARM_UP = 2
#: The search ends when the gap is this share of the batch.
RESOLUTION = 1 / 16
#: Share of the largest batch that is proposed: memory use differs between batches.
SAFETY = 0.9


def next_batch(fits: int, fails: int | None, max_batch: int) -> int | None:
    """Return the next batch: twice the largest that ``fits``, then between it and the smallest that ``fails``."""
    upper = fails if fails is not None else max_batch + 1
    if fits + 1 >= upper:
        return None
    if fails is None:
        return min(max(1, fits * 2), max_batch)
    if fits and fails - fits <= max(1, int(fits * RESOLUTION)):
        return None
    return (fits + fails) // 2


def bench_batch_size(
    subject: Subject, *, max_batch: int | None = None, memory_limit: int | None = None, say: Say = lambda line: None
) -> BenchReport:
    """Find the largest batch size per device, up to ``max_batch``.

    ``memory_limit``: bytes that each CPU rank may allocate in addition to its memory at the start; a GPU's limit is its
    memory.
    """
    base = subject.base
    devices = len(base.placement.devices)
    # Of a pipeline's micro-batches a device holds as many as there are devices, or with gpipe all of a step.
    accumulate = max(devices, base.plan.batch.accumulate) if base.plan.pipelined else 1
    available = max(1, base.plan.task.train_samples // (accumulate if base.plan.pipelined else devices))
    upper_limit = min(available, max_batch or available)
    if memory_limit is not None and base.placement.accelerator == "gpu":
        raise UsageError("--memory-limit is for CPU ranks", why="a GPU's memory is its limit", fix="leave it out")
    limit = memory_share(base.placement) if memory_limit is None else memory_limit
    settings = {
        "devices": list(base.placement.devices),
        "strategy": base.placement.strategy,
        "accumulate": accumulate,
        "max_batch": upper_limit,
        "memory_limit_mb": None if limit is None else limit / 1e6,
        "global_batch": base.plan.batch.global_batch,
    }
    report = BenchReport("batch-size", subject.name, settings)
    with report.kept():
        _search(report, subject, min(base.plan.batch.batch_size, upper_limit), upper_limit, limit, say)
    report.rows.sort(key=lambda row: row["batch_size"])
    _conclude(report, subject, upper_limit)
    return report


def _search(report: BenchReport, subject: Subject, first: int, upper_limit: int, limit: int | None, say: Say) -> None:
    """Run trials until the search is over; each resumes the search of the previous one."""
    fits = 0
    fails = None
    candidate: int | None = first
    with new_trials() as trials:
        while candidate is not None:
            say(f"batch {candidate}" + (" and larger" if fails is None else f", below {fails}"))
            sizes = {"batch_size": candidate, "global_batch_size": None, "accumulate": report.settings["accumulate"]}
            case = subject.case({}, {"training": sizes}, steps=STEPS, warm_up=WARM_UP)
            outcome = trials.run_case(search, case, candidate, fails, upper_limit, limit, task=subject.base.task)
            report.rows += outcome.rows
            if outcome.ended in ("done", "stopped"):
                break
            if outcome.rows:
                fits = outcome.rows[-1]["batch_size"]
                candidate = next_batch(fits, fails, upper_limit)
                assert candidate is not None, "a trial that failed was trying something"
            report.rows.append({"batch_size": candidate, "status": outcome.ended, "reason": outcome.error})
            if outcome.ended == "failed":
                break
            fails = candidate
            candidate = next_batch(fits, fails, upper_limit)


def search(rank: TrialRank, case: Case, candidate: int, fails: int | None, upper_limit: int, limit: int | None) -> None:
    """Try one batch after the other on a rank until the search is over or this process is."""
    with on_site(rank, case.config, case.plan) as site:
        if limit is not None:
            limit_memory(limit)
        size: int | None = candidate
        while size is not None:
            row = measure(site, Case({}, case.config, _with_batch(case.plan, size), case.warm_up))
            rank.report(
                {"batch_size": size, "status": "ok", **{key: row[key] for key in ("memory_mb", "samples_per_s")}}
            )
            size = next_batch(size, fails, upper_limit)


def _with_batch(plan: Plan, size: int) -> Plan:
    """Return ``plan`` with another batch size per device; an epoch may have a single step then."""
    micro_batches = plan.batch.accumulate * plan.batch.ranks * plan.batch.devices_per_rank
    batch = plan.batch.model_copy(update={"batch_size": size, "global_batch": size * micro_batches})
    pre_scale = 2.0 ** -(batch.global_batch.bit_length() - 1)
    return plan.model_copy(update={"batch": batch, "epochs": plan.total_steps, "pre_scale": pre_scale})


def _conclude(report: BenchReport, subject: Subject, upper_limit: int) -> None:
    by_status: dict[str, list[int]] = {}
    for row in report.rows:
        by_status.setdefault(row["status"], []).append(row["batch_size"])
        if row["status"] == "failed":
            report.notes.append(f"batch {row['batch_size']} failed for another reason: {row['reason']}")
    largest = by_status.get("ok")
    too_large = by_status.get("out of memory")
    early = "failed" in by_status
    early |= report.partial
    if not largest:
        advice = "no batch fits: use a smaller model, or devices with more memory"
        report.verdict = "nothing could be measured" if early else advice
        return
    limit = "the search ended early" if early else f"{upper_limit} was the limit of the search"
    limit = f"{too_large[0]} is too large" if too_large else limit
    # The tail of the training, since the global batch may be larger than the data set, which `drop` refuses.
    proposed = max(1, int(largest[-1] * SAFETY)) if too_large else largest[-1]
    global_batch = subject.base.plan.batch.global_batch
    tail = subject.base.config.training.tail
    sizes = {"batch_size": proposed, "global_batch_size": global_batch, "accumulate": 1, "tail": tail}
    batch = subject.prepared({"training": sizes}).plan.batch
    report.extra = {
        "largest": largest[-1],
        "proposed": {
            "batch_size": batch.batch_size,
            "accumulate": batch.accumulate,
            "global_batch_size": batch.global_batch,
        },
    }
    report.verdict = (
        f"the largest batch per device is {largest[-1]}; {limit}. "
        f"For a global batch of {global_batch}: batch size {batch.batch_size} × "
        f"{many(batch.accumulate, 'micro-batch')} on {many(len(report.settings['devices']), 'device')}: "
        f"--global-batch-size {global_batch} --batch-size {batch.batch_size}"
    )
