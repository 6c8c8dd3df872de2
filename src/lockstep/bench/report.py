"""The output of a benchmark: ``report.json``, ``report.md``, pictures, and a table with a chart on the console."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from lockstep.bench.plots import draw
from lockstep.bench.results import BenchReport
from lockstep.bench.tables import chart_of, table_of
from lockstep.telemetry.files import make_folders, write_json, write_text
from lockstep.telemetry.tables import aligned, print_table, say

_BAR = 40


def new_folder(kind: str, save_dir: Path | None, runs_dir: Path) -> Path:
    """Where the report goes: ``save_dir``, or a new folder below ``runs_dir``."""
    return save_dir or runs_dir / f"bench-{kind}-{uuid.uuid4().hex[:8]}"


def print_report(report: BenchReport, stream: TextIO) -> None:
    columns, rows = table_of(report.kind, report.rows)
    if rows:
        print_table(columns, rows, stream)
        for line in bars(*chart_of(report.kind, report.rows)):
            say(line, stream)
    for line in _findings(report):
        say(line, stream)


def bars(name: str, values: Sequence[tuple[str, float]]) -> list[str]:
    """A bar for each ``(label, value)``, the longest one :data:`_BAR` characters; nothing where there is one value."""
    if len(values) < 2:
        return []
    most = max(value for _, value in values) or 1.0
    rows = [[label, "#" * round(_BAR * value / most), f"{value:,.4g}"] for label, value in values]
    return [name, *aligned(rows), ""]


def write_report(report: BenchReport, folder: Path) -> list[Path]:
    """Write the report below ``folder``; the files written. Without matplotlib there are no pictures, as a note says.

    Raises:
        StorageError: it cannot be written.
    """
    make_folders(folder)
    files = [folder / "report.json", folder / "report.md"]
    draws = importlib.util.find_spec("matplotlib") is not None
    if not draws:
        report.notes.append("no picture: matplotlib is not installed (pip install 'lockstep-train[report]')")
    write_json(files[0], report.as_dict())
    write_text(files[1], _markdown(report))
    if draws and report.rows:
        files += draw(report, folder)
    return files


def _findings(report: BenchReport) -> list[str]:
    lines = ["PARTIAL: stopped before the end"] if report.partial else []
    return [*lines, *filter(None, [report.verdict]), *(f"note: {note}" for note in report.notes)]


def _markdown(report: BenchReport) -> str:
    columns, rows = table_of(report.kind, report.rows)
    table = [columns, ["---"] * len(columns), *rows]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table]
    machine = report.machine
    where = f"{machine['cpu']}, {machine['cores']} cores"
    where += f"; {', '.join(machine['gpus'])}" if machine["gpus"] else "; no GPU"
    about = f"{report.date}, {where}, torch {machine['torch']}, Python {machine['python']}"
    findings = "\n\n".join(_findings(report))
    command = " ".join(["lockstep", *report.command[1:]])
    return f"# {report.title}\n\n{findings}\n\n" + "\n".join(lines) + f"\n\n{about}\n\n`{command}`\n"
