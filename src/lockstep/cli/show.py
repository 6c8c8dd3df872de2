"""``lockstep show``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cyclopts import App

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunRef, RunsDir, find, print_json
from lockstep.cli.runs import done_of, local_time

if TYPE_CHECKING:
    from lockstep.telemetry.rundir import RunDir

app = App(name="show", usage="Usage: lockstep show RUN [OPTIONS]")


@app.default
def show(run: RunRef, /, *, as_json: AsJson = False, runs_dir: RunsDir = DEFAULT_RUNS_DIR) -> None:
    """Print everything recorded about a run."""
    found = find(run, runs_dir)
    details = describe(found)
    if as_json:
        print_json(details, sys.stdout)
    else:
        _print(details)


def describe(run: RunDir) -> dict[str, Any]:
    """One document: summary, plan, epochs, checkpoints and logs."""
    from lockstep.checkpoint.store import CheckpointStore
    from lockstep.report.score import score_of
    from lockstep.telemetry.lookup import or_else
    from lockstep.telemetry.summary import summarize

    plan = or_else(run.plan, {})  # none if it failed before planning
    return {
        **summarize(run),
        "plan": plan,
        "metrics": {"epochs": run.epochs(), "evaluations": run.evaluations()},
        "checkpoints": CheckpointStore(run.checkpoints).listed(),
        "logs": sorted(str(file) for file in run.logs.glob("*.log")),
        "config": str(run.config_file),
        "slurm": _slurm(run),
        "forecast": score_of(run) if plan else None,
    }


def _slurm(run: RunDir) -> str | None:
    """The SLURM job of the run, and its state."""
    if not run.slurm_file.exists():
        return None
    from lockstep.launch.slurm.job import job_of
    from lockstep.launch.slurm.job_control import state

    job = job_of(run)
    return None if job is None else f"{job.id}, {state(job) or 'over'}"


def _print(details: dict[str, Any]) -> None:
    from lockstep.report.score import in_words
    from lockstep.telemetry.console import duration, print_plan, value_text
    from lockstep.telemetry.tables import print_table, say

    rows = [
        ("run", details["id"]),
        ("name", details["name"]),
        ("task", details["task"]),
        ("status", details["status"]),
        ("attempt", details["attempt"]),
        ("step", done_of(details["step"], details["total_steps"])),
        ("epoch", done_of(details["epoch"], details["epochs"])),
        ("time left", None if details["eta_s"] is None else duration(details["eta_s"])),
        ("started", local_time(details["started_at"])),
        ("completed", local_time(details["completed_at"])),
        ("devices", ", ".join(details["devices"])),
        ("strategy", details["strategy"]),
        ("process", f"{details['pid']} on {details['host']}"),
        ("slurm job", details["slurm"]),
        ("command", " ".join(details["command"])),
        ("best epoch", details["best_epoch"]),
        *((f"best {name}", value) for name, value in details["best_metric"].items()),
        *details["final_metrics"].items(),
        ("forecast", in_words(details["forecast"]) if details["forecast"] else None),
        ("folder", details["path"]),
    ]
    print_table(("", ""), [(name, value_text(value)) for name, value in rows if value not in (None, "")], sys.stdout)
    say("", sys.stdout)
    print_plan(details["plan"], sys.stdout)
    for title, rows in zip(("last epoch", "last evaluation between epochs"), details["metrics"].values(), strict=True):
        if rows:
            say("", sys.stdout)
            print_table((title, ""), [(name, value_text(value)) for name, value in rows[-1].items()], sys.stdout)
    say("", sys.stdout)
    files = [(_checkpoint_label(saved), saved["path"]) for saved in details["checkpoints"]]
    files += [("log", path) for path in details["logs"]]
    print_table(("files", ""), [*files, ("configuration", details["config"])], sys.stdout)
    if details["error"]:
        say(f"\nerror: {details['error']}", sys.stdout)


def _checkpoint_label(saved: dict[str, Any]) -> str:
    marks = [name for name in ("last", "best") if saved[name]]
    return f"checkpoint ({', '.join(marks)})" if marks else "checkpoint"
