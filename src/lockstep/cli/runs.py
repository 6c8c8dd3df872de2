"""``lockstep runs``."""

from __future__ import annotations

import sys
from typing import Any

from cyclopts import App

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunsDir, print_json

app = App(name="runs", usage="Usage: lockstep runs [OPTIONS]")


@app.default
def runs(*, runs_dir: RunsDir = DEFAULT_RUNS_DIR, as_json: AsJson = False) -> None:
    """Print the runs in a folder."""
    from lockstep.telemetry.summary import summaries
    from lockstep.telemetry.tables import print_table, say

    found = summaries(runs_dir, lambda why: say(f"warning: {why}", sys.stderr))
    if as_json:
        print_json({"runs": found}, sys.stdout)
    elif found:
        columns = ["id", "name", "task", "status", "epoch", "step", "best", "started", "devices", "folder"]
        if all(run["location"] == run["id"] for run in found):
            columns.remove("folder")
        print_table(columns, [_row(run)[: len(columns)] for run in found], sys.stdout)
    else:
        say(f"no runs in {runs_dir}; `lockstep train har` makes one", sys.stdout)


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
        ",".join(run["devices"]),
        run["location"],
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
