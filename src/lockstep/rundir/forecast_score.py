"""Compare a run's measured speed with the forecast in its folder."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import many
from lockstep.rundir.folder import RunDir
from lockstep.rundir.summary import read_forecast


def score_of(run: RunDir) -> dict[str, Any] | None:
    """How ``run`` compares with the forecast in its folder; ``None`` without one, or before the first epoch."""
    if not run.forecast_file.exists():
        return None
    return score(read_forecast(run.forecast_file), run.plan(), run.read().task, run.epochs())


def score(
    forecast: Mapping[str, Any], plan: Mapping[str, Any], task: str, epochs: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Predicted and measured samples a second; ``None`` while nothing was measured.

    The first epoch counts only when there is no other: start-up is in it. ``ratio``: measured over predicted;
    ``within`` the error bars; ``differs``: properties of the run that differ from the forecast.
    """
    rates = [row["samples_per_s"] for row in epochs if row.get("samples_per_s")]
    if not rates:
        return None
    placement = plan["placement"]
    batch = plan["batch"]
    settings = forecast["settings"]
    devices = len(placement["devices"]) if placement["nodes"] == 1 else placement["world_size"]
    measured = statistics.median(rates[1:] or rates)
    row = next((row for row in forecast["rows"] if row["gpus"] == devices), None)
    first = (settings.get("devices") or [None])[0]  # a local device, or a GPU by its name
    both = {
        "task": (task, forecast["task"]),
        "batch size": (batch["batch_size"], settings["batch_size"]),
        "accumulation": (batch["accumulate"], settings["accumulate"]),
        "precision": (placement["precision"], settings.get("precision")),
        "strategy": (placement["strategy"], settings.get("strategy") if devices > 1 else None),
        "accelerator": (placement["accelerator"], first and ("cpu" if first == "cpu" else "gpu")),
    }
    differs = [
        f"{name} {here!r}, forecast for {foreseen!r}"
        for name, (here, foreseen) in both.items()
        if foreseen is not None and here != foreseen
    ]
    if row is None:
        return {"measured": measured, "differs": [*differs, f"nothing was forecast for {many(devices, 'device')}"]}
    predicted, low, high = (row[name] for name in ("samples_per_s", "samples_per_s_low", "samples_per_s_high"))
    return {
        **{"predicted": predicted, "low": low, "high": high, "measured": measured},
        **{"ratio": measured / predicted, "within": low <= measured <= high, "differs": differs},
    }


def in_words(score: Mapping[str, Any]) -> str:
    """A score in one line."""
    differs = f" (not comparable: {'; '.join(score['differs'])})" if score["differs"] else ""
    if "predicted" not in score:
        return f"measured {score['measured']:,.0f} samples/s{differs}"
    relation = "within" if score["within"] else "outside"
    return (
        f"predicted {score['predicted']:,.0f} samples/s ({score['low']:,.0f} to {score['high']:,.0f}), measured "
        f"{score['measured']:,.0f}: {score['ratio']:.0%} of it, {relation} the error bars{differs}"
    )
