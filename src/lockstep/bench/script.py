"""``bench scaling script.py``: the steps of a loop with a ``lockstep.Session`` on 1, 2, … N devices."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.bench.results import BenchReport
from lockstep.bench.summary import device_counts, speed_up, spread
from lockstep.config.load import merge
from lockstep.errors import LockstepError
from lockstep.launch.session.script import run_script, several_devices
from lockstep.telemetry.rundir import RunDir


def bench_script(
    path: Path,
    given: Mapping[str, Any],
    *,
    modes: Sequence[str],
    steps: int,
    warm_up: int,
    repeats: int,
    say: Callable[[str], None],
) -> BenchReport:
    """Run the first steps of a script on parts of the devices in ``given``, in turns.

    Each point is a whole run of the script, with its data, log and checkpoint; its speed is that of the steps after
    ``warm_up``. On one device the global batch is that of the script, and ``strong`` holds it.

    Raises:
        ConfigError: one device. UsageError: no such script.
    """
    names = several_devices(given, "one device: nothing scales")
    settings = {"devices": names, "modes": list(modes), "steps": steps, "warm_up": warm_up, "repeats": repeats}
    report = BenchReport("scaling", path.name, settings)
    counts, found = device_counts(len(names)), dict[tuple[int, str], list[dict[str, Any]]]()
    one = 0
    with report.kept(), tempfile.TemporaryDirectory(prefix="lockstep-scaling-") as folder:
        for repeat, count, mode in itertools.product(range(repeats), counts, modes):
            say(f"repeat {repeat + 1} of {repeats}: {count} device(s), {mode}")
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
                run, _ = run_script(path, (), merge(given, changes), redirect=True)
                row |= _measured(run, warm_up)
            except LockstepError as error:
                row |= {"status": "failed", "reason": error.what}
            one = one or row.get("global_batch", 0)
            found.setdefault((count, mode), []).append(row)
    report.rows += [_merged(rows) for rows in found.values()]
    baselines = {row["mode"]: row["samples_per_s"] for row in report.rows if row["ranks"] == 1 and "step_ms" in row}
    good = [row for row in report.rows if row["status"] == "ok" and row["mode"] in baselines]
    for row in good:
        row["speed_up"], row["efficiency"] = speed_up(row["samples_per_s"], baselines[row["mode"]], row["ranks"])
    best = max((row for row in good if row["ranks"] > 1), key=lambda row: row["samples_per_s"], default=None)
    if best is not None:
        report.verdict = (
            f"{best['ranks']} devices ({best['mode']}) reach {best['speed_up']:.2f} times the samples/s of one, an "
            f"efficiency of {best['efficiency']:.0%}"
        )
    report.notes += [f"{r['ranks']} device(s), {r['mode']}: {r['reason']}" for r in report.rows if "reason" in r]
    return report


def _measured(run: RunDir, warm_up: int) -> dict[str, Any]:
    """The speed of the steps after ``warm_up``, from the rows of the log."""
    plan, rows = run.plan(), run.steps()
    timed = [
        (after["samples_seen"] - before["samples_seen"], after["samples_per_s"])
        for before, after in itertools.pairwise(rows)
        if after["step"] > warm_up
    ]
    if not timed:
        return {"status": "failed", "reason": "the script ended before the first measured step"}
    rate = sum(samples for samples, _ in timed) / sum(samples / rate for samples, rate in timed)
    batch = plan["batch"]
    return {
        "status": "ok",
        "global_batch": batch["global_batch"],
        "accumulate": batch["accumulate"],
        "samples_per_s": rate,
        "epoch_s": batch["samples"] / rate,
        "step_ms": 1e3 * batch["global_batch"] / rate,
        "memory_mb": None,
        "utilisation_per_device": [None],
    }


def _merged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of the repeats."""
    good = [row for row in rows if row["status"] == "ok"]
    if not good:
        return rows[0]
    rates = spread([row["samples_per_s"] for row in good])
    between = {"samples_per_s": rates.median, "samples_per_s_low": rates.low, "samples_per_s_high": rates.high}
    medians = {key: statistics.median(row[key] for row in good) for key in ("epoch_s", "step_ms")}
    return {**good[0], **between, **medians, "repeats": len(good)}
