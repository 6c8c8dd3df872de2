"""The table and the chart of each kind of benchmark, from the rows of its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
#: A key of the rows, a key and how its value is formatted, or what makes the text of a row.
Cell = str | tuple[str, str] | Callable[[Row], str]


def plain(value: float) -> str:
    """Four digits that count, and no exponent for what is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def text(value: Any, form: str = "") -> str:
    """``-`` for what is not known; several values, one for each device, beside each other."""
    if isinstance(value, list | tuple):
        return " ".join(text(each, form) for each in value) or "-"
    if value is None:
        return "-"
    return plain(value) if isinstance(value, float) and not form else format(value, form)


def size(count: float) -> str:
    """Bytes in the units of message sizes: 1 KB is 1024."""
    units = ("B", "KB", "MB", "GB")
    place = 0
    while count >= 1024 and place < len(units) - 1:
        count, place = count / 1024, place + 1
    return f"{count:.4g} {units[place]}"


def _shares(*parts: str) -> dict[str, Cell]:
    def share(part: str) -> Cell:
        return lambda row: text((row.get("shares") or {}).get(part), ".1%")

    return {part: share(part) for part in parts}


def _between(key: str) -> Cell:
    """A median with its quartiles, where there are any."""

    def cell(row: Row) -> str:
        if row.get(key) is None:
            return "-"
        low, high = row[f"{key}_low"], row[f"{key}_high"]
        return plain(row[key]) + (f" ({plain(low)}..{plain(high)})" if low < high else "")

    return cell


def _part(name: str) -> Cell:
    return lambda row: text(row["parts_ms"][name] / row["step_ms"], ".1%")


#: By kind: the headings of the table, and what is below each.
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
#: Columns that are left out where no row has a value.
_CLAIMED = {"claimed samples/s", "claimed speed-up", "claimed memory GB"}
_OPTIONAL = _CLAIMED | {"wait", "communication", "TFLOP/s", "transfer ms"}
#: Rows of a learning-rate test that are shown; its report has all.
_SHOWN = 24


def table_of(kind: str, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    rows = _shown(kind, rows)
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


#: What the bars of each kind show: a heading, the label of a row, and the key of the value.
_CHARTS: dict[str, tuple[str, Cell, str]] = {
    "step": (
        "samples/s",
        lambda row: f"{row['batch_size']} {row['precision']}{' compiled' * bool(row['compile'])}",
        "samples_per_s",
    ),
    "scaling": ("samples/s", lambda row: f"{row['ranks']} {row['strategy']} {row['mode']}", "samples_per_s"),
    "loader": ("samples/s by workers", "num_workers", "samples_per_s"),
    "forecast": ("efficiency by GPUs", "gpus", "efficiency"),
    "batch-size": ("samples/s by batch", "batch_size", "samples_per_s"),
    "comm": ("all-reduce, bus GB/s", lambda row: size(row["bytes"]), "bus_gb_s"),
    "lr": ("smoothed loss by learning rate", ("lr", ".2e"), "smoothed"),
}


def chart_of(kind: str, rows: Sequence[Row]) -> tuple[str, list[tuple[str, float]]]:
    """What the console's bars show: a heading and ``(label, value)`` pairs."""
    heading, label, key = _CHARTS[kind]
    shown = [row for row in _shown(kind, rows) if row.get("operation", "all_reduce") == "all_reduce"]
    return heading, [(_text_of(label, row), row[key]) for row in shown if row.get(key)]


def _shown(kind: str, rows: Sequence[Row]) -> Sequence[Row]:
    return rows[:: max(1, -(-len(rows) // _SHOWN))] if kind == "lr" else rows
