"""The output of a benchmark: ``report.json``, ``report.md``, pictures, and a table on the console."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from lockstep.hardware.detect import cpu_name, detect_devices, usable_cores
from lockstep.launch.process.signals import StopRequest, exit_code
from lockstep.rundir.files import make_folders, write_json, write_text
from lockstep.rundir.folder import utc_now, versions
from lockstep.telemetry.console import print_table, save_figure, say

#: Called with a line about the current activity.
Say = Callable[[str], None]
Row = Mapping[str, Any]
#: A key of the rows, a key and the format of its value, or a function that makes the text of a row.
Cell = str | tuple[str, str] | Callable[[Row], str]


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


def plain(value: float) -> str:
    """Format with four significant digits, without an exponent for large numbers."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def text(value: Any, form: str = "") -> str:
    """Format a value or a list of values; ``-``: unknown."""
    if isinstance(value, list | tuple):
        return " ".join(text(each, form) for each in value) or "-"
    if value is None:
        return "-"
    return plain(value) if isinstance(value, float) and not form else format(value, form)


def size(count: float) -> str:
    """Format bytes in the units of message sizes: 1 KB is 1024."""
    units = ("B", "KB", "MB", "GB")
    unit = 0
    while count >= 1024 and unit < len(units) - 1:
        count = count / 1024
        unit = unit + 1
    return f"{count:.4g} {units[unit]}"


def _shares(*parts: str) -> dict[str, Cell]:
    def share(part: str) -> Cell:
        return lambda row: text((row.get("shares") or {}).get(part), ".1%")

    return {part: share(part) for part in parts}


def _between(key: str) -> Cell:
    """Format a median with its quartiles."""

    def cell(row: Row) -> str:
        if row.get(key) is None:
            return "-"
        low = row[f"{key}_low"]
        high = row[f"{key}_high"]
        return plain(row[key]) + (f" ({plain(low)}..{plain(high)})" if low < high else "")

    return cell


def _part(name: str) -> Cell:
    return lambda row: text(row["parts_ms"][name] / row["step_ms"], ".1%")


#: By kind: the headings of the table, and the cells of each column.
_TABLES: dict[str, dict[str, Cell]] = {
    "step": {
        "batch": "batch_size",
        "precision": "precision",
        "compile": lambda row: "on" if row.get("compile") else "off",
        "status": "status",
        "step ms": _between("step_ms"),
        "samples/s": "samples_per_s",
        **_shares("data", "forward", "backward", "communication", "wait", "optimizer", "other"),
        "memory MB": ("memory_mb", ",.0f"),
        "TFLOP/s": ("tflops", ".3g"),
        "of peak": lambda row: "unknown" if row.get("peak_share") is None else text(row["peak_share"], ".1%"),
    },
    "scaling": {
        "devices": "ranks",
        "strategy": "strategy",
        "mode": "mode",
        "status": "status",
        "global batch": "global_batch",
        "samples/s": _between("samples_per_s"),
        "claimed samples/s": ("claimed_samples_per_s", ".4g"),
        "epoch s": "epoch_s",
        "speed-up": ("speed_up", ".2f"),
        "claimed speed-up": ("claimed_speed_up", ".2f"),
        "efficiency": ("efficiency", ".1%"),
        "memory MB": ("memory_mb_per_device", ",.0f"),
        "claimed memory GB": ("claimed_memory_gb", "g"),
        "utilisation": ("utilisation_per_device", ".0%"),
        **_shares("data", "compute", "communication", "wait"),
    },
    "loader": {
        "workers": "num_workers",
        "status": "status",
        "samples/s": "samples_per_s",
        "load ms": ("load_ms", ".3g"),
        "transfer ms": ("transfer_ms", ".3g"),
        "first batch s": ("first_batch_s", ".2f"),
        "times the need": ("of_demand", ",.2f"),
    },
    "comm": {
        "operation": "operation",
        "size": lambda row: size(row["bytes"]),
        "latency µs": "latency_us",
        "algorithm GB/s": ("algorithm_gb_s", ".3g"),
        "bus GB/s": ("bus_gb_s", ".3g"),
        "status": "status",
    },
    "batch-size": {
        "batch": "batch_size",
        "status": "status",
        "memory MB": ("memory_mb", ",.0f"),
        "samples/s": "samples_per_s",
    },
    "forecast": {
        "GPUs": "gpus",
        "strategy": "strategy",
        "step ms": "step_ms",
        "samples/s": _between("samples_per_s"),
        "efficiency": lambda r: f"{r['efficiency']:.0%} ({r['efficiency_low']:.0%}..{r['efficiency_high']:.0%})",
        **{name: _part(name) for name in ("compute", "communication", "straggler", "data")},
        "sent MB": "sent_mb",
    },
    "lr": {"step": "step", "learning rate": ("lr", ".3g"), "loss": ("loss", ".5g"), "smoothed": ("smoothed", ".5g")},
}
#: Columns that are left out if no row has a value.
_CLAIMED = {"claimed samples/s", "claimed speed-up", "claimed memory GB"}
_OPTIONAL = _CLAIMED | {"wait", "communication", "TFLOP/s", "transfer ms"}
#: Rows of a learning-rate test that are shown; its report has all.
_SHOWN = 24


def table_of(kind: str, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    rows = rows[:: max(1, -(-len(rows) // _SHOWN))] if kind == "lr" else rows
    columns = {heading: [_text_of(cell, row) for row in rows] for heading, cell in _TABLES[kind].items()}
    for heading in _OPTIONAL & columns.keys():
        if set(columns[heading]) <= {"-", "0.0%"}:
            del columns[heading]
    return list(columns), [list(cells) for cells in zip(*columns.values(), strict=True)]


def _text_of(cell: Cell, row: Row) -> str:
    if callable(cell):
        return cell(row)
    key, form = (cell, "") if isinstance(cell, str) else cell
    return text(row.get(key), form)


class Panel(NamedTuple):
    """A diagram: lines of ``y`` over ``x``, one for each group of rows alike in ``by``; or the parts of each step."""

    x: str
    y: str
    xlabel: str
    ylabel: str
    by: tuple[str, ...] = ()
    #: The logarithmic axes: ``x`` or ``xy``.
    log: str = ""


_PARTS = "parts_ms"
_SCALED = {
    "speed_up": "speed-up",
    "efficiency": "efficiency",
    "memory_mb": "memory of the fullest device, MB",
    "epoch_s": "time for an epoch of training, s",
    "utilisation": "utilisation, mean of the devices",
}
_PANELS = {
    "step": [
        Panel("", _PARTS, "batch size, precision", "ms a step (mean)", ("batch_size", "precision", "compile")),
        Panel("batch_size", "samples_per_s", "batch size per device", "samples/s", ("precision", "compile"), "x"),
    ],
    "scaling": [Panel("ranks", key, "devices", label, ("strategy", "mode")) for key, label in _SCALED.items()],
    "loader": [Panel("num_workers", "samples_per_s", "loader workers", "samples/s")],
    "comm": [
        Panel("bytes", "latency_us", "message, bytes", "latency, µs", ("operation",), "xy"),
        Panel("bytes", "bus_gb_s", "message, bytes", "bus bandwidth, GB/s", ("operation",), "x"),
    ],
    "batch-size": [
        Panel("batch_size", "memory_mb", "batch size per device", "memory of the fullest device, MB", (), "x")
    ],
    "lr": [Panel("lr", "smoothed", "learning rate", "smoothed loss", (), "x")],
    "forecast": [
        Panel("gpus", "efficiency", "GPUs", "efficiency", (), "x"),
        Panel("", _PARTS, "GPUs", "ms a step", ("gpus",)),
    ],
}


def _draw(report: BenchReport, rows: Sequence[Row], file: Path) -> Path:
    from matplotlib.figure import Figure

    panels = _PANELS[report.kind]
    columns = min(len(panels), 3)
    lines = -(-len(panels) // 3)
    figure = Figure(figsize=(6 * columns, 4.2 * lines), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axis = figure.add_subplot(lines, columns, number)
        if panel.y == _PARTS:
            names = [_name(row, panel.by, "\n") for row in rows]
            bottom = np.zeros(len(rows))
            for part in rows[0][_PARTS]:
                heights = np.array([row[_PARTS][part] for row in rows])
                axis.bar(names, heights, bottom=bottom, label=part)
                bottom += heights
        else:
            _draw_lines(axis, panel, _with_one_device(rows) if report.kind == "scaling" else rows)
            _draw_marks(axis, panel, report)
        axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel, **{f"{name}scale": "log" for name in panel.log})
        if "y" not in panel.log and panel.y != "smoothed":
            axis.set_ylim(bottom=0)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    devices = ", ".join(report.settings.get("devices", ()))
    figure.suptitle(report.title + (f" ({devices})" if devices else ""))
    return save_figure(figure, file)


def _draw_lines(axis: Any, panel: Panel, rows: Sequence[Row]) -> None:
    """Draw a line for each group, without unknown values."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_name(row, panel.by, ", "), []).append(row)
    claimed = f"claimed_{panel.y}"
    for name, group in groups.items():
        for key, label, style in ((panel.y, name, "o-"), (claimed, f"{name}, claimed", "x--")):
            if points := [(row[panel.x], row[key]) for row in group if row.get(key) is not None]:
                axis.plot(*zip(*points, strict=True), style, label=label)


def _name(row: Row, by: Sequence[str], between: str) -> str:
    return between.join(key if row[key] is True else str(row[key]) for key in by if row[key] is not False)


def _with_one_device(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of each strategy after the row of one device."""
    compared: list[Row] = []
    for row in rows:
        if row.get("speed_up"):
            busy = row["utilisation_per_device"]
            compared.append({**row, "utilisation": None if None in busy else statistics.fmean(busy)})
    baseline = [row for row in compared if row["ranks"] == 1]
    strategies = dict.fromkeys(row["strategy"] for row in compared if row["ranks"] > 1)
    return [
        {**row, "strategy": strategy}
        for strategy in strategies
        for row in (*baseline, *(row for row in compared if row["strategy"] == strategy))
    ]


def _draw_marks(axis: Any, panel: Panel, report: BenchReport) -> None:
    """Draw reference values: ideal speed-up, demand, proposal, fits, failures."""
    if panel.y == "speed_up":
        axis.axline((1, 1), slope=1, color="0.7", linestyle=":", label="ideal")
    elif demand := report.extra.get("demand_samples_per_s"):
        axis.axhline(demand, color="C3", label="demand of the step")
    elif proposal := report.extra.get("proposal"):
        axis.axvline(proposal["lr"], color="C2", label=f"proposed: {proposal['lr']:.2g}")
    elif panel.y == "latency_us":
        for number, fit in enumerate(report.extra.get("fits", {}).values()):
            sizes = np.array(report.settings["sizes"])
            axis.plot(sizes, (fit["alpha_s"] + fit["beta_s_per_byte"] * sizes) * 1e6, f"C{number}:")
    elif report.kind == "batch-size":
        for row in report.rows:
            if row["status"] == "out of memory":
                axis.axvline(row["batch_size"], color="C3", linestyle=":")
