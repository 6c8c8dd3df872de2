"""``bench step``: where the time and memory of a training step go, by batch size, precision and compilation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lockstep.bench.measure import measure_cases
from lockstep.bench.rank import memory_share
from lockstep.bench.report import BenchReport, Say
from lockstep.bench.summary import slow_ranks
from lockstep.bench.trials import Case, Subject, Trials, new_trials
from lockstep.errors import UsageError, many
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.peaks import peak_flops
from lockstep.strategies import find_strategy

#: In this order; ``tf32`` is precision 32 whose matrix products may use TF32.
PRECISIONS = ("32", "tf32", "bf16-mixed", "bf16-true", "16-mixed")
#: Share of a step from which communication is worth a word.
MUCH_COMMUNICATION = 0.1


def bench_step(
    subject: Subject,
    *,
    steps: int = 30,
    warm_up: int = 5,
    max_batch: int | None = None,
    precisions: Sequence[str] | None = None,
    compile: bool = False,
    say: Say = lambda line: None,
) -> BenchReport:
    """Measure steps of the engine's own loop on the chosen devices.

    Args:
        steps, warm_up: optimizer steps of each case, and those before them that do not count.
        max_batch: double the batch size up to this one, or until memory runs out; ``None``: only the plan's own.
        precisions: of :data:`PRECISIONS`; ``None``: the configured one.
        compile: measure each case with ``torch.compile``, too.
        say: called with a description of what is measured next.

    Raises:
        UsageError: settings that contradict each other.
    """
    base = subject.base
    own = base.placement.precision
    own = "tf32" if own == "32" and base.plan.value("matmul_precision") == "high" else own
    chosen = tuple(precisions or (own,))
    unknown = [name for name in chosen if name not in PRECISIONS]
    if unknown:
        raise UsageError(f"there is no precision {unknown[0]}", fix=f"choose of {', '.join(PRECISIONS)}")
    check_steps(steps, warm_up)
    accumulate, room = _room(subject)
    batches = batch_sizes(base.plan.batch.batch_size, max_batch, room)
    report = BenchReport(
        "step",
        subject.name,
        {
            "devices": list(base.placement.devices),
            "strategy": base.placement.strategy,
            "threads": base.plan.threads,
            "steps": steps,
            "warm_up": warm_up,
            "batch_sizes": batches,
            "accumulate": accumulate,
            "precisions": list(chosen),
            "compile": compile,
        },
    )
    if batches[0] < base.plan.batch.batch_size or accumulate < base.config.training.accumulate:
        report.notes.append(
            f"the data set fills only {many(accumulate, 'micro-batch')} of {batches[0]} for each device"
        )
    cases = _cases(report, subject)
    with report.kept(), new_trials() as trials:
        limit = memory_share(base.placement) if max_batch is not None else None
        _measure_upwards(report, subject, trials, cases, limit, say)
    report.rows.sort(key=lambda row: (PRECISIONS.index(row["precision"]), row["compile"], row["batch_size"]))
    _conclude(report, max_batch)
    return report


def _cases(report: BenchReport, subject: Subject) -> list[Case]:
    """What to measure, by precision and compilation; ``report`` gets a row for each that these devices do not have."""
    settings, compiled = report.settings, subject.base.config.training.compile
    cases = []
    for precision in settings["precisions"]:
        reason = skipped(precision, subject.base.placement.accelerator, subject)
        for on in (False, True) if settings["compile"] else (compiled,):
            label = {"precision": precision, "compile": on}
            if reason:
                row = {**label, "batch_size": settings["batch_sizes"][0], "status": "skipped", "reason": reason}
                report.rows.append(row)
                report.notes.append(f"{precision} was skipped: {reason}")
                continue
            cases += [_case(subject, {"batch_size": batch, **label}, settings) for batch in settings["batch_sizes"]]
    return cases


def check_steps(steps: int, warm_up: int) -> None:
    """Raises :class:`UsageError` for numbers of steps that show nothing."""
    if steps < 2 or warm_up < 1:
        raise UsageError(
            f"{steps} steps after {warm_up} for warming up show nothing",
            why="a median needs at least 2 steps after a first one, which is never like the others",
            fix="take --steps 30 --warm-up 5, or more",
        )


def batch_sizes(first: int, most: int | None, samples: int) -> list[int]:
    """``first``, doubled up to ``most`` and to the ``samples`` that there are for each device."""
    found = [min(first, max(1, samples))]
    while most is not None and found[-1] * 2 <= min(most, samples):
        found.append(found[-1] * 2)
    return found


def skipped(precision: str, accelerator: str, subject: Subject) -> str:
    """Why this precision is not measured here; empty when it is."""
    if precision == "32":
        return ""
    if precision == "16-mixed" and accelerator == "cpu":
        return "CPUs have no fast arithmetic for it: torch emulates it"
    if precision == "tf32":
        if accelerator == "cpu":
            return "TF32 is a format of GPUs"
        name = _gpu_name(subject)
        known, with_tf32 = peak_flops(name, "32")[0], peak_flops(name, "32", tf32=True)[0]
        return f"{name} has no TF32" if known is not None and known == with_tf32 else ""
    names = set(subject.base.placement.devices)
    lacking = [d.id for d in detect_devices() if d.id in names and precision not in d.precisions]
    return f"{lacking[0]} does not compute in it" if lacking else ""


def measure_all(
    subject: Subject,
    trials: Trials,
    cases: Sequence[Case],
    *,
    memory_limit: int | None = None,
    counts_flops: bool = False,
) -> tuple[list[dict[str, Any]], str]:
    """Rows of ``cases`` from one trial, each with its ``status``; and how the trial ended.

    The row of the case that failed says why; cases after it have no row.
    """
    first, *others = cases
    outcome = trials.run_case(measure_cases, first, others, memory_limit, counts_flops, task=subject.base.task)
    rows = [{**row, "status": "ok"} for row in outcome.rows]
    if outcome.ended not in {"done", "stopped"} and len(rows) < len(cases):
        rows.append({**cases[len(rows)].label, "status": outcome.ended, "reason": outcome.error})
    return rows, outcome.ended


def _measure_upwards(
    report: BenchReport, subject: Subject, trials: Trials, cases: Sequence[Case], limit: int | None, say: Say
) -> None:
    """All cases, growing batches of each kind; one that fails ends its trial and the larger ones of its kind."""
    left = list(cases)
    while left and not trials.stopped:
        say("; ".join(_in_words(kind, list(group)) for kind, group in groupby(left, key=_kind)))
        rows, ended = measure_all(subject, trials, left, memory_limit=limit, counts_flops=True)
        report.rows += [_with_speed(row, subject) for row in rows]
        done, left = left[: len(rows)], left[len(rows) :]
        if ended != "done":
            left = [case for case in left if _kind(case) != _kind(done[-1])]


def _kind(case: Case) -> tuple[str, bool]:
    return case.label["precision"], case.label["compile"]


def _in_words(kind: tuple[str, bool], cases: Sequence[Case]) -> str:
    batches = ", ".join(str(case.label["batch_size"]) for case in cases)
    return f"precision {kind[0]}{', compiled' * kind[1]}: batch {batches}"


def _case(subject: Subject, label: dict[str, Any], settings: dict[str, Any]) -> Case:
    hardware = {"precision": label["precision"]}
    if label["precision"] in ("32", "tf32"):
        hardware["matmul_precision"] = "high" if label["precision"] == "tf32" else "highest"
    sizes = {"batch_size": label["batch_size"], "global_batch_size": None, "accumulate": settings["accumulate"]}
    changes = {"training": {**sizes, "compile": label["compile"]}, "hardware": hardware}
    return subject.case(label, changes, steps=settings["steps"], warm_up=settings["warm_up"])


def _with_speed(row: dict[str, Any], subject: Subject) -> dict[str, Any]:
    """``row`` with FLOP/s and their share of the devices' peak; ``None`` and the reason where it is not known."""
    flops = row.pop("flops_per_step", None)
    if flops is None:
        return {**row, "tflops": None, "peak_share": None}
    rate = flops / (row["step_ms"] / 1e3)
    name = _gpu_name(subject)
    half = "32" if row["precision"] == "tf32" else row["precision"]
    peak, source = peak_flops(name, half, tf32=row["precision"] == "tf32")
    devices = len(set(subject.base.placement.devices))  # a device with two ranks is not faster
    share = None if peak is None else rate / (peak * devices)
    return {**row, "tflops": rate / 1e12, "peak_share": share, "peak_source": source}


def _room(subject: Subject) -> tuple[int, int]:
    """Micro-batches of a step, as set, and the largest batch per device of which the data set fills a whole step."""
    base = subject.base
    share = max(1, base.plan.task.train_samples // (base.plan.batch.ranks * base.plan.batch.devices_per_rank))
    accumulate = min(base.config.training.accumulate, share)
    return accumulate, share // accumulate


def _gpu_name(subject: Subject) -> str:
    first = subject.base.placement.devices[0]
    return next((device.name for device in detect_devices() if device.id == first), first)


def _conclude(report: BenchReport, max_batch: int | None) -> None:
    measured = [row for row in report.rows if row["status"] == "ok"]
    if not measured:
        report.verdict = "nothing could be measured"
    else:
        best = max(measured, key=lambda row: row["samples_per_s"])
        part, share = max(best["shares"].items(), key=lambda item: item[1])
        compiled = ", compiled" if best["compile"] else ""
        report.verdict = (
            f"most samples/s: {best['samples_per_s']:,.0f} with batch {best['batch_size']} in precision "
            f"{best['precision']}{compiled}; {part} takes {share:.0%} of that step"
        )
        shares, strategy = best["shares"], report.settings["strategy"]
        inside = find_strategy(strategy).exchanges_inside
        if inside:
            report.notes.append(f"{strategy}: most of its communication is inside forward and backward")
        elif shares["communication"] + shares["wait"] > MUCH_COMMUNICATION:
            report.notes.append(
                f"communication and waiting take {shares['communication'] + shares['wait']:.0%} of the step: larger "
                "batches or --grad-accum-steps make them rarer"
            )
        report.notes += [
            f"rank {rank} is slow: its own work takes {best['busy_ms'][rank]:.3g} ms a step"
            for rank in slow_ranks(best["busy_ms"])
            if not inside
        ]
        if best.get("tflops") is None:
            report.notes.append(f"FLOP/s are unknown: {best['flops_note']}")
    for row in report.rows:
        if row["status"] not in {"ok", "skipped"}:
            report.notes.append(f"batch {row['batch_size']} in {row['precision']}: {row['status']} ({row['reason']})")
    complete = not report.partial and all(row["status"] in {"ok", "skipped"} for row in report.rows)
    if max_batch is not None and measured and complete:
        report.notes.append("memory did not run out: larger batches were not asked for, or the data set has no more")
