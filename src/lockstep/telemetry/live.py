"""A run as it is at this moment, from the ends of its files: what ``lockstep top`` shows."""

from __future__ import annotations

import time
from typing import Any

from lockstep.telemetry.files import last_row
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.system import newest_samples

#: Older samples are not of now: the run has ended, or its node is gone.
FRESH_S = 15.0


def live_state(run: RunDir, now: float | None = None) -> dict[str, Any]:
    """``run``: identity, status, progress, the newest logged step, every rank; ``nodes``: each one's newest sample.

    Costs the same however long the run is. ``seconds_left`` leaves evaluations out; it is ``None`` when the run
    does not go on or has logged nothing yet.

    Raises:
        RunFolderError: there is no run, or it cannot be read.
    """
    now = time.time() if now is None else now
    record, beat = run.read(), run.progress()
    status = run.judge(record)
    step, ranks = last_row(run.steps_file), last_row(run.ranks_file)
    at, total = (beat.step, beat.total) if beat else (None, None)
    state = {
        "id": record.id,
        "name": record.name,
        "task": record.task,
        "status": status,
        "path": str(run.path),
        "attempt": record.attempt,
        "devices": (record.placement or {}).get("devices", []),
        "step": at,
        "total_steps": total,
        "seconds_left": _seconds_left(ranks, at, total) if status == "running" else None,
        "logged": step,
        "ranks": _ranks(run, ranks),
        "slow_rank": (ranks or {}).get("slow_rank"),
        "best_metric": record.best_metric,
        "error": record.error,
    }
    nodes = [sample for sample in newest_samples(run.path) if now - sample.get("time", 0) < FRESH_S]
    return {"run": state, "nodes": nodes}


def _ranks(run: RunDir, newest: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The newest line's ranks; where only an epoch's end made it, with the last ``own_s`` that is known."""
    rows: list[dict[str, Any]] = (newest or {}).get("ranks", [])
    if len(rows) < 2 or _has_own(newest or {}):
        return rows
    before = last_row(run.ranks_file, _has_own)
    known = {rank["rank"]: rank["own_s"] for rank in (before or {}).get("ranks", [])}
    return [{**rank, "own_s": known.get(rank["rank"])} for rank in rows]


def _has_own(row: dict[str, Any]) -> bool:
    return any(rank.get("own_s") is not None for rank in row.get("ranks", []))


def _seconds_left(ranks: dict[str, Any] | None, step: int | None, total: int | None) -> float | None:
    rows = (ranks or {}).get("ranks", [])
    times: list[float] = [rank["step_s"] for rank in rows if isinstance(rank.get("step_s"), float)]
    if not times or step is None or total is None:
        return None
    return max(0.0, (total - step) * max(times))
