"""One run as every reader shows it: identity, status, progress, results, devices, why it ended.

``lockstep runs``, ``show`` and ``top``, the report and the page all render :func:`summarize`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import RunFolderError
from lockstep.telemetry.files import last_row
from lockstep.telemetry.lookup import one_line, or_else, read_runs
from lockstep.telemetry.records import RunRecord
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.system import newest_samples

LIVE = frozenset({"pending", "running"})
#: A run folder from elsewhere may contain texts of any length.
_MAX_NAME, _MAX_TAGS, _MAX_ERROR = 200, 20, 20_000


def summarize(run: RunDir, record: RunRecord | None = None) -> dict[str, Any]:
    """The fields of ``run.json``, with the status as judged now, and what the other files of the folder say.

    Added to the record:

    - ``location``: the folder's name; ``path``: the folder
    - ``devices``, ``strategy``, ``precision``, ``world_size``: of the newest attempt
    - ``step`` of ``total_steps`` (optimizer steps), ``progress`` from 0 to 1, ``epoch`` (completed) of ``epochs``
    - ``monitor``: the metric that decides which checkpoint is best
    - ``eta_s``: seconds to the end of a running run, where that can be estimated
    - ``last_epoch``: the newest row of ``metrics.json``; ``samples_per_s``: the median of all rows

    Args:
        record: of the run, if it has been read.

    Raises:
        RunFolderError: the folder holds no run, or its record is damaged.
    """
    record = record or run.read()
    status, beat, rows = run.judge(record), run.progress(), or_else(run.epochs, [])
    plan = or_else(run.plan, {})
    placement, last = record.placement or {}, rows[-1] if rows else {}
    step, total = (beat.step, beat.total) if beat else (None, None)
    return {
        **record.model_dump(mode="json"),
        "name": record.name and record.name[:_MAX_NAME],
        "tags": [tag[:_MAX_NAME] for tag in record.tags[:_MAX_TAGS]],
        "error": record.error and record.error[-_MAX_ERROR:],
        "best_metric": record.best_metric,  # a number may be NaN, which JSON does not have
        "final_metrics": record.final_metrics,
        "status": status,
        "location": run.path.name,
        "path": str(run.path),
        "devices": _devices(run, placement),
        **{key: placement.get(key) for key in ("world_size", "strategy", "precision")},
        "epoch": last.get("epoch"),
        "epochs": epochs if isinstance(epochs := plan.get("epochs"), int) else None,
        "monitor": monitor if isinstance(monitor := plan.get("monitor"), str) else None,
        "step": step,
        "total_steps": total,
        "progress": min(1.0, step / total) if step is not None and total else None,
        "eta_s": beat.seconds_left() if beat and status == "running" else None,
        "last_epoch": last or None,
        "samples_per_s": _median([row.get("samples_per_s") for row in rows]),
    }


def summaries(root: Path, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """The summary of each run in the folders below ``root``, newest first; ``report`` receives what cannot be read."""
    found = []
    for run, record in read_runs(root, report):
        try:
            found.append(summarize(run, record))
        except RunFolderError as error:
            report(one_line(error))
    return found


def _devices(run: RunDir, placement: dict[str, Any]) -> list[str]:
    devices = placement.get("devices") or []
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise RunFolderError(
            f"{run.run_file} is damaged",
            why="the devices of its placement are not a list of names",
            fix="restore the file, or delete the run",
        )
    return devices


def _median(values: Sequence[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return statistics.median_high(known) if known else None


#: Older samples are stale: the run has ended, or its node has stopped.
FRESH_S = 15.0


def live_state(run: RunDir, now: float | None = None) -> dict[str, Any]:
    """``run``: its summary, the newest logged step, every rank; ``nodes``: the newest sample of each.

    Costs the same however many steps the run has. ``seconds_left`` is the summary's ``eta_s``.

    Raises:
        RunFolderError: there is no run, or it cannot be read.
    """
    now = time.time() if now is None else now
    summary, step, ranks = summarize(run), last_row(run.steps_file), last_row(run.ranks_file)
    state = {
        **summary,
        "seconds_left": summary["eta_s"],
        "logged": step,
        "ranks": _ranks(run, ranks),
        "slow_rank": (ranks or {}).get("slow_rank"),
    }
    nodes = [sample for sample in newest_samples(run.path) if now - sample.get("time", 0) < FRESH_S]
    return {"run": state, "nodes": nodes}


def _ranks(run: RunDir, newest: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The ranks of the newest row; a row written at the end of an epoch gets the last known ``own_s``."""
    rows: list[dict[str, Any]] = (newest or {}).get("ranks", [])
    if len(rows) < 2 or _has_own(newest or {}):
        return rows
    before = last_row(run.ranks_file, _has_own)
    known = {rank["rank"]: rank["own_s"] for rank in (before or {}).get("ranks", [])}
    return [{**rank, "own_s": known.get(rank["rank"])} for rank in rows]


def _has_own(row: dict[str, Any]) -> bool:
    return any(rank.get("own_s") is not None for rank in row.get("ranks", []))
