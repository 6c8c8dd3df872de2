"""The output of a benchmark: ``report.json``, ``report.md``, pictures, and a table on the console."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lockstep.arithmetic import ceil_div
from lockstep.hardware.detect import cpu_name, detect_devices, usable_cores
from lockstep.launch.process.signals import StopRequest, exit_code
from lockstep.rundir.files import make_folders, write_json, write_text
from lockstep.rundir.folder import utc_now, versions
from lockstep.telemetry.console import print_table, save_figure, say

#: Called with a line about the current activity.
Say = Callable[[str], None]
Row = Mapping[str, Any]


def machine_facts() -> dict[str, Any]:
    """Describe this machine: ``cpu``, ``cores``, ``gpus`` by name, and versions."""
    gpus = [device.name for device in detect_devices() if device.kind == "gpu"]
    software_versions = versions()
    software = {name: software_versions[name] for name in ("torch", "python", "lockstep")}
    return {"cpu": cpu_name(), "cores": usable_cores(), "gpus": gpus, **software}


@dataclass
class BenchReport:
    """One benchmark: its settings, a row for each measurement, and the verdict.

    ``partial``: stopped early, by the signal ``stopped_by``; the rows are those measured before. ``extra``: keys of
    this kind only.
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
        """End the measurement on Ctrl-C or SIGTERM, but keep the report."""
        with StopRequest() as stop:
            try:
                yield
            except KeyboardInterrupt:
                self.partial = True
                self.stopped_by = stop.requested or signal.SIGINT
                self.notes.append("stopped before everything was measured")

    def as_dict(self) -> dict[str, Any]:
        names = "kind title task machine date command settings rows verdict notes partial"
        return {name: getattr(self, name) for name in names.split()} | self.extra


def print_report(report: BenchReport, stream: TextIO) -> None:
    columns, rows = table_of(report.kind, report.rows)
    if rows:
        print_table(columns, rows, stream)
    for line in _findings(report):
        say(line, stream)


def write_report(report: BenchReport, folder: Path) -> list[Path]:
    """Write the report below ``folder``; returns the files. Without matplotlib there is no picture."""
    make_folders(folder)
    files = [folder / "report.json", folder / "report.md"]
    draws = importlib.util.find_spec("matplotlib") is not None
    if not draws:
        report.notes.append("no picture: matplotlib is not installed (pip install 'lockstep-train[report]')")
    write_json(files[0], report.as_dict())
    write_text(files[1], _markdown(report))
    rows = [row for row in report.rows if row.get("status", "ok") == "ok"]
    if draws and rows:
        files.append(_draw(report, rows, folder / f"{report.kind}.png"))
    return files


def _findings(report: BenchReport) -> list[str]:
    lines = ["PARTIAL: stopped before the end"] if report.partial else []
    return [*lines, *filter(None, [report.verdict]), *(f"note: {note}" for note in report.notes)]


def _markdown(report: BenchReport) -> str:
    columns, rows = table_of(report.kind, report.rows)
    table = [columns, ["---"] * len(columns), *rows]
    lines = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table)
    machine = report.machine
    findings = "\n\n".join(_findings(report))
    hardware = f"{machine['cpu']}, {machine['cores']} cores; {', '.join(machine['gpus']) or 'no GPU'}"
    about = f"{report.date}, {hardware}, torch {machine['torch']}, Python {machine['python']}"
    command = " ".join(["lockstep", *report.command[1:]])
    return f"# {report.title}\n\n{findings}\n\n{lines}\n\n{about}\n\n`{command}`\n"


#: By kind: the keys of the rows that are columns of the table. Names end in their unit.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "step": (
        *("batch_size", "precision", "compile", "status", "step_ms", "samples_per_s"),
        *("shares", "memory_mb", "tflops", "peak_share"),
    ),
    "scaling": (
        *("ranks", "strategy", "mode", "status", "global_batch", "samples_per_s", "epoch_s", "speed_up", "efficiency"),
        *("memory_mb_per_device", "shares"),
    ),
    "loader": ("num_workers", "status", "samples_per_s", "load_ms", "first_batch_s", "of_demand"),
    "comm": ("operation", "bytes", "latency_us", "algorithm_gb_s", "bus_gb_s", "status"),
    "batch-size": ("batch_size", "status", "memory_mb", "samples_per_s"),
    "forecast": (
        *("gpus", "strategy", "step_ms", "samples_per_s", "efficiency", "parts_ms", "sent_mb", "epoch_s", "run_s"),
    ),
    "lr": ("step", "lr", "loss", "smoothed"),
}
#: By kind: the key of the horizontal axis, those of the diagrams, and those that distinguish lines.
_DIAGRAMS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "step": ("batch_size", ("step_ms", "samples_per_s"), ("precision", "compile")),
    "scaling": ("ranks", ("speed_up", "efficiency", "memory_mb", "epoch_s"), ("strategy", "mode")),
    "loader": ("num_workers", ("samples_per_s",), ()),
    "comm": ("bytes", ("latency_us", "bus_gb_s"), ("operation",)),
    "batch-size": ("batch_size", ("memory_mb",), ()),
    "forecast": ("gpus", ("efficiency", "samples_per_s"), ()),
    "lr": ("lr", ("smoothed",), ()),
}
_LINEAR = {"ranks", "num_workers"}
_SHARES = {"efficiency", "peak_share"}
#: Rows of a learning-rate test that are shown; its report has all.
_SHOWN = 24


def table_of(kind: str, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and cells of a table; a key with parts has a column for each of them."""
    rows = rows[:: max(1, ceil_div(len(rows), _SHOWN))] if kind == "lr" else rows
    columns: dict[str, list[str]] = {}
    for key in _COLUMNS[kind]:
        parts = dict.fromkeys(part for row in rows if isinstance(row.get(key), dict) for part in row[key])
        for part in parts:
            name = part if key == "shares" else f"{part} {key.rpartition('_')[2]}"
            columns[name] = [_text((row.get(key) or {}).get(part), is_share=key == "shares") for row in rows]
        if not parts:
            columns[key.replace("_", " ")] = [_cell(row, key) for row in rows]
    return list(columns), [list(cells) for cells in zip(*columns.values(), strict=True)]


def _cell(row: Row, key: str) -> str:
    """Format the value of ``key``, with its low and high value if they differ."""
    low, value, high = (_text(row.get(name), is_share=key in _SHARES) for name in (f"{key}_low", key, f"{key}_high"))
    return value if low == high else f"{value} ({low}..{high})"


def _text(value: Any, *, is_share: bool) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return " ".join(_text(each, is_share=is_share) for each in value) or "-"
    if is_share:
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _draw(report: BenchReport, rows: Sequence[Row], file: Path) -> Path:
    """Draw each key of the rows over the horizontal axis, with a line for each group of rows."""
    from matplotlib.figure import Figure

    x, diagrams, keys = _DIAGRAMS[report.kind]
    rows = _with_one_device(rows) if report.kind == "scaling" else rows
    columns = min(len(diagrams), 3)
    lines = ceil_div(len(diagrams), 3)
    figure = Figure(figsize=(6 * columns, 4.2 * lines), layout="constrained")
    for number, y in enumerate(diagrams, start=1):
        axis = figure.add_subplot(lines, columns, number)
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if row.get(y) is not None:
                groups.setdefault(", ".join(f"{key} {row[key]}" for key in keys), []).append(row)
        for label, group in groups.items():
            axis.plot([row[x] for row in group], [row[y] for row in group], "o-", label=label)
        x_scale = "linear" if x in _LINEAR else "log"
        axis.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "), xscale=x_scale)
        if keys and groups:
            axis.legend(fontsize="small")
    devices = ", ".join(report.settings.get("devices", ()))
    figure.suptitle(report.title + (f" ({devices})" if devices else ""))
    return save_figure(figure, file)


def _with_one_device(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of each strategy after those of one device."""
    strategies = dict.fromkeys(row["strategy"] for row in rows if row["ranks"] > 1)
    return [
        {**row, "strategy": strategy}
        for strategy in strategies
        for row in rows
        if row["ranks"] == 1 or row["strategy"] == strategy
    ]
