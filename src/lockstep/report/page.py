"""One HTML page about runs and benchmarks, complete in one file: no network, no script."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.report.figures import Picture
from lockstep.report.source import Row, RunData, compared, text
from lockstep.report.templates import render


def page(runs: Sequence[RunData], pictures: Sequence[Picture], benches: Mapping[Path, Row], *, made: datetime) -> str:
    """The whole document.

    Args:
        benches: reports of benchmarks by their folder, whose pictures are included.
        made: when, as shown on the page.
    """
    found = [_bench(folder, report) for folder, report in benches.items()]
    return render(
        __package__,
        "report.html",
        {"text": text, "base64": lambda png: base64.b64encode(png).decode()},
        title=f"Lockstep: {', '.join([run.label for run in runs] + [bench['title'] for bench in found])}",
        made=made,
        runs=runs,
        comparison=compared(runs) if runs else None,
        pictures=pictures,
        benches=found,
    )


def _bench(folder: Path, report: Row) -> Row:
    rows = [row for row in report.get("rows") or [] if isinstance(row, dict)]
    plain = [{key: value for key, value in row.items() if not isinstance(value, (dict, list))} for row in rows]
    names = list(dict.fromkeys(name for row in plain for name in row))
    machine = report.get("machine")
    about = ", ".join(map(str, machine.values())) if isinstance(machine, dict) else str(machine or "")
    return {
        "title": f"{report['kind']} of {report.get('task', '?')}",
        "about": f"{report.get('date', '')} {about}",
        "notes": _as_list(report.get("verdict")) + _as_list(report.get("notes")),
        "names": names,
        "rows": [(text(row.get(names[0])), [row.get(name) for name in names[1:]]) for row in plain] if names else [],
        "images": [(file.stem, file.read_bytes()) for file in sorted(folder.glob("*.png"))],
    }


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
