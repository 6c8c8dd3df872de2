"""The current state of a run, from the ends of its files: what ``lockstep top`` shows."""

from __future__ import annotations

import time
from typing import Any

from lockstep.telemetry.files import last_row
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.summary import summarize
from lockstep.telemetry.system import newest_samples

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
