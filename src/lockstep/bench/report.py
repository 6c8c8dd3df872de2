"""What a benchmark leaves: ``report.json``, ``report.md``, pictures, and a table with a small chart on the console."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lockstep.bench.tables import chart_of, table_of
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.host import cpu_name, usable_cores
from lockstep.launch.local.signals import StopRequest, exit_code
from lockstep.telemetry.files import make_folders, write_json, write_text
from lockstep.telemetry.records import versions
from lockstep.telemetry.rundir import utc_now
from lockstep.telemetry.tables import aligned, print_table, say

_BAR = 40


def machine_facts() -> dict[str, Any]:
    """Where something was measured: ``cpu``, ``cores``, ``gpus`` by name, ``torch`` and ``python``."""
    known = versions()
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "gpus": [device.name for device in detect_devices() if device.kind == "gpu"],
        "torch": known["torch"],
        "python": platform.python_version(),
        "lockstep": known["lockstep"],
    }


@dataclass
class BenchReport:
    """One benchmark: what was asked, what was measured (a row each), and what follows from it.

    ``partial``: it was stopped, by the signal ``stopped_by``; the rows are those measured until then. ``extra``: what
    this kind alone has.
    """

    kind: str
    task: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = ""
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    partial: bool = False
    stopped_by: int = 0
    date: str = field(default_factory=lambda: utc_now().isoformat())
    machine: dict[str, Any] = field(default_factory=machine_facts)
    command: list[str] = field(default_factory=lambda: list(sys.argv))

    @property
    def title(self) -> str:
        return f"{self.kind} of {self.task}"

    @property
    def exit_code(self) -> int:
        """130 or 143: stopped by a signal; 1: nothing could be measured."""
        if self.partial:
            return exit_code(self.stopped_by)
        return 0 if any(row.get("status", "ok") == "ok" for row in self.rows) else 1

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Ctrl-C or SIGTERM inside ends the measuring, not the report."""
        with StopRequest() as stop:
            try:
                yield
            except KeyboardInterrupt:
                self.partial, self.stopped_by = True, stop.requested or signal.SIGINT
                self.notes.append("stopped before everything was measured")

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "title": self.title,
            "task": self.task,
            "machine": self.machine,
            "date": self.date,
            "command": self.command,
            "settings": self.settings,
            "rows": self.rows,
            "verdict": self.verdict,
            "notes": self.notes,
            "partial": self.partial,
            **self.extra,
        }


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
        from lockstep.bench.plots import draw

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
