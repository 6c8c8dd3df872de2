"""Pictures of a report, drawn with matplotlib (extra ``report``)."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.bench.results import BenchReport
from lockstep.bench.tables import size
from lockstep.telemetry.files import write_bytes

Row = Mapping[str, Any]
#: Panels in a row.
_COLUMNS = 3


def draw(report: BenchReport, folder: Path) -> list[Path]:
    """Draw what there is to draw; the files written."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.get("status", "ok") == "ok"]
    if not rows:
        return []
    painter = _PAINTERS[report.kind]
    panels = 5 if report.kind == "scaling" else 2 if report.kind in {"step", "comm", "forecast"} else 1
    columns, lines = min(panels, _COLUMNS), -(-panels // _COLUMNS)
    figure = Figure(figsize=(6 * columns, 4.2 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for unused in axes[panels:]:
        unused.set_visible(False)
    painter(axes[:panels], rows, report)
    figure.suptitle(f"{report.title} ({', '.join(report.settings.get('devices', []))})".replace(" ()", ""))
    file = folder / f"{report.kind}.png"
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    write_bytes(file, png.getvalue())
    return [file]


def _step(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    labels = [
        f"{row['batch_size']}\n{row['precision']}{chr(10) + 'compiled' if row['compile'] else ''}" for row in rows
    ]
    bottom = [0.0] * len(rows)
    for part in rows[0]["parts_ms"]:
        heights = [row["parts_ms"][part] for row in rows]
        axes[0].bar(labels, heights, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes[0].set(ylabel="ms a step (mean)", xlabel="batch size and precision")
    axes[0].legend(fontsize="small")
    for kind in dict.fromkeys((row["precision"], row["compile"]) for row in rows):
        line = [row for row in rows if (row["precision"], row["compile"]) == kind]
        name = kind[0] + (", compiled" if kind[1] else "")
        axes[1].plot([r["batch_size"] for r in line], [r["samples_per_s"] for r in line], marker="o", label=name)
    axes[1].set(xlabel="batch size per device", ylabel="samples/s", xscale="log", ylim=(0, None))
    axes[1].legend(fontsize="small")


def _scaling(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    rows = [row for row in rows if row.get("speed_up") is not None]
    ones = [row for row in rows if row["ranks"] == 1]
    most = max((row["ranks"] for row in rows), default=1)
    axes[0].plot([1, most], [1, most], color="0.7", linestyle=":", label="ideal")
    axes[1].axhline(1, color="0.7", linestyle=":")
    kinds = dict.fromkeys((row["strategy"], row["mode"]) for row in rows if row["ranks"] > 1)
    for strategy, mode in kinds:
        line = [r for r in ones if r["mode"] == mode]
        line += [r for r in rows if r["ranks"] > 1 and (r["strategy"], r["mode"]) == (strategy, mode)]
        ranks, name = [r["ranks"] for r in line], f"{strategy}, {mode}"
        axes[0].plot(ranks, [r["speed_up"] for r in line], marker="o", label=name)
        axes[1].plot(ranks, [r["efficiency"] for r in line], marker="o", label=name)
        axes[2].plot(ranks, [r["memory_mb"] for r in line], marker="o", label=name)
        axes[3].plot(ranks, [r["epoch_s"] for r in line], marker="o", label=name)
        busy = [(r["ranks"], statistics.fmean(r["utilisation_per_device"])) for r in line if _is_known(r)]
        axes[4].plot([count for count, _ in busy], [share for _, share in busy], marker="o", label=name)
        claimed = [(r["ranks"], r["claimed_speed_up"]) for r in line if r.get("claimed_speed_up")]
        if claimed and mode == report.settings["modes"][0]:
            axes[0].plot(*zip(*claimed, strict=True), marker="x", linestyle="--", label=f"{strategy}, claimed")
    for axis in axes:
        axis.set_xticks(sorted({row["ranks"] for row in rows}))
    axes[0].set(xlabel="devices", ylabel="speed-up", ylim=(0, None))
    axes[1].set(xlabel="devices", ylabel="efficiency", ylim=(0, None))
    axes[2].set(xlabel="devices", ylabel="memory of the fullest device, MB", ylim=(0, None))
    axes[3].set(xlabel="devices", ylabel="time for an epoch of training, s", ylim=(0, None))
    axes[4].set(xlabel="devices", ylabel="utilisation, mean of the devices", ylim=(0, None))
    axes[0].legend(fontsize="small")


def _is_known(row: Row) -> bool:
    """Whether every device has said how busy it was."""
    return None not in row["utilisation_per_device"]


def _loader(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    axes[0].bar([str(row["num_workers"]) for row in rows], [row["samples_per_s"] for row in rows])
    demand = report.extra.get("demand_samples_per_s")
    if demand:
        axes[0].axhline(demand, color="C3", label="what the step takes")
        axes[0].legend(fontsize="small")
    axes[0].set(xlabel="loader workers", ylabel="samples/s")


def _comm(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    for place, operation in enumerate(dict.fromkeys(row["operation"] for row in rows)):
        line = [row for row in rows if row["operation"] == operation]
        sizes, colour = [row["bytes"] for row in line], f"C{place}"
        axes[0].plot(sizes, [row["latency_us"] for row in line], ".", color=colour, label=operation)
        axes[1].plot(sizes, [row["bus_gb_s"] for row in line], marker=".", color=colour, label=operation)
        fit = report.extra.get("fits", {}).get(operation)
        if fit:
            times = [(fit["alpha_s"] + fit["beta_s_per_byte"] * count) * 1e6 for count in sizes]
            axes[0].plot(sizes, times, color=colour, linewidth=1)
    axes[0].set(xlabel="message, bytes", ylabel="latency, µs (line: α + β·bytes)", xscale="log", yscale="log")
    axes[1].set(xlabel=f"message, bytes (to {size(rows[-1]['bytes'])})", ylabel="bus bandwidth, GB/s", xscale="log")
    axes[0].legend(fontsize="small")


def _batch_size(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    axes[0].plot([row["batch_size"] for row in rows], [row["memory_mb"] for row in rows], marker="o")
    out = [row["batch_size"] for row in report.rows if row["status"] == "out of memory"]
    if out:
        axes[0].axvline(min(out), color="C3", label="out of memory")
        axes[0].legend(fontsize="small")
    axes[0].set(xlabel="batch size per device", ylabel="memory of the fullest device, MB", xscale="log")


def _lr(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    rates = [row["lr"] for row in rows]
    axes[0].plot(rates, [row["loss"] for row in rows], color="0.8", label="loss")
    axes[0].plot(rates, [row["smoothed"] for row in rows], label="smoothed")
    proposal = report.extra.get("proposal")
    if proposal:
        axes[0].axvline(proposal["lr"], color="C2", label=f"proposed: {proposal['lr']:.2g}")
    least = min(row["smoothed"] for row in rows)
    top = max(rows[0]["smoothed"], least) * 1.5
    axes[0].set(xlabel="learning rate", ylabel="loss", xscale="log", ylim=(None, top if top > least else None))
    axes[0].legend(fontsize="small")


def _forecast(axes: Sequence[Any], rows: Sequence[Row], report: BenchReport) -> None:
    gpus = [row["gpus"] for row in rows]
    axes[0].plot(gpus, [row["efficiency"] for row in rows], marker="o")
    low, high = ([row[f"efficiency_{end}"] for row in rows] for end in ("low", "high"))
    axes[0].fill_between(gpus, low, high, alpha=0.2)
    axes[0].set(xlabel="GPUs", ylabel="efficiency", xscale="log", ylim=(0, 1.05))
    bottom = [0.0] * len(rows)
    for part in rows[0]["parts_ms"]:
        heights = [row["parts_ms"][part] for row in rows]
        axes[1].bar([str(count) for count in gpus], heights, bottom=bottom, label=part)
        bottom = [under + height for under, height in zip(bottom, heights, strict=True)]
    axes[1].set(xlabel="GPUs", ylabel="ms a step")
    axes[1].legend(fontsize="small")


_PAINTERS: dict[str, Callable[[Sequence[Any], Sequence[Row], Any], None]] = {
    "step": _step,
    "scaling": _scaling,
    "loader": _loader,
    "comm": _comm,
    "batch-size": _batch_size,
    "lr": _lr,
    "forecast": _forecast,
}
