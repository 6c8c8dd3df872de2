"""The output of a benchmark: ``report.json``, ``report.md``, pictures, and a table with a chart on the console.

Pictures are drawn with matplotlib (extra ``report``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import signal
import statistics
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lockstep.bench.tables import Row, chart_of, size, table_of
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.host import cpu_name, usable_cores
from lockstep.launch.local.signals import StopRequest, exit_code
from lockstep.telemetry.files import make_folders, write_json, write_text
from lockstep.telemetry.pictures import save_figure
from lockstep.telemetry.records import versions
from lockstep.telemetry.rundir import utc_now
from lockstep.telemetry.tables import aligned, print_table, say


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


#: Called with what is being done.
Say = Callable[[str], None]


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
        names = "kind title task machine date command settings rows verdict notes partial"
        return {name: getattr(self, name) for name in names.split()} | self.extra


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


#: Panels in a row.
_COLUMNS = 3


def draw(report: BenchReport, folder: Path) -> list[Path]:
    """Draw what there is to draw; the files written."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.get("status", "ok") == "ok"]
    if not rows:
        return []
    panels, painter = _PAINTERS[report.kind]
    columns, lines = min(panels, _COLUMNS), -(-panels // _COLUMNS)
    figure = Figure(figsize=(6 * columns, 4.2 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for unused in axes[panels:]:
        unused.set_visible(False)
    painter(axes[:panels], rows, report)
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    figure.suptitle(f"{report.title} ({', '.join(report.settings.get('devices', []))})".replace(" ()", ""))
    return [save_figure(figure, folder / f"{report.kind}.png")]


def _line(axis: Any, rows: Iterable[Row], x: str, y: str, marker: str = "o", **style: Any) -> None:
    """The value ``y`` of the rows over ``x``; rows in which it is not known are left out."""
    points = [(row[x], row[y]) for row in rows if row.get(y) is not None]
    axis.plot([a for a, _ in points], [b for _, b in points], marker=marker, **style)


def _stacked(axis: Any, rows: Sequence[Row], labels: Sequence[str], **texts: str) -> None:
    """A bar for each row, of the parts of its step."""
    bottom = [0.0] * len(rows)
    for part in rows[0]["parts_ms"]:
        heights = [row["parts_ms"][part] for row in rows]
        axis.bar(labels, heights, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axis.set(**texts)


def _step(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    labels = [
        f"{row['batch_size']}\n{row['precision']}{chr(10) + 'compiled' if row['compile'] else ''}" for row in rows
    ]
    _stacked(axes[0], rows, labels, ylabel="ms a step (mean)", xlabel="batch size and precision")
    for precision, compiled in dict.fromkeys((row["precision"], row["compile"]) for row in rows):
        line = [row for row in rows if (row["precision"], row["compile"]) == (precision, compiled)]
        _line(axes[1], line, "batch_size", "samples_per_s", label=precision + ", compiled" * bool(compiled))
    axes[1].set(xlabel="batch size per device", ylabel="samples/s", xscale="log", ylim=(0, None))


def _scaling(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    rows = [{**row, "utilisation": _mean(row["utilisation_per_device"])} for row in rows if row.get("speed_up")]
    most = max((row["ranks"] for row in rows), default=1)
    axes[0].plot([1, most], [1, most], color="0.7", linestyle=":", label="ideal")
    axes[1].axhline(1, color="0.7", linestyle=":")
    panels = {
        "speed_up": "speed-up",
        "efficiency": "efficiency",
        "memory_mb": "memory of the fullest device, MB",
        "epoch_s": "time for an epoch of training, s",
        "utilisation": "utilisation, mean of the devices",
    }
    for strategy, mode in dict.fromkeys((row["strategy"], row["mode"]) for row in rows if row["ranks"] > 1):
        line = [row for row in rows if row["mode"] == mode and (row["ranks"] == 1 or row["strategy"] == strategy)]
        for axis, name in zip(axes, panels, strict=True):
            _line(axis, line, "ranks", name, label=f"{strategy}, {mode}" if axis is axes[0] else None)
        if mode == report.settings["modes"][0] and any(row.get("claimed_speed_up") for row in line):
            claimed = {"marker": "x", "linestyle": "--", "label": f"{strategy}, claimed"}
            _line(axes[0], line, "ranks", "claimed_speed_up", **claimed)
    for axis, label in zip(axes, panels.values(), strict=True):
        axis.set_xticks(sorted({row["ranks"] for row in rows}))
        axis.set(xlabel="devices", ylabel=label, ylim=(0, None))


def _mean(shares: Sequence[float | None]) -> float | None:
    """``None`` unless every device has reported how busy it was."""
    known = [share for share in shares if share is not None]
    return statistics.fmean(known) if len(known) == len(shares) else None


def _loader(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    axes[0].bar([str(row["num_workers"]) for row in rows], [row["samples_per_s"] for row in rows])
    demand = report.extra.get("demand_samples_per_s")
    if demand:
        axes[0].axhline(demand, color="C3", label="what the step takes")
    axes[0].set(xlabel="loader workers", ylabel="samples/s")


def _comm(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    for place, operation in enumerate(dict.fromkeys(row["operation"] for row in rows)):
        line = [row for row in rows if row["operation"] == operation]
        sizes, colour = [row["bytes"] for row in line], f"C{place}"
        _line(axes[0], line, "bytes", "latency_us", ".", linestyle="", color=colour, label=operation)
        _line(axes[1], line, "bytes", "bus_gb_s", ".", color=colour)
        fit = report.extra.get("fits", {}).get(operation)
        if fit:
            times = [(fit["alpha_s"] + fit["beta_s_per_byte"] * count) * 1e6 for count in sizes]
            axes[0].plot(sizes, times, color=colour, linewidth=1)
    axes[0].set(xlabel="message, bytes", ylabel="latency, µs (line: α + β·bytes)", xscale="log", yscale="log")
    axes[1].set(xlabel=f"message, bytes (to {size(rows[-1]['bytes'])})", ylabel="bus bandwidth, GB/s", xscale="log")


def _batch_size(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    _line(axes[0], rows, "batch_size", "memory_mb")
    out = [row["batch_size"] for row in report.rows if row["status"] == "out of memory"]
    if out:
        axes[0].axvline(min(out), color="C3", label="out of memory")
    axes[0].set(xlabel="batch size per device", ylabel="memory of the fullest device, MB", xscale="log")


def _lr(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    _line(axes[0], rows, "lr", "loss", "", color="0.8", label="loss")
    _line(axes[0], rows, "lr", "smoothed", "", label="smoothed")
    proposal = report.extra.get("proposal")
    if proposal:
        axes[0].axvline(proposal["lr"], color="C2", label=f"proposed: {proposal['lr']:.2g}")
    least = min(row["smoothed"] for row in rows)
    top = max(rows[0]["smoothed"], least) * 1.5
    axes[0].set(xlabel="learning rate", ylabel="loss", xscale="log", ylim=(None, top if top > least else None))


def _forecast(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    gpus = [row["gpus"] for row in rows]
    _line(axes[0], rows, "gpus", "efficiency")
    low, high = ([row[f"efficiency_{end}"] for row in rows] for end in ("low", "high"))
    axes[0].fill_between(gpus, low, high, alpha=0.2)
    axes[0].set(xlabel="GPUs", ylabel="efficiency", xscale="log", ylim=(0, 1.05))
    _stacked(axes[1], rows, list(map(str, gpus)), xlabel="GPUs", ylabel="ms a step")


#: By kind of benchmark: the number of panels, and what draws them.
_PAINTERS: dict[str, tuple[int, Callable[[Sequence[Any], Sequence[Row], BenchReport], None]]] = {
    "step": (2, _step),
    "scaling": (5, _scaling),
    "loader": (1, _loader),
    "comm": (2, _comm),
    "batch-size": (1, _batch_size),
    "lr": (1, _lr),
    "forecast": (2, _forecast),
}
