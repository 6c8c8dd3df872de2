"""``bench batch-size``: the largest batch that the chosen ranks can take, found by trying.

Trials run in separate processes. Where a rank runs out of memory, its trial ends on all ranks, and the search
continues with a smaller batch.
"""

from __future__ import annotations

from lockstep.bench.measure import measure
from lockstep.bench.rank import Rank, limit_memory, memory_share
from lockstep.bench.report import BenchReport, Say
from lockstep.bench.timing import on_site
from lockstep.bench.trials import Case, Subject, new_trials
from lockstep.errors import UsageError, many
from lockstep.planning import BatchPlan, Plan

STEPS, WARM_UP = 4, 2
#: The search ends when the gap is this share of the batch.
RESOLUTION = 1 / 16
#: Share of the largest batch that is proposed: memory use differs between batches.
SAFETY = 0.9


def next_batch(fits: int, fails: int | None, most: int) -> int | None:
    """The batch to try next: twice the largest that fits, then between it and the smallest that does not.

    Args:
        fits: the largest batch known to fit; 0 for none.
        fails: the smallest known to be too large.
        most: never try more.

    Returns:
        ``None`` when the search is over.
    """
    upper = fails if fails is not None else most + 1
    if fits + 1 >= upper:
        return None
    if fails is None:
        return min(max(1, fits * 2), most)
    if fits and fails - fits <= max(1, int(fits * RESOLUTION)):
        return None
    return (fits + fails) // 2


def bench_batch_size(
    subject: Subject, *, max_batch: int | None = None, memory_limit: int | None = None, say: Say = lambda line: None
) -> BenchReport:
    """Find the largest batch size per device.

    Args:
        max_batch: try no larger one; ``None``: what the data set has for each device.
        memory_limit: bytes that each CPU rank may allocate for the training, beside what it has when it starts;
            ``None``: a share of the free memory. On GPUs the device is the limit.

    Raises:
        UsageError: settings that contradict each other.
    """
    base = subject.base
    devices = len(base.placement.devices)
    # Of a pipeline's micro-batches a device holds as many as there are devices, or with gpipe all of a step.
    accumulate = max(devices, base.plan.batch.accumulate) if base.plan.pipelined else 1
    available = max(1, base.plan.task.train_samples // (accumulate if base.plan.pipelined else devices))
    most = min(available, max_batch or available)
    if memory_limit is not None and base.placement.accelerator == "gpu":
        raise UsageError("--memory-limit is for CPU ranks", why="a GPU's limit is its own memory", fix="leave it out")
    limit = memory_share(base.placement) if memory_limit is None else memory_limit
    report = BenchReport(
        "batch-size",
        subject.name,
        {
            "devices": list(base.placement.devices),
            "strategy": base.placement.strategy,
            "accumulate": accumulate,
            "max_batch": most,
            "memory_limit_mb": None if limit is None else limit / 1e6,
            "global_batch": base.plan.batch.global_batch,
        },
    )
    with report.kept():
        _search(report, subject, min(base.plan.batch.batch_size, most), most, limit, say)
    _conclude(report, subject, most)
    return report


def _search(report: BenchReport, subject: Subject, first: int, most: int, limit: int | None, say: Say) -> None:
    """Trials until the search is over; each begins where the one before was ended."""
    fits, fails = 0, None
    with new_trials() as trials:
        candidate: int | None = first
        while candidate is not None:
            say(f"batch {candidate}" + (" and larger" if fails is None else f", below {fails}"))
            sizes = {"batch_size": candidate, "global_batch_size": None, "accumulate": report.settings["accumulate"]}
            case = subject.case({}, {"training": sizes}, steps=STEPS, warm_up=WARM_UP)
            outcome = trials.run_case(search, case, candidate, fits, fails, most, limit, task=subject.base.task)
            for row in outcome.rows:
                report.rows.append({**row, "status": "ok"})
                fits = max(fits, row["batch_size"])
            if outcome.ended in ("done", "stopped"):
                break
            tried = next_batch(fits, fails, most) if outcome.rows else candidate
            assert tried is not None, "a trial that failed was trying something"
            report.rows.append({"batch_size": tried, "status": outcome.ended, "reason": outcome.error})
            if outcome.ended == "failed":
                break
            fails = tried
            candidate = next_batch(fits, fails, most)


def search(rank: Rank, case: Case, candidate: int, fits: int, fails: int | None, most: int, limit: int | None) -> None:
    """On a rank: try one batch after the other until the search is over or this process is."""
    with on_site(rank, case.config, case.plan) as site:
        if limit is not None:
            limit_memory(limit)
        size: int | None = candidate
        while size is not None:
            row = measure(site, Case({}, case.config, _with_batch(case.plan, size), case.warm_up))
            rank.report({"batch_size": size, "memory_mb": row["memory_mb"], "samples_per_s": row["samples_per_s"]})
            fits = size
            size = next_batch(fits, fails, most)


def _with_batch(plan: Plan, size: int) -> Plan:
    """``plan`` with another batch size per device; an epoch may have a single step then."""
    micro_batches = plan.batch.accumulate * plan.batch.ranks * plan.batch.devices_per_rank
    batch = plan.batch.model_copy(update={"batch_size": size, "global_batch": size * micro_batches})
    return plan.model_copy(
        update={"batch": batch, "epochs": plan.total_steps, "pre_scale": 2.0 ** -(batch.global_batch.bit_length() - 1)}
    )


def _conclude(report: BenchReport, subject: Subject, most: int) -> None:
    report.rows.sort(key=lambda row: row["batch_size"])
    largest = max((row["batch_size"] for row in report.rows if row["status"] == "ok"), default=0)
    failed = [row for row in report.rows if row["status"] == "failed"]
    report.notes += [f"batch {row['batch_size']} failed for another reason: {row['reason']}" for row in failed]
    if not largest:
        tried = not failed and not report.partial
        report.verdict = (
            "no batch fits: use a smaller model, or devices with more memory" if tried else "nothing could be measured"
        )
        return
    out = [row["batch_size"] for row in report.rows if row["status"] == "out of memory"]
    if out:
        limit = f"; {min(out)} is too large"
    else:
        limit = "; the search ended early" if failed or report.partial else f"; {most} was the limit of the search"
    wanted = subject.base.plan.batch.global_batch
    proposed = max(1, int(largest * SAFETY)) if out else largest
    batch = propose(subject, proposed, wanted)
    report.extra = {
        "largest": largest,
        "proposed": {
            "batch_size": batch.batch_size,
            "accumulate": batch.accumulate,
            "global_batch_size": batch.global_batch,
        },
    }
    report.verdict = (
        f"the largest batch per device is {largest}{limit}. For a global batch of {wanted}: batch size "
        f"{batch.batch_size} × {many(batch.accumulate, 'micro-batch')} on "
        f"{many(len(report.settings['devices']), 'device')}: "
        f"--global-batch-size {wanted} --batch-size {batch.batch_size}"
    )


def propose(subject: Subject, batch_size: int, global_batch: int) -> BatchPlan:
    """How the plan shares a global batch when no micro-batch is larger than ``batch_size``."""
    # The training's own tail: a wanted batch may be larger than the data set, which `drop`, as in trials, refuses.
    sizes = {"batch_size": batch_size, "global_batch_size": global_batch, "accumulate": 1}
    return subject.prepared({"training": {**sizes, "tail": subject.base.config.training.tail}}).plan.batch
