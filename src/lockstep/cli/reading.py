"""Commands that read runs: ``runs`` and ``show``."""

from __future__ import annotations

import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from lockstep.cli.output import (
    DEFAULT_RUNS_DIR,
    AsJson,
    RunRef,
    RunsDir,
    RunsPlace,
    answer,
    find,
    flag,
    print_values,
    verb,
)
from lockstep.cli.top import RANK_COLUMNS, rank_rows
from lockstep.telemetry.console import duration, print_plan, print_table, say, value_text

if TYPE_CHECKING:
    from lockstep.rundir.folder import RunDir

#: Of the table of `lockstep runs`.
MAX_ROWS = 100

RUNS = """\
Examples:
  lockstep runs --where status=completed --sort val_loss
  lockstep runs --where tag=rates-1 --by optimizer.lr      # mean ± standard deviation over seeds"""


@verb("[OPTIONS]", RUNS)
def runs(
    *,
    filters: Annotated[
        list[str] | None,
        flag(
            "Only runs for which it holds: a column of --json, a metric, a setting or `tag`, with = != < > <= or >=. "
            "May be repeated.",
            "KEY=VALUE",
            name="--where",
        ),
    ] = None,
    sort: Annotated[
        str | None,
        flag(
            "Order by a column of --json, a metric or a setting, smallest first. Default: newest first.", "KEY[:desc]"
        ),
    ] = None,
    by: Annotated[
        str | None, flag("Group by these settings: the metric's mean ± standard deviation, best first.", "KEY,...")
    ] = None,
    limit: Annotated[int, flag(f"Rows of the table; 0: all. Default: {MAX_ROWS}.")] = MAX_ROWS,
    runs_dir: RunsPlace = str(DEFAULT_RUNS_DIR),
    as_json: AsJson = False,
) -> None:
    from lockstep.rundir.copies import CopiedRuns
    from lockstep.rundir.groups import Facts, group_runs, in_order, matching
    from lockstep.rundir.remote import is_url
    from lockstep.rundir.summary import summaries

    folder = CopiedRuns(runs_dir).refresh() if is_url(runs_dir) else Path(runs_dir)
    listed = summaries(folder, lambda problem: say(f"warning: {problem}", sys.stderr))
    selected = matching([Facts(run) for run in listed], filters or ())
    if sort is not None:
        selected = in_order(selected, sort)
    if by is not None:
        grouping = group_runs(selected, by.split(","))
        answer(grouping.as_dict(), partial(print_table, *grouping.table(value_text)), as_json)
        return
    shown = [run.summary for run in selected]
    answer({"runs": shown}, partial(_print_runs, shown, limit, folder), as_json)


def _print_runs(selected: list[dict[str, Any]], limit: int, runs_dir: Path, stream: TextIO) -> None:
    if not selected:
        say(f"no runs in {runs_dir} (--runs-dir names another folder); `lockstep train har` makes one", stream)
        return
    shown = selected[:limit] if limit > 0 else selected
    columns = ["id", "name", "task", "status", "epoch", "step", "best", "started", "devices", "folder"]
    if all(run["location"] == run["id"] for run in shown):
        columns.remove("folder")
    print_table(columns, [_row(run)[: len(columns)] for run in shown], stream)
    if len(shown) < len(selected):
        say(f"{len(shown)} of {len(selected)} runs; --limit 0 lists all, --where and --sort choose", stream)


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    return (
        run["id"],
        run["name"] or "",
        run["task"],
        run["status"],
        _done_of(run["epoch"], run["epochs"]),
        _done_of(run["step"], run["total_steps"]),
        ", ".join(f"{name} {value_text(value)}" for name, value in run["best_metric"].items()),
        _local_time(run["started_at"] or run["created_at"]),
        ",".join(run["devices"]),
        run["location"],
    )


def _done_of(done: int | None, total: int | None) -> str:
    """Format progress as ``3/10``; empty when nothing is done."""
    return "" if done is None else f"{done}/{total}" if total else str(done)


def _local_time(text: str | None) -> str:
    """Convert an ISO time to ``2026-01-31 14:05:09`` in this machine's time zone."""
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S") if text else ""


@verb("RUN [OPTIONS]")
def show(run: RunRef, /, *, as_json: AsJson = False, runs_dir: RunsDir = DEFAULT_RUNS_DIR) -> None:
    details = _describe(find(run, runs_dir))
    answer(details, partial(_print_details, details), as_json)


def _describe(run: RunDir) -> dict[str, Any]:
    from lockstep.checkpoint.store import CheckpointStore
    from lockstep.rundir.files import last_row
    from lockstep.rundir.folder import or_else
    from lockstep.rundir.summary import summarize

    plan = or_else(run.plan, {})  # none if it failed before planning
    return {
        **summarize(run),
        "plan": plan,
        "metrics": {"epochs": run.epochs(), "evaluations": run.evaluations()},
        "checkpoints": CheckpointStore(run.checkpoints).listed(),
        "ranks": last_row(run.ranks_file) or {},
        "logs": sorted(str(file) for file in run.logs.glob("*.log")),
        "config": str(run.config_file),
        "job": _job(run),
    }


def _job(run: RunDir) -> str | None:
    """Return the job that an engine has for the run, and its state."""
    from lockstep.errors import UsageError
    from lockstep.launch.engines.record import handle_of, was_submitted_here
    from lockstep.launch.engines.spec import engine_of

    handle = handle_of(run)
    if handle is None:
        return None
    if not was_submitted_here(handle):
        return f"{handle.engine} {handle.id}, submitted elsewhere"
    try:
        status = engine_of(handle).status(handle).text
    except UsageError as error:
        status = f"state unknown: {error.what}"
    return f"{handle.engine} {handle.id}, {status}"


def _print_details(details: dict[str, Any], stream: TextIO) -> None:
    from lockstep.rundir.summary import final_values

    rows = [
        ("run", details["id"]),
        *((name, details[name]) for name in ("name", "task", "status", "attempt")),
        ("step", _done_of(details["step"], details["total_steps"])),
        ("epoch", _done_of(details["epoch"], details["epochs"])),
        ("time left", None if details["eta_s"] is None else duration(details["eta_s"])),
        *((name, _local_time(details[f"{name}_at"])) for name in ("started", "completed")),
        ("devices", ", ".join(details["devices"])),
        ("strategy", details["strategy"]),
        ("process", f"{details['pid']} on {details['host']}"),
        ("job", details["job"]),
        ("command", " ".join(details["command"])),
        ("best epoch", details["best_epoch"]),
        *((f"best {name}", value) for name, value in details["best_metric"].items()),
        *final_values(details).items(),
        ("folder", details["path"]),
    ]
    print_values(((name, value) for name, value in rows if value not in (None, "")), stream)
    say("", stream)
    print_plan(details["plan"], stream)
    for title, rows in zip(("last epoch", "last evaluation between epochs"), details["metrics"].values(), strict=True):
        if rows:
            say("", stream)
            print_values(rows[-1].items(), stream, title=title)
    if details["ranks"]:
        say("", stream)
        print_table(RANK_COLUMNS, rank_rows(details["ranks"]), stream)
    say("", stream)
    files = []
    for saved in details["checkpoints"]:
        names = ", ".join(name for name in ("last", "best") if saved[name])
        files.append((f"checkpoint ({names})" if names else "checkpoint", saved["path"]))
    files += [("log", path) for path in details["logs"]]
    print_values([*files, ("configuration", details["config"])], stream, title="files")
    if details["error"]:
        say(f"\nerror: {details['error']}", stream)
