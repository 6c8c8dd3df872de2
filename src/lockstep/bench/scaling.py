"""``bench scaling``: 1, 2, … N devices, with the work for each held (weak) or the work in all (strong)."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lockstep.bench.report import BenchReport, Say
from lockstep.bench.step import MUCH_COMMUNICATION, check_steps, measure_all
from lockstep.bench.summary import device_counts, slow_ranks, speed_up, spread
from lockstep.bench.trials import Case, Subject, new_trials
from lockstep.config.load import merge
from lockstep.errors import LockstepError, UsageError, many
from lockstep.launch.session.script import run_script, several_devices
from lockstep.planning.notes import FILL
from lockstep.strategies import auto_strategy, find_strategy
from lockstep.telemetry.rundir import RunDir

Mode = Literal["weak", "strong"]
#: More than all devices can give together, caches aside.
DOUBTFUL = 1.1
#: Parts of a step that are computation.
_COMPUTE = ("forward", "backward", "optimizer", "other")
#: What the rows of a point's repeats have in common.
_SAME = ("devices", "ranks", "strategy", "mode", "status", "global_batch", "accumulate")


def bench_scaling(
    subject: Subject,
    *,
    strategies: Sequence[str] = ("ddp",),
    modes: Sequence[Mode] = ("weak", "strong"),
    steps: int = 30,
    warm_up: int = 5,
    repeats: int = 3,
    claims: bool = False,
    say: Say = lambda line: None,
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
        (count, strategy, _cases(subject, devices[:count], strategy, modes, report))
        for count in device_counts(len(devices))
        for strategy in (strategies if count > 1 else (auto_strategy(1),))
    ]
    refused, found = list(report.rows), list[dict[str, Any]]()
    with report.kept(), new_trials() as trials:
        for repeat, (count, strategy, cases) in itertools.product(range(repeats), points):
            if cases and not trials.stopped:
                say(f"repeat {repeat + 1} of {repeats}: {many(count, 'device')}, {strategy}")
                found += measure_all(subject, trials, cases)[0]
    report.rows = [*merged(found, report.notes), *refused]
    if claims:
        for row in report.rows:
            row |= claim_of(subject.name, row["strategy"], row["ranks"])
    conclude(report)
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
    if on_cpu and threads:
        report.notes.append(f"each rank computes with {many(threads, 'thread')}; the ranks share one machine's memory")
    return report


def _cases(
    subject: Subject, devices: Sequence[str], strategy: str, modes: Sequence[Mode], report: BenchReport
) -> list[Case]:
    """A case for each mode; none where these devices refuse the strategy: then rows of ``report`` say why."""
    count, base, settings = len(devices), subject.base.plan.batch, report.settings
    samples: dict[Mode, int] = {"weak": base.batch_size * count, "strong": base.global_batch}
    # A pipeline's devices take part in the same micro-batches; others take one each.
    parts = FILL * count if find_strategy(strategy).state == "staged" else count
    place = {"selected_devices": list(devices), "strategy": "auto" if count == 1 else strategy}
    label = {"devices": list(devices), "ranks": count, "strategy": strategy}
    found = []
    try:
        for mode in modes:
            sizes = {"batch_size": -(-samples[mode] // parts), "global_batch_size": samples[mode], "accumulate": 1}
            changes = {"hardware": place, "training": {**sizes, "threads": settings["threads_per_rank"]}}
            lengths = {name: settings[name] for name in ("steps", "warm_up")}
            found.append(subject.case({**label, "mode": mode}, changes, **lengths))
    except LockstepError as error:
        report.rows += [{**label, "mode": mode, "status": "refused", "reason": str(error.what)} for mode in modes]
        return []
    return found


def bench_script(
    path: Path,
    arguments: Sequence[str],
    given: Mapping[str, Any],
    *,
    modes: Sequence[str],
    steps: int,
    warm_up: int,
    repeats: int,
    say: Say,
) -> BenchReport:
    """Run the first steps of a script with a ``lockstep.Session`` on parts of the devices in ``given``, in turns.

    Each point is a whole run of the script, with its data, log and checkpoint; its speed is that of the steps after
    ``warm_up``. On one device the global batch is that of the script, and ``strong`` holds it.

    Raises:
        ConfigError: one device. UsageError: no such script.
    """
    names = several_devices(given, "one device: nothing scales")
    settings = {"devices": names, "modes": list(modes), "steps": steps, "warm_up": warm_up, "repeats": repeats}
    report = BenchReport("scaling", path.name, settings)
    found: list[dict[str, Any]] = []
    one = 0
    with report.kept(), tempfile.TemporaryDirectory(prefix="lockstep-scaling-") as folder:
        for repeat, count, mode in itertools.product(range(repeats), device_counts(len(names)), modes):
            say(f"repeat {repeat + 1} of {repeats}: {many(count, 'device')}, {mode}")
            changes: dict[str, Any] = {
                "hardware": {"selected_devices": names[:count]},
                "training": {"max_steps": warm_up + steps, "threads": 1},
                "telemetry": {"log_interval": max(1, warm_up), "progress": "silent"},
                "save_dir": str(Path(folder, f"{repeat}-{count}-{mode}")),
            }
            if one:
                changes["training"]["global_batch_size"] = one * (count if mode == "weak" else 1)
            row: dict[str, Any] = {"devices": names[:count], "ranks": count, "strategy": "session", "mode": mode}
            try:
                run, _ = run_script(path, arguments, merge(given, changes), redirect=True)
                row |= _speed_of(run, warm_up)
            except LockstepError as error:
                row |= {"status": "failed", "reason": error.what}
            one = one or row.get("global_batch", 0)
            found.append(row)
    report.rows = merged(found, report.notes)
    conclude(report)
    return report


def _speed_of(run: RunDir, warm_up: int) -> dict[str, Any]:
    """The speed of the steps after ``warm_up``, from the rows of the log."""
    batch, rows = run.plan()["batch"], run.steps()
    timed = [
        (after["samples_seen"] - before["samples_seen"], after["samples_per_s"])
        for before, after in itertools.pairwise(rows)
        if after["step"] > warm_up
    ]
    if not timed:
        return {"status": "failed", "reason": "the script ended before the first measured step"}
    rate = sum(samples for samples, _ in timed) / sum(samples / rate for samples, rate in timed)
    return {
        "status": "ok",
        "global_batch": batch["global_batch"],
        "accumulate": batch["accumulate"],
        "samples_per_s": rate,
        "epoch_s": batch["samples"] / rate,
        "step_ms": 1e3 * batch["global_batch"] / rate,
    }


def merged(found: Sequence[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """One row for each point and mode of the rows ``found`` in all repeats, compared with one device.

    A note says where some repeats failed and others did not: those rows are of fewer than were asked for.
    """
    points: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in found:
        points.setdefault((row["ranks"], row["strategy"], row["mode"]), []).append(row)
    rows = [_median(repeats) for repeats in points.values()]
    baselines = {row["mode"]: row["samples_per_s"] for row in rows if row["ranks"] == 1 and row["status"] == "ok"}
    for row in rows:
        if row["status"] == "ok" and row["mode"] in baselines:
            row["speed_up"], row["efficiency"] = speed_up(row["samples_per_s"], baselines[row["mode"]], row["ranks"])
    for (ranks, strategy, mode), repeats in points.items():
        failed = [row for row in repeats if row["status"] != "ok"]
        if 0 < len(failed) < len(repeats):
            notes.append(
                f"{many(ranks, 'device')}, {strategy} {mode}: {len(failed)} of {len(repeats)} repeats ended early, the "
                f"first one {failed[0]['status']} ({failed[0]['reason']})"
            )
    return rows


def _median(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of several; of those that failed, if all have."""
    good = [row for row in repeats if row["status"] == "ok"]
    if not good:
        return repeats[0]
    row = {
        **{name: good[0][name] for name in _SAME},
        "repeats": len(good),
        **spread("samples_per_s", [row["samples_per_s"] for row in good]),
        **{name: statistics.median(row[name] for row in good) for name in ("epoch_s", "step_ms")},
    }
    if "shares" not in good[0]:  # of a script
        return {**row, "memory_mb": None, "utilisation_per_device": [None]}

    def each(name: str) -> Iterator[tuple[Any, ...]]:
        """The values of ``name`` in all repeats, for each device or rank."""
        return zip(*(row[name] for row in good), strict=True)

    shares = {name: statistics.fmean(row["shares"][name] for row in good) for name in good[0]["shares"]}
    return {
        **row,
        "memory_mb": max(row["memory_mb"] for row in good),
        "memory_mb_per_device": [max(peaks) for peaks in each("memory_mb_per_device")],
        "utilisation_per_device": [
            None if None in measured else statistics.fmean(measured) for measured in each("utilisation_per_device")
        ],
        "shares": _shares(row["strategy"], shares),
        "parts": shares,
        "busy_ms": [statistics.median(own) for own in each("busy_ms")],
    }


def _shares(strategy: str, parts: Mapping[str, float]) -> dict[str, float | None]:
    """Input, computing, communication and waiting for slower ranks as shares of a step; ``None``: not known."""
    if find_strategy(strategy).exchanges_inside:
        return {"data": parts["data"], "compute": None, "communication": None, "wait": None}
    compute = sum(parts[name] for name in _COMPUTE)
    return {"data": parts["data"], "compute": compute, "communication": parts["communication"], "wait": parts["wait"]}


def conclude(report: BenchReport) -> None:
    """The verdict and the notes, from the rows."""
    several = [row for row in report.rows if "efficiency" in row and row["ranks"] > 1]
    most = max((row["ranks"] for row in several), default=0)
    parts = [
        f"{row['strategy']} {row['mode']}: {row['speed_up']:.2f} times one (efficiency {row['efficiency']:.0%})"
        for row in several
        if row["ranks"] == most
    ]
    report.verdict = f"{most} devices, {'; '.join(parts)}" if several else "nothing could be compared"
    inside = set[str]()
    for row in several:
        if "shares" not in row:
            continue
        share, where = row["shares"]["communication"], f"{row['ranks']} devices ({row['strategy']}, {row['mode']})"
        if share is None:
            inside.add(row["strategy"])
            continue
        if share > MUCH_COMMUNICATION:
            report.notes.append(
                f"communication takes {share:.0%} of a step on {where}, above {MUCH_COMMUNICATION:.0%}: larger "
                "batches or --grad-accum-steps make it rarer"
            )
        report.notes += [f"rank {rank} is slow on {where}" for rank in slow_ranks(row["busy_ms"])]
    if inside:
        report.notes.append(
            f"{' and '.join(sorted(inside))}: communication is inside forward and backward, so its share is not known; "
            "compare the samples/s"
        )
    report.notes += _both_strategies(several)
    if any(row["efficiency"] > DOUBTFUL for row in several):
        report.notes.append(
            f"an efficiency above {DOUBTFUL:.0%} says that something else disturbed the measurement of one device: "
            "repeat it on an idle machine, with more --repeats and --steps"
        )
    unmeasured = [row for row in report.rows if row["status"] != "ok"]
    report.notes += dict.fromkeys(
        f"{row['ranks']} devices, {row['strategy']}: {row['status']} ({row['reason']})" for row in unmeasured
    )
    if any(row["status"] == "refused" and find_strategy(row["strategy"]).scatters for row in unmeasured):
        report.notes.append("DP against DDP can be compared on GPUs only: torch's DataParallel does not run on a CPU")


def _both_strategies(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """DataParallel against DistributedDataParallel, where both were measured."""
    rates = {(row["ranks"], row["mode"], row["strategy"]): row["samples_per_s"] for row in rows}
    for (ranks, mode, strategy), rate in rates.items():
        other = rates.get((ranks, mode, "ddp"))
        if other and find_strategy(strategy).scatters:
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
