"""One run as every reader shows it: identity, status, progress, results, devices, why it ended.

``lockstep runs``, ``show`` and ``top``, the report and the page all render :func:`summarize`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import RunFolderError
from lockstep.telemetry.lookup import one_line, or_else, read_runs
from lockstep.telemetry.records import RunRecord
from lockstep.telemetry.rundir import RunDir

LIVE = frozenset({"pending", "running"})
#: A run folder from elsewhere may contain texts of any length.
_MAX_NAME, _MAX_TAGS, _MAX_ERROR = 200, 20, 20_000


def summarize(run: RunDir, record: RunRecord | None = None) -> dict[str, Any]:
    """The fields of ``run.json``, with the status as judged now, and what the other files of the folder say.

    Added to the record:

    - ``location``: the folder's name; ``path``: the folder
    - ``devices``, ``strategy``, ``precision``, ``world_size``: of the newest attempt
    - ``step`` of ``total_steps`` (optimizer steps), ``progress`` from 0 to 1, ``epoch`` (completed) of ``epochs``
    - ``eta_s``: seconds to the end of a running run, where that can be estimated
    - ``last_epoch``: the newest row of ``metrics.json``; ``samples_per_s``: the median of all rows

    Args:
        record: of the run, if it has been read.

    Raises:
        RunFolderError: the folder holds no run, or its record is damaged.
    """
    record = record or run.read()
    status, beat, rows = run.judge(record), run.progress(), or_else(run.epochs, [])
    placement, last = record.placement or {}, rows[-1] if rows else {}
    step, total = (beat.step, beat.total) if beat else (None, None)
    return {
        **record.model_dump(mode="json"),
        "name": record.name and record.name[:_MAX_NAME],
        "tags": [tag[:_MAX_NAME] for tag in record.tags[:_MAX_TAGS]],
        "error": record.error and record.error[-_MAX_ERROR:],
        "best_metric": record.best_metric,  # a number may be NaN, which JSON does not have
        "final_metrics": record.final_metrics,
        "status": status,
        "location": run.path.name,
        "path": str(run.path),
        "devices": _devices(run, placement),
        **{key: placement.get(key) for key in ("world_size", "strategy", "precision")},
        "epoch": last.get("epoch"),
        "epochs": _planned_epochs(run),
        "step": step,
        "total_steps": total,
        "progress": min(1.0, step / total) if step is not None and total else None,
        "eta_s": beat.seconds_left() if beat and status == "running" else None,
        "last_epoch": last or None,
        "samples_per_s": _median([row.get("samples_per_s") for row in rows]),
    }


def summaries(root: Path, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """The summary of each run in the folders below ``root``, newest first; ``report`` receives what cannot be read."""
    found = []
    for run, record in read_runs(root, report):
        try:
            found.append(summarize(run, record))
        except RunFolderError as error:
            report(one_line(error))
    return found


def _devices(run: RunDir, placement: dict[str, Any]) -> list[str]:
    devices = placement.get("devices") or []
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise RunFolderError(
            f"{run.run_file} is damaged",
            why="the devices of its placement are not a list of names",
            fix="restore the file, or delete the run",
        )
    return devices


def _median(values: Sequence[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return statistics.median_high(known) if known else None


def _planned_epochs(run: RunDir) -> int | None:
    epochs = or_else(run.plan, {}).get("epochs")
    return epochs if isinstance(epochs, int) else None
