"""Scaling benchmarks: their reports below the runs folder, in the form that the page draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.errors import RunFolderError
from lockstep.report.source import is_bench, read_bench
from lockstep.studio.home import Home, iso

_MAX_REPORTS = 100


def list_reports(home: Home) -> list[dict[str, Any]]:
    """Every ``report.json`` of a benchmark in the folders right under the runs folder, newest first."""
    files = [file for file in home.runs_dir.glob("*/report.json") if is_bench(file.parent)]
    newest = sorted(files, key=_time_of, reverse=True)[:_MAX_REPORTS]
    return [found for file in newest if (found := _read(file)) is not None]


def _read(file: Path) -> dict[str, Any] | None:
    try:
        report = read_bench(file.parent)
    except RunFolderError:
        return None
    if report["kind"] != "scaling":
        return None
    return {
        "id": file.parent.name,
        "title": str(report.get("title") or file.parent.name),
        "created_at": iso(_time_of(file)),
        "path": str(file),
        "points": _points(report),
        "report": report,
    }


def _points(report: dict[str, Any]) -> list[dict[str, Any]] | None:
    rows = report.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return None
    return [
        {
            **{name: row.get(name) for name in ("ranks", "samples_per_s", "efficiency", "epoch_s", "mode", "strategy")},
            "speedup": row.get("speed_up"),
            "utilisation": _mean(row.get("utilisation_per_device")),
            "peak_memory": row["memory_mb"] * 1e6 if isinstance(row.get("memory_mb"), int | float) else None,
        }
        for row in rows
        if row.get("status") == "ok"
    ]


def _mean(shares: Any) -> float | None:
    """Of a list of numbers; ``None`` where it is anything else."""
    known = isinstance(shares, list) and shares and all(isinstance(share, int | float) for share in shares)
    return sum(shares) / len(shares) if known else None


def _time_of(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
