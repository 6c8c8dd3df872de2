"""``lockstep runs``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cyclopts import App

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunsDir, print_json

if TYPE_CHECKING:
    from lockstep.telemetry.rundir import RunDir

app = App(name="runs", usage="Usage: lockstep runs [OPTIONS]")


@app.default
def runs(*, runs_dir: RunsDir = DEFAULT_RUNS_DIR, as_json: AsJson = False) -> None:
    """Print the runs in a folder."""
    from lockstep.telemetry.lookup import list_runs
    from lockstep.telemetry.tables import print_table, say

    found = [summary(run) for run in list_runs(runs_dir, report=lambda why: say(f"warning: {why}", sys.stderr))]
    if as_json:
        print_json({"runs": found}, sys.stdout)
    elif found:
        columns = ("id", "name", "task", "status", "epoch", "step", "best", "started", "devices")
        print_table(columns, [_row(run) for run in found], sys.stdout)
    else:
        say(f"no runs in {runs_dir}; `lockstep train har` makes one", sys.stdout)


def summary(run: RunDir) -> dict[str, Any]:
    """What one line, or one JSON object, says of a run."""
    from lockstep.telemetry.lookup import or_else, planned_epochs

    record, beat, rows = run.read(), run.progress(), or_else(run.epochs, [])
    return {
        **record.model_dump(mode="json"),
        "status": run.judge(record),
        "path": str(run.path),
        "epoch": rows[-1].get("epoch") if rows else None,
        "epochs": planned_epochs(run),
        "step": beat.step if beat else None,
        "total_steps": beat.total if beat else None,
    }


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    from lockstep.telemetry.console import value_text

    best = ", ".join(f"{name} {value_text(value)}" for name, value in run["best_metric"].items())
    return (
        run["id"],
        run["name"] or "",
        run["task"],
        run["status"],
        done_of(run["epoch"], run["epochs"]),
        done_of(run["step"], run["total_steps"]),
        best,
        local_time(run["started_at"] or run["created_at"]),
        ",".join((run["placement"] or {}).get("devices", ())),
    )


def done_of(done: int | None, total: int | None) -> str:
    """``3/10``; empty when nothing is done."""
    if done is None:
        return ""
    return f"{done}/{total}" if total else str(done)


def local_time(text: str | None) -> str:
    """``2026-01-31 14:05:09`` in this machine's time zone, from an ISO time."""
    from datetime import datetime

    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S") if text else ""
