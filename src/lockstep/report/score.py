"""Compare a run's samples per second with its forecast."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.telemetry.records import read_forecast
from lockstep.telemetry.rundir import RunDir


def score_of(run: RunDir) -> dict[str, Any] | None:
    """How ``run`` compares with the forecast in its folder; ``None`` without one, or before the first epoch.

    Raises:
        RunFolderError, ConfigError: a file that cannot be read.
    """
    if not run.forecast_file.exists():
        return None
    return score(read_forecast(run.forecast_file), run.plan(), run.read().task, run.epochs())


def score(
    forecast: Mapping[str, Any], plan: Mapping[str, Any], task: str, epochs: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Predicted and measured samples a second; ``None`` while nothing was measured.

    The first epoch counts only when there is no other: start-up is in it.

    Returns:
        ``predicted``, ``low``, ``high``, ``measured``, ``ratio`` (measured over predicted), ``within`` (the error
        bars), and ``differs``: in what the run is not what was forecast.
    """
    rates = [row["samples_per_s"] for row in epochs if row.get("samples_per_s")]
    if not rates:
        return None
    devices = len(plan["placement"]["devices"]) if plan["placement"]["nodes"] == 1 else plan["placement"]["world_size"]
    measured = statistics.median(rates[1:] or rates)
    settings = forecast["settings"]
    row = next((row for row in forecast["rows"] if row["gpus"] == devices), None)
    differs = [
        f"{name} {here!r}, forecast for {foreseen!r}"
        for name, here, foreseen in (
            ("task", task, forecast["task"]),
            ("batch size", plan["batch"]["batch_size"], settings["batch_size"]),
            ("accumulation", plan["batch"]["accumulate"], settings["accumulate"]),
            ("precision", plan["placement"]["precision"], settings.get("precision")),
            ("strategy", plan["placement"]["strategy"], settings.get("strategy") if devices > 1 else None),
            ("accelerator", plan["placement"]["accelerator"], _accelerator(settings.get("devices"))),
        )
        if foreseen is not None and here != foreseen
    ]
    if row is None:
        return {"measured": measured, "differs": [*differs, f"nothing was forecast for {devices} device(s)"]}
    return {
        "predicted": row["samples_per_s"],
        "low": row["samples_per_s_low"],
        "high": row["samples_per_s_high"],
        "measured": measured,
        "ratio": measured / row["samples_per_s"],
        "within": row["samples_per_s_low"] <= measured <= row["samples_per_s_high"],
        "differs": differs,
    }


def _accelerator(devices: Sequence[str] | None) -> str | None:
    """The accelerator that the forecast is for: a local device, or a GPU by its name."""
    return None if not devices else "cpu" if devices[0] == "cpu" else "gpu"


def in_words(found: Mapping[str, Any]) -> str:
    """One line for people."""
    differs = f" (not comparable: {'; '.join(found['differs'])})" if found["differs"] else ""
    if "predicted" not in found:
        return f"measured {found['measured']:,.0f} samples/s{differs}"
    place = "within" if found["within"] else "outside"
    return (
        f"predicted {found['predicted']:,.0f} samples/s ({found['low']:,.0f} to {found['high']:,.0f}), measured "
        f"{found['measured']:,.0f}: {found['ratio']:.0%} of it, {place} the error bars{differs}"
    )
