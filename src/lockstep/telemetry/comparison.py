"""Several runs: their results, and where their settings and plans differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.telemetry.lookup import or_else
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.scalars import flattened
from lockstep.telemetry.summary import summarize

#: Of a plan: what the configuration says already, and texts.
_NOT_COMPARED = ("config", "reasons", "notes", "decisions", "task.")


@dataclass(frozen=True)
class Comparison:
    """One value per run under each name, in the order of ``labels``.

    ``settings`` (``optimizer.lr``) and ``plan`` (``schedule.lr``) hold only what differs.
    """

    labels: list[str]
    results: dict[str, list[Any]]
    settings: dict[str, list[Any]]
    plan: dict[str, list[Any]]

    @property
    def differences(self) -> dict[str, list[Any]]:
        """Settings and plans in one table."""
        return self.settings | {f"plan: {key}": values for key, values in self.plan.items()}


def compare(runs: Sequence[RunDir], more: Mapping[str, list[Any]] | None = None) -> Comparison:
    """Compare ``runs``; what cannot be read of one counts as not set.

    Args:
        more: further results, by name, one value per run.

    Raises:
        RunFolderError: the record of a run cannot be read.
    """
    found = [summarize(run) for run in runs]
    plans = [flattened(or_else(run.plan, {})) for run in runs]
    return Comparison(
        labels=labels(found),
        results=_results(found, plans, more or {}),
        settings=differences([settings_of(run) for run in runs]),
        plan=differences([{key: value for key, value in plan.items() if _is_compared(key)} for plan in plans]),
    )


def labels(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The name of each run, or its id; both where several have the same."""
    names = [one["name"] or one["id"] for one in summaries]
    return [
        f"{name} ({one['id']})" if names.count(name) > 1 else name for name, one in zip(names, summaries, strict=True)
    ]


def settings_of(run: RunDir) -> dict[str, Any]:
    """The run's configuration with dotted keys, without the run's own place; empty if it cannot be read."""
    config = or_else(run.config, None)
    return {} if config is None else flattened(config.model_dump(mode="json", exclude={"save_dir"}))


def _results(
    found: Sequence[Mapping[str, Any]], plans: Sequence[Mapping[str, Any]], more: Mapping[str, list[Any]]
) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {
        "run": [one["id"] for one in found],
        "task": [one["task"] for one in found],
        "status": [one["status"] for one in found],
        "devices": [", ".join(one["devices"]) for one in found],
        "strategy": [one["strategy"] for one in found],
        "global batch": [plan.get("batch.global_batch") for plan in plans],
        "steps": [one["step"] for one in found],
        "samples/s": [one["samples_per_s"] for one in found],
        **more,
        "best epoch": [one["best_epoch"] for one in found],
    }
    for prefix, of in (("best", "best_metric"), ("final", "final_metrics")):
        for name in dict.fromkeys(name for one in found for name in one[of]):
            rows[f"{prefix} {name}"] = [one[of].get(name) for one in found]
    return {name: values for name, values in rows.items() if any(value not in (None, "") for value in values)}


def _is_compared(key: str) -> bool:
    return not key.startswith(_NOT_COMPARED) and ".reasons." not in key


def differences(values: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys whose values are not the same everywhere, with the value of each (``None`` where it has none)."""
    keys = sorted({key for one in values for key in one})
    found = {key: [one.get(key) for one in values] for key in keys}
    return {key: row for key, row in found.items() if len({_comparable(value) for value in row}) > 1}


def _comparable(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
