"""``bench step``: time and memory of a training step's parts, by precision and compilation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from lockstep.errors import PrecisionError, UsageError, many
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.peaks import peak_flops
from lockstep.lab.bench.measure import measure_cases, slow_ranks
from lockstep.lab.bench.report import BenchReport, Say
from lockstep.lab.bench.trials import Case, Subject, Trials, new_trials
from lockstep.precisions import PRECISIONS
from lockstep.strategies import find_strategy

#: Precisions to compare, in this order; ``tf32`` is precision 32 whose matrix products may use TF32.
FORMATS = ("32", "tf32", *(name for name, spec in PRECISIONS.items() if spec.is_half))
#: Share of a step from which communication is worth a word.
MUCH_COMMUNICATION = 0.1
RARER_MESSAGES = "larger batches or --grad-accum-steps make messages rarer"


def bench_step(
    subject: Subject,
    *,
    steps: int = 30,
    warm_up: int = 5,
    precisions: Sequence[str] | None = None,
    compile: bool = False,
    say: Say = lambda line: None,
) -> BenchReport:
    """Measure ``steps`` steps of the engine's loop on the chosen devices, after ``warm_up`` further ones.

    ``precisions``: of :data:`FORMATS`, default: the configured one. ``compile``: also with torch.compile.
    """
    base = subject.base
    default = base.placement.precision
    if default == "32" and base.plan.value("matmul_precision") == "high":
        default = "tf32"
    chosen = tuple(precisions or (default,))
    if unknown := [name for name in chosen if name not in FORMATS]:
        raise UsageError(f"unknown precision: {unknown[0]}", fix=f"choose of {', '.join(FORMATS)}")
    check_steps(steps, warm_up)
    # A whole step must fit into the data set.
    share = max(1, base.plan.task.train_samples // (base.plan.batch.ranks * base.plan.batch.devices_per_rank))
    accumulate = min(base.config.training.accumulate, share)
    batch_size = max(1, min(base.plan.batch.batch_size, share // accumulate))
    settings = {
        "devices": list(base.placement.devices),
        "strategy": base.placement.strategy,
        "threads": base.plan.threads,
        "steps": steps,
        "warm_up": warm_up,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "precisions": list(chosen),
        "compile": compile,
    }
    report = BenchReport("step", subject.name, settings)
    if batch_size < base.plan.batch.batch_size or accumulate < base.config.training.accumulate:
        report.notes.append(
            f"the data set fills only {many(accumulate, 'micro-batch')} of {batch_size} for each device"
        )
    compiled = (False, True) if compile else (base.config.training.compile,)
    with report.kept(), new_trials() as trials:
        for precision, on in product(sorted(chosen, key=FORMATS.index), compiled):
            label = {"batch_size": batch_size, "precision": precision, "compile": on}
            try:
                case = _case(subject, label, settings)
            except PrecisionError as error:
                report.rows.append({**label, "status": "skipped", "reason": error.what})
                continue
            say(f"precision {precision}{', compiled' * on}")
            report.rows += [
                _with_speed(row, subject) for row in measure_all(subject, trials, [case], counts_flops=True)
            ]
    _conclude(report)
    return report


def check_steps(steps: int, warm_up: int) -> None:
    """Raise :class:`UsageError` for numbers of steps that show nothing."""
    if steps < 2 or warm_up < 1:
        raise UsageError(
            f"{steps} steps after {warm_up} for warming up show nothing",
            why="a median needs at least 2 steps after a first one, which is never like the others",
            fix="take --steps 30 --warm-up 5, or more",
        )


def measure_all(
    subject: Subject, trials: Trials, cases: Sequence[Case], *, counts_flops: bool = False
) -> list[dict[str, Any]]:
    """Measure ``cases`` in one trial; returns rows, each with its ``status``.

    The row of a failed case has a ``reason``; cases after it have no row.
    """
    first, *further_cases = cases
    outcome = trials.run_case(measure_cases, first, further_cases, counts_flops, task=subject.base.task)
    rows = [{**row, "status": "ok"} for row in outcome.rows]
    if outcome.ended not in {"done", "stopped"} and len(rows) < len(cases):
        rows.append({**cases[len(rows)].label, "status": outcome.ended, "reason": outcome.error})
    return rows


def _case(subject: Subject, label: dict[str, Any], settings: dict[str, Any]) -> Case:
    precision = label["precision"]
    if precision == "16-mixed" and subject.base.placement.accelerator == "cpu":
        raise PrecisionError("torch emulates it on CPUs, so its speed says nothing", fix="measure it on a GPU")
    hardware = {"precision": precision}
    if precision in ("32", "tf32"):
        hardware["matmul_precision"] = "highest" if precision == "32" else "high"
    sizes = {"batch_size": label["batch_size"], "global_batch_size": None, "accumulate": settings["accumulate"]}
    changes = {"training": {**sizes, "compile": label["compile"]}, "hardware": hardware}
    return subject.case(label, changes, steps=settings["steps"], warm_up=settings["warm_up"])


def _with_speed(row: dict[str, Any], subject: Subject) -> dict[str, Any]:
    """Add FLOP/s and their share of the devices' peak to ``row``; ``None``: unknown."""
    flops = row.pop("flops_per_step", None)
    if flops is None:
        return {**row, "tflops": None, "peak_share": None}
    rate = flops / (row["step_ms"] / 1e3)
    tf32 = row["precision"] == "tf32"
    devices = subject.base.placement.devices
    name = next((device.name for device in detect_devices() if device.id == devices[0]), devices[0])
    peak, source = peak_flops(name, "32" if tf32 else row["precision"], tf32=tf32)
    # A device with two ranks is not faster.
    share = None if peak is None else rate / (peak * len(set(devices)))
    return {**row, "tflops": rate / 1e12, "peak_share": share, "peak_source": source}


def _conclude(report: BenchReport) -> None:
    report.notes += [
        f"batch {row['batch_size']} in {row['precision']}: {row['status']} ({row['reason']})"
        for row in report.rows
        if row["status"] != "ok"
    ]
    measured = [row for row in report.rows if row["status"] == "ok"]
    report.verdict = "nothing could be measured"
    if not measured:
        return
    best = max(measured, key=lambda row: row["samples_per_s"])
    shares = best["shares"]
    strategy = report.settings["strategy"]
    part, share = max(shares.items(), key=lambda item: item[1])
    report.verdict = (
        f"most samples/s: {best['samples_per_s']:,.0f} with batch {best['batch_size']} in precision "
        f"{best['precision']}{', compiled' * best['compile']}; {part} takes {share:.0%} of that step"
    )
    exchange = shares["communication"] + shares["wait"]
    if find_strategy(strategy).exchanges_inside:
        report.notes.append(f"{strategy}: most of its communication is inside forward and backward")
    elif exchange > MUCH_COMMUNICATION:
        report.notes.append(f"communication and waiting take {exchange:.0%} of the step: {RARER_MESSAGES}")
    report.notes += [f"rank {rank} is slow" for rank in slow_ranks(best["busy_ms"])]
    if best["tflops"] is None:
        report.notes.append(f"FLOP/s are unknown: {best['flops_note']}")
