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
        "report": report,
    }


def _time_of(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
