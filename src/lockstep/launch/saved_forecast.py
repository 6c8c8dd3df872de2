"""The forecast that a run is compared with: kept in its folder, for `lockstep show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError


def read_forecast(path: Path) -> dict[str, Any]:
    """The report of ``lockstep forecast``: its file, or the folder with ``report.json``.

    Raises:
        ConfigError: there is none, or the file is not a forecast.
    """
    file = path / "report.json" if path.is_dir() else path
    fix = "name the folder that `lockstep forecast` printed, or its report.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"telemetry.forecast: {file} cannot be read", why=str(error), fix=fix) from error
    if not _is_forecast(found):
        raise ConfigError(f"telemetry.forecast: {file} is not a forecast", fix=fix)
    return dict(found)


def _is_forecast(found: Any) -> bool:
    if not isinstance(found, dict) or found.get("kind") != "forecast" or not isinstance(found.get("rows"), list):
        return False
    rates = {"gpus", "samples_per_s", "samples_per_s_low", "samples_per_s_high"}
    settings = found.get("settings")
    complete = all(isinstance(row, dict) and rates <= row.keys() for row in found["rows"])
    return (
        complete and "task" in found and isinstance(settings, dict) and {"batch_size", "accumulate"} <= settings.keys()
    )
