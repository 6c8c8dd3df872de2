"""Pictures of runs, drawn with matplotlib (the extra ``report``), without a display and without its global state."""

from __future__ import annotations

import io
import math
import re
import statistics
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from lockstep.errors import UnsupportedError
from lockstep.lab.report.source import Row, RunData
from lockstep.rundir.folder import RunDir
from lockstep.rundir.groups import Grouping
from lockstep.telemetry.console import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's palette, distinguishable with colour blindness (jfly.uni-koeln.de/color).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


@dataclass(frozen=True)
class Picture:
    name: str
    title: str
    figure: Figure

    def save(self, folder: Path) -> Path:
        """Write it to ``folder`` as a PNG. A metric may be `val_acc/class 1`: a checksum keeps changed names unique."""
        plain = re.sub(r"[^\w.-]", "_", self.name, flags=re.ASCII)[:120]
        changed = f"-{zlib.crc32(self.name.encode(errors='replace')):08x}" if plain != self.name else ""
        return save_figure(self.figure, folder / f"{plain}{changed}.png", dpi=150)

    def svg(self) -> str:
        """Draw the picture as SVG text for a page; the same for the same data."""
        import matplotlib

        out = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": self.name, "svg.fonttype": "none"}):
            self.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        return text[text.index("<svg") :]


@dataclass(frozen=True)
class Line:
    """A curve of the run with this index; ``name`` is empty if a run has one curve."""

    run: int
    name: str
    x: list[float]
    y: list[float]
    dashed: bool = False


def pictures(runs: Sequence[RunData]) -> list[Picture]:
    """Draw all pictures that ``runs`` have data for: curves of all of them overlaid, matrices one by one."""
    require_matplotlib()

    def lines(
        rows: Callable[[RunData], Iterable[Row]], x: str, y: str, name: str = "", *, dashed: bool = False
    ) -> list[Line]:
        return [Line(index, name, *_points(rows(run), x, y), dashed) for index, run in enumerate(runs)]

    def steps(run: RunData) -> Sequence[Row]:
        return run.steps

    # Evaluations between epochs have a step, but no epoch.
    against = "step" if any(run.evaluations for run in runs) else "epoch"
    loss = lines(steps, "step", "loss", "train") + lines(_evaluated, "step", "val_loss", "validation", dashed=True)
    curves: list[tuple[str, str, list[Line], str]] = [
        ("loss", "Loss", sorted(loss, key=lambda line: line.run), "step"),
        *((name, name, lines(_evaluated, against, name), against) for name in _metrics(runs)),
        ("lr", "Learning rate", lines(steps, "step", "lr"), "step"),
        ("throughput", "Throughput, samples/s", lines(steps, "step", "samples_per_s"), "step"),
        ("data_wait", "Share of time waiting for data", lines(steps, "step", "data_wait_share"), "step"),
    ]
    drawn = [
        _curves(runs, name, title, [line for line in candidates if line.y], x) for name, title, candidates, x in curves
    ]
    drawn += [_matrix(run, name, table) for run in runs for name, table in run.tables.items()]
    return [picture for picture in drawn if picture is not None]


def group_pictures(grouping: Grouping) -> list[Picture]:
    """Draw curves over epochs of the metric and losses: each group's mean in a band of its standard deviation.

    At most as many groups as there are colours, the best ones.
    """
    require_matplotlib()
    epochs = [[RunDir(Path(run["path"])).epochs() for run in group.runs] for group in grouping.groups[: len(COLOURS)]]
    drawn = []
    for metric in dict.fromkeys([grouping.metric, "val_loss", "train_loss"]):
        figure, axes = _new_figure(metric)
        for group, rows_of_runs, colour in zip(grouping.groups, epochs, COLOURS, strict=False):
            values: dict[float, list[float]] = {}
            for rows in rows_of_runs:
                for epoch, value in zip(*_points(rows, "epoch", metric), strict=True):
                    values.setdefault(epoch, []).append(value)
            if not values:
                continue
            means = [statistics.fmean(row) for row in values.values()]
            deviations = [statistics.stdev(row) if len(row) > 1 else 0.0 for row in values.values()]
            label = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in group.settings.items())
            axes.plot(list(values), means, color=colour, linewidth=1.4, label=label or "all runs")
            low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
            high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
            axes.fill_between(list(values), low, high, color=colour, alpha=0.18, linewidth=0)
        if axes.lines:
            axes.set_xlabel("epoch")
            for entry in axes.legend(fontsize="small", frameon=False).get_texts():
                entry.set_parse_math(False)
            drawn.append(Picture(metric, metric, figure))
    return drawn


def require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        problem = "pictures need matplotlib, which is not installed"
        raise UnsupportedError(problem, fix="pip install 'lockstep-train[report]'") from None


def _curves(runs: Sequence[RunData], name: str, title: str, lines: Sequence[Line], x_label: str) -> Picture | None:
    if not lines:
        return None
    figure, axes = _new_figure(title)
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
    if name == "loss" and all(value > 0 for line in lines for value in line.y):
        axes.set_yscale("log")
    if len(lines) > 1:
        named = [(runs[line.run].label, line.name) for line in lines]
        labels = [f"{label} {curve}".strip() if len(runs) > 1 else curve or label for label, curve in named]
        legend = axes.legend(axes.lines, labels, fontsize="small", frameon=False)
        for entry in legend.get_texts():
            entry.set_parse_math(False)
    return Picture(name, title, figure)


def _new_figure(title: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize="medium").set_parse_math(False)  # a run may be named $a$
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _points(rows: Iterable[Row], x: str, y: str) -> tuple[list[float], list[float]]:
    pairs = [(row[x], row[y]) for row in rows if _is_number(row.get(x)) and _is_number(row.get(y))]
    return [float(a) for a, _ in pairs], [float(b) for _, b in pairs]


def _evaluated(run: RunData) -> list[Row]:
    """Return rows of epochs and of the evaluations between them, by step."""
    rows = [*run.epochs, *run.evaluations]
    return sorted(rows, key=lambda row: row["step"] if _is_number(row.get("step")) else math.inf)


def _metrics(runs: Sequence[RunData]) -> list[str]:
    """Return the names of validation metrics, as in ``metrics.json``, without the loss."""
    names = {name for run in runs for row in _evaluated(run) for name, value in row.items() if _is_number(value)}
    return sorted(name for name in names if name.startswith("val_") and name != "val_loss")


def _matrix(run: RunData, name: str, table: Sequence[Sequence[float]]) -> Picture:
    """Draw a matrix: rows are true classes, shades shares of a row. Square ones show recall and precision."""
    title = f"{name.replace('_', ' ')} of {run.label}"
    figure, axes = _new_figure(title)
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
        names = names if len(names) == len(table) else list(map(str, range(len(table))))
        axes.set_ylabel("true class (recall)")
        axes.set_yticks(range(len(table)), _with_shares(names, table))
        axes.set_xlabel("predicted class (precision)")
        axes.set_xticks(range(len(table)), _with_shares(names, list(zip(*table, strict=True))), rotation=90)
    return Picture(f"{name}-{run.record.id}", title, figure)


def _with_shares(names: Sequence[str], table: Sequence[Sequence[float]]) -> list[str]:
    """Return each class with its share of its row."""
    shares = [f"{row[index] / sum(row):.2f}" if sum(row) else "none" for index, row in enumerate(table)]
    return [f"{name} ({share})" for name, share in zip(names, shares, strict=True)]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
