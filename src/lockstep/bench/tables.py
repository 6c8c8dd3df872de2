"""The table and the chart of each kind of benchmark, from the rows of its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]
Chart = tuple[str, list[tuple[str, float]]]


def plain(value: float) -> str:
    """Four digits that count, and no exponent for what is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def number(key: str, form: str | None = None) -> Callable[[Row], str]:
    """The value of ``key``; ``-`` where there is none."""

    def cell(row: Row) -> str:
        if row.get(key) is None:
            return "-"
        return plain(row[key]) if form is None else format(row[key], form)

    return cell


def text(key: str) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(key) is None else str(row[key])


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def size(count: float) -> str:
    """Bytes in the units of message sizes: 1 KB is 1024."""
    units = ("B", "KB", "MB", "GB")
    place = 0
    while count >= 1024 and place < len(units) - 1:
        count, place = count / 1024, place + 1
    return f"{count:.4g} {units[place]}"


def _share(part: str) -> Column:
    return part, lambda row: percent((row.get("shares") or {}).get(part))


def _between(name: str, key: str) -> Column:
    """A median with its quartiles, where there are any."""

    def cell(row: Row) -> str:
        if row.get(key) is None:
            return "-"
        low, high = row[f"{key}_low"], row[f"{key}_high"]
        return plain(row[key]) + (f" ({plain(low)}..{plain(high)})" if low < high else "")

    return name, cell


def _part(name: str) -> Column:
    return name, lambda row: percent(row["parts_ms"][name] / row["step_ms"])


def _each(key: str, form: str) -> Callable[[Row], str]:
    """The values of ``key``, one for each device; ``-`` for one that is not known."""
    return lambda row: " ".join("-" if value is None else format(value, form) for value in row.get(key) or ()) or "-"


_STEP: list[Column] = [
    ("batch", text("batch_size")),
    ("precision", text("precision")),
    ("compile", lambda row: "on" if row.get("compile") else "off"),
    ("status", text("status")),
    _between("step ms", "step_ms"),
    ("samples/s", number("samples_per_s")),
    *map(_share, ("data", "forward", "backward", "communication", "wait", "optimizer", "other")),
    ("memory MB", number("memory_mb", ",.0f")),
    ("TFLOP/s", number("tflops", ".3g")),
    ("of peak", lambda row: "unknown" if row.get("peak_share") is None else percent(row["peak_share"])),
]
_SCALING: list[Column] = [
    ("devices", text("ranks")),
    ("strategy", text("strategy")),
    ("mode", text("mode")),
    ("status", text("status")),
    ("global batch", text("global_batch")),
    _between("samples/s", "samples_per_s"),
    ("claimed samples/s", number("claimed_samples_per_s")),
    ("epoch s", number("epoch_s")),
    ("speed-up", number("speed_up", ".2f")),
    ("claimed speed-up", number("claimed_speed_up", ".2f")),
    ("efficiency", lambda row: percent(row.get("efficiency"))),
    ("memory MB", _each("memory_mb_per_device", ",.0f")),
    ("claimed memory GB", _each("claimed_memory_gb", "g")),
    ("utilisation", _each("utilisation_per_device", ".0%")),
    *map(_share, ("data", "compute", "communication", "wait")),
]
_TABLES: dict[str, list[Column]] = {
    "step": _STEP,
    "scaling": _SCALING,
    "loader": [
        ("workers", text("num_workers")),
        ("status", text("status")),
        ("samples/s", number("samples_per_s")),
        ("load ms", number("load_ms", ".3g")),
        ("transfer ms", number("transfer_ms", ".3g")),
        ("first batch s", number("first_batch_s", ".2f")),
        ("times the need", number("of_demand", ",.2f")),
    ],
    "comm": [
        ("operation", text("operation")),
        ("size", lambda row: size(row["bytes"])),
        ("latency µs", number("latency_us")),
        ("algorithm GB/s", number("algorithm_gb_s", ".3g")),
        ("bus GB/s", number("bus_gb_s", ".3g")),
        ("status", text("status")),
    ],
    "batch-size": [
        ("batch", text("batch_size")),
        ("status", text("status")),
        ("memory MB", number("memory_mb", ",.0f")),
        ("samples/s", number("samples_per_s")),
    ],
    "forecast": [
        ("GPUs", text("gpus")),
        ("strategy", text("strategy")),
        ("step ms", number("step_ms")),
        _between("samples/s", "samples_per_s"),
        ("efficiency", lambda r: f"{r['efficiency']:.0%} ({r['efficiency_low']:.0%}..{r['efficiency_high']:.0%})"),
        *map(_part, ("compute", "communication", "straggler", "data")),
        ("sent MB", number("sent_mb")),
    ],
    "lr": [
        ("step", text("step")),
        ("learning rate", number("lr", ".3g")),
        ("loss", number("loss", ".5g")),
        ("smoothed", number("smoothed", ".5g")),
    ],
}
#: Columns that are left out where no row has a value.
_CLAIMED = {"claimed samples/s", "claimed speed-up", "claimed memory GB"}
_OPTIONAL = _CLAIMED | {"wait", "communication", "TFLOP/s", "transfer ms"}
#: Rows of a learning-rate test that are shown; its report has all.
_SHOWN = 24


def table_of(kind: str, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    columns, rows = _TABLES[kind], _shown(kind, rows)
    cells = [[cell(row) for _, cell in columns] for row in rows]
    kept = [
        place
        for place, (name, _) in enumerate(columns)
        if name not in _OPTIONAL or any(line[place] not in {"-", "0.0%"} for line in cells)
    ]
    return [columns[place][0] for place in kept], [[line[place] for place in kept] for line in cells]


#: What the bars of each kind show: a heading, the label of a row, and the value.
_CHARTS: dict[str, tuple[str, Callable[[Row], str], str]] = {
    "step": (
        "samples/s",
        lambda row: f"{row['batch_size']} {row['precision']}{' compiled' * bool(row['compile'])}",
        "samples_per_s",
    ),
    "scaling": ("samples/s", lambda row: f"{row['ranks']} {row['strategy']} {row['mode']}", "samples_per_s"),
    "loader": ("samples/s by workers", text("num_workers"), "samples_per_s"),
    "forecast": ("efficiency by GPUs", text("gpus"), "efficiency"),
    "batch-size": ("samples/s by batch", text("batch_size"), "samples_per_s"),
    "comm": ("all-reduce, bus GB/s", lambda row: size(row["bytes"]), "bus_gb_s"),
    "lr": ("smoothed loss by learning rate", number("lr", ".2e"), "smoothed"),
}


def chart_of(kind: str, rows: Sequence[Row]) -> Chart:
    """What the console's bars show: a heading and ``(label, value)`` pairs."""
    heading, label, key = _CHARTS[kind]
    shown = [row for row in _shown(kind, rows) if row.get("operation", "all_reduce") == "all_reduce"]
    return heading, [(label(row), row[key]) for row in shown if row.get(key)]


def _shown(kind: str, rows: Sequence[Row]) -> Sequence[Row]:
    return rows[:: max(1, -(-len(rows) // _SHOWN))] if kind == "lr" else rows
