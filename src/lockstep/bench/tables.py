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


def _part(name: str) -> Callable[[Row], str]:
    """Its share of the step."""
    return lambda row: percent(row["parts_ms"][name] / row["step_ms"])


def _each(key: str, form: str) -> Callable[[Row], str]:
    """The values of ``key``, one for each device; ``-`` for one that is not known."""
    return lambda row: " ".join("-" if value is None else format(value, form) for value in row.get(key) or ()) or "-"


_SHARES = [_share(name) for name in ("data", "forward", "backward", "communication", "wait", "optimizer", "other")]
_STEP: list[Column] = [
    ("batch", text("batch_size")),
    ("precision", text("precision")),
    ("compile", lambda row: "on" if row.get("compile") else "off"),
    ("status", text("status")),
    _between("step ms", "step_ms"),
    ("samples/s", number("samples_per_s")),
    *_SHARES,
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
    ("data", lambda row: percent((row.get("shares") or {}).get("data"))),
    ("compute", lambda row: percent((row.get("shares") or {}).get("compute"))),
    ("communication", lambda row: percent((row.get("shares") or {}).get("communication"))),
    ("wait", lambda row: percent((row.get("shares") or {}).get("wait"))),
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
        (
            "efficiency",
            lambda row: f"{row['efficiency']:.0%} ({row['efficiency_low']:.0%}..{row['efficiency_high']:.0%})",
        ),
        *((name, _part(name)) for name in ("compute", "communication", "straggler", "data")),
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
_OPTIONAL = frozenset(
    {
        *("claimed samples/s", "claimed speed-up", "claimed memory GB"),
        *("wait", "communication", "TFLOP/s", "transfer ms"),
    }
)
#: Rows of a learning-rate test that are shown; its report has all.
_SHOWN = 24


def table_of(kind: str, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    if kind == "lr":
        rows = rows[:: max(1, -(-len(rows) // _SHOWN))]
    columns = _TABLES[kind]
    cells = [[cell(row) for _, cell in columns] for row in rows]
    kept = [
        place
        for place, (name, _) in enumerate(columns)
        if name not in _OPTIONAL or any(line[place] not in {"-", "0.0%"} for line in cells)
    ]
    return [columns[place][0] for place in kept], [[line[place] for place in kept] for line in cells]


def chart_of(kind: str, rows: Sequence[Row]) -> Chart:
    """What the console's bars show: a heading and ``(label, value)`` pairs."""
    measured = [row for row in rows if row.get("samples_per_s")]
    if kind == "step":
        return "samples/s", [
            (f"{r['batch_size']} {r['precision']}{' compiled' * bool(r['compile'])}", r["samples_per_s"])
            for r in measured
        ]
    if kind == "scaling":
        return "samples/s", [(f"{r['ranks']} {r['strategy']} {r['mode']}", r["samples_per_s"]) for r in measured]
    if kind == "loader":
        return "samples/s by workers", [(str(row["num_workers"]), row["samples_per_s"]) for row in measured]
    if kind == "forecast":
        return "efficiency by GPUs", [(str(row["gpus"]), row["efficiency"]) for row in rows]
    if kind == "batch-size":
        return "samples/s by batch", [(str(row["batch_size"]), row["samples_per_s"]) for row in measured]
    if kind == "comm":
        summed = [row for row in rows if row["operation"] == "all_reduce" and row.get("bus_gb_s")]
        return "all-reduce, bus GB/s", [(size(row["bytes"]), row["bus_gb_s"]) for row in summed]
    shown = rows[:: max(1, -(-len(rows) // _SHOWN))]
    return "smoothed loss by learning rate", [(f"{row['lr']:.2e}", row["smoothed"]) for row in shown]
