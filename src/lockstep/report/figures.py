"""Pictures of runs, drawn with matplotlib (the extra ``report``), without a display and without its global state."""

from __future__ import annotations

import io
import math
import re
import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from lockstep.errors import UnsupportedError
from lockstep.report.source import Row, RunData
from lockstep.telemetry.pictures import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's palette, distinguishable with colour blindness (jfly.uni-koeln.de/color).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

#: Up to this number, each rank has its own line.
MAX_RANKS = 16


@dataclass(frozen=True)
class Picture:
    """A figure with its name and title."""

    name: str
    title: str
    figure: Figure

    @property
    def file_name(self) -> str:
        """``name`` as a valid file name: a metric may be ``val_acc/class 1``. A checksum keeps changed names unique."""
        plain = re.sub(r"[^\w.-]", "_", self.name, flags=re.ASCII)[:120]
        changed = f"-{zlib.crc32(self.name.encode(errors='replace')):08x}" if plain != self.name else ""
        return f"{plain}{changed}.png"

    def save(self, folder: Path) -> Path:
        """Write it to ``folder`` as a PNG."""
        return save_figure(self.figure, folder / self.file_name, dpi=150)

    def svg(self) -> str:
        """The picture as SVG text for a page; the same for the same data."""
        import matplotlib

        out = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": self.name, "svg.fonttype": "none"}):
            self.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        return text[text.index("<svg") :]


def pictures(runs: Sequence[RunData]) -> list[Picture]:
    """All pictures that ``runs`` have data for: curves of all of them overlaid, matrices one by one.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    require_matplotlib()
    # Evaluations between epochs have a step, but no epoch of their own.
    against = "step" if any(run.evaluations for run in runs) else "epoch"
    busy = _system(runs, "utilisation", host=("CPU", "cpu"), factor=100)
    used = _system(runs, "memory_gb", host=("host", "memory_gb"))
    loss = _lines(runs, _steps, "step", "loss", "train")
    loss += _lines(runs, _evaluated, "step", "val_loss", "validation", dashed=True)
    made = [
        _curves("loss", "Loss", sorted(loss, key=lambda line: line.run), "step", log=True),
        *(_curves(name, name, _lines(runs, _evaluated, against, name), against) for name in _metrics(runs)),
        _curves("lr", "Learning rate", _lines(runs, _steps, "step", "lr"), "step"),
        _curves("throughput", "Throughput, samples/s", _lines(runs, _steps, "step", "samples_per_s"), "step"),
        _curves("data_wait", "Share of time waiting for data", _lines(runs, _steps, "step", "data_wait_share"), "step"),
        _curves("memory", "Memory per rank, GB", _rank_lines(runs, "memory_gb"), "step"),
        _curves("step_time", "Time of a step, ms", _rank_lines(runs, "step_s", 1e3), "step"),
        _curves(
            "own_time", "Time of a step before waiting for other ranks, ms", _rank_lines(runs, "own_s", 1e3), "step"
        ),
        _curves("utilisation", "Utilisation of devices and CPU, %", busy, "minutes"),
        _curves("device_memory", "Memory of devices and host, GB", used, "minutes"),
        _curves("power", "Power of devices, W", _system(runs, "power_w"), "minutes"),
    ]
    made += [_matrix(run, name, table) for run in runs for name, table in run.tables.items()]
    return [picture for picture in made if picture is not None]


def require_matplotlib() -> None:
    """Raises :class:`UnsupportedError` without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "pictures need matplotlib, which is not installed", fix="pip install 'lockstep-train[report]'"
        ) from None


@dataclass(frozen=True)
class Line:
    label: str
    run: int
    x: list[float]
    y: list[float]
    dashed: bool = False


def _curves(name: str, title: str, lines: Sequence[Line], x_label: str, *, log: bool = False) -> Picture | None:
    lines = [line for line in lines if line.y]
    if not lines:
        return None
    figure, axes = new_figure(title)
    shades: dict[int, int] = {}
    for line in lines:
        shade = shades[line.run] = shades.get(line.run, -1) + 1
        axes.plot(
            line.x,
            line.y,
            color=COLOURS[line.run % len(COLOURS)],
            linestyle="--" if line.dashed else "-",
            alpha=max(0.35, 1 - 0.15 * shade),
            linewidth=1.4,
            marker="o" if len(line.x) < 3 else None,
            markersize=3,
        )
    axes.set_xlabel(x_label)
    if log and all(value > 0 for line in lines for value in line.y):
        axes.set_yscale("log")
    if len(lines) > 1:
        legend = axes.legend(axes.lines, [line.label for line in lines], fontsize="small", frameon=False)
        for entry in legend.get_texts():
            entry.set_parse_math(False)
    return Picture(name, title, figure)


def new_figure(title: str) -> tuple[Figure, Axes]:
    """An empty figure with one set of axes, in the style of all reports."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize="medium").set_parse_math(False)  # a run may be named $a$
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _named(runs: Sequence[RunData], run: RunData, what: str = "") -> str:
    if len(runs) == 1:
        return what or run.label
    return f"{run.label} {what}".strip()


def _points(rows: Sequence[Row], x: str, y: str, factor: float = 1.0) -> tuple[list[float], list[float]]:
    pairs = [(row[x], row[y]) for row in rows if _is_number(row.get(x)) and _is_number(row.get(y))]
    return [float(a) for a, _ in pairs], [float(b) * factor for _, b in pairs]


def _lines(
    runs: Sequence[RunData],
    rows: Callable[[RunData], Sequence[Row]],
    x: str,
    y: str,
    what: str = "",
    *,
    dashed: bool = False,
) -> list[Line]:
    """A line of each run: ``y`` over ``x`` in its ``rows``."""
    return [
        Line(_named(runs, run, what), index, *_points(rows(run), x, y), dashed=dashed) for index, run in enumerate(runs)
    ]


def _steps(run: RunData) -> Sequence[Row]:
    return run.steps


def _evaluated(run: RunData) -> list[Row]:
    """Rows of epochs and of the evaluations between them, by step."""
    rows = [*run.epochs, *run.evaluations]
    return sorted(rows, key=lambda row: row["step"] if _is_number(row.get("step")) else math.inf)


def _metrics(runs: Sequence[RunData]) -> list[str]:
    """Names of validation metrics, as in ``metrics.json``; the loss has its own picture."""
    names = {name for run in runs for row in _evaluated(run) for name, value in row.items() if _is_number(value)}
    return sorted(name for name in names if name.startswith("val_") and name != "val_loss")


def _rank_lines(runs: Sequence[RunData], name: str, factor: float = 1.0) -> list[Line]:
    lines = []
    for index, run in enumerate(runs):
        lines += [
            Line(_named(runs, run, label), index, *_points(rows, "step", name, factor))
            for label, rows in _by_rank(run.ranks, name).items()
        ]
    return lines


def _by_rank(rows: Sequence[Row], name: str) -> dict[str, list[Row]]:
    """The value ``name`` of each rank over the steps; of many ranks the least, the median and the most."""
    found: dict[int, list[Row]] = {}
    extremes: list[Row] = []
    for row in rows:
        states = [state for state in row.get("ranks") or () if isinstance(state.get("rank"), int)]
        for state in states:
            found.setdefault(state["rank"], []).append({"step": row.get("step"), name: state.get(name)})
        values = [state[name] for state in states if _is_number(state.get(name))]
        if values:
            middle = statistics.median(values)
            extremes.append({"step": row.get("step"), "least": min(values), "median": middle, "most": max(values)})
    if len(found) <= MAX_RANKS:
        return {f"rank {rank}": found[rank] for rank in sorted(found)}
    names = ("least", "median", "most")
    return {f"{end} of {len(found)} ranks": [{"step": r["step"], name: r[end]} for r in extremes] for end in names}


def _system(
    runs: Sequence[RunData], name: str, *, host: tuple[str, str] | None = None, factor: float = 1.0
) -> list[Line]:
    """``name`` of each device over minutes; ``host``: label and name of the host's own value."""
    lines = []
    for index, run in enumerate(runs):
        for node, rows in run.system.items():
            rows = [row for row in rows if _is_number(row.get("time"))]
            series: dict[str, tuple[list[float], list[float]]] = {}
            for row in rows:
                values = {str(device.get("id")): device.get(name) for device in _mappings(row.get("devices"))}
                for own in _mappings([row.get("host")]):
                    values |= {host[0]: own.get(host[1])} if host else {}
                for label, value in values.items():
                    if _is_number(value):
                        x, y = series.setdefault(label, ([], []))
                        x.append((row["time"] - rows[0]["time"]) / 60)
                        y.append(value * factor)
            place = f"node {node} " if len(run.system) > 1 else ""
            lines += [Line(_named(runs, run, f"{place}{label}"), index, x, y) for label, (x, y) in series.items()]
    return lines


def _mappings(values: Any) -> list[Row]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _matrix(run: RunData, name: str, table: Sequence[Sequence[float]]) -> Picture:
    """Rows are true classes; shades are shares of a row, numbers are counts. Square ones show recall and precision."""
    figure, axes = new_figure(f"{name.replace('_', ' ')} of {run.label}")
    figure.set_size_inches(4.8, 4.4)
    axes.grid(False)
    shares = [[value / (sum(row) or 1) for value in row] for row in table]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(table) <= 20:
        for i, row in enumerate(table):
            for j, value in enumerate(row):
                colour = "white" if shares[i][j] > 0.6 else "black"
                axes.text(j, i, f"{value:g}", ha="center", va="center", fontsize="small", color=colour)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if len(table) == len(table[0]) <= 20:
        names = [name.replace("$", r"\$")[:24] for name in run.class_names]
        names = names if len(names) == len(table) else [str(number) for number in range(len(table))]
        rows = zip(names, table, strict=True)
        axes.set_yticks(range(len(table)), [f"{name} ({_share(row, i)})" for i, (name, row) in enumerate(rows)])
        columns = zip(names, zip(*table, strict=True), strict=True)
        labels = [f"{name} ({_share(column, i)})" for i, (name, column) in enumerate(columns)]
        axes.set_xticks(range(len(table)), labels, rotation=90)
        axes.set_ylabel("true class (recall)")
        axes.set_xlabel("predicted class (precision)")
    return Picture(f"{name}-{run.record.id}", f"{name.replace('_', ' ')} of {run.label}", figure)


def _share(counts: Sequence[float], place: int) -> str:
    return f"{counts[place] / sum(counts):.2f}" if sum(counts) else "none"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
