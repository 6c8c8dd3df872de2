"""Runs grouped by their settings: the mean of a metric over seeds, and the best group."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.planning.resolve import natural_mode
from lockstep.rundir.folder import RunDir, or_else
from lockstep.rundir.summary import settings_of, summarize

#: Settings in which the runs of a group may differ.
_OF_ONE_RUN = ("name", "tags", "runs_dir", "training.seed", "hardware.selected_devices", "storage.mirror")
_CONDITION = re.compile(r"([^=<>!]+?)\s*(<=|>=|!=|=|<|>)\s*(.*)")


@dataclass(frozen=True)
class Group:
    """Runs with the same ``settings``; ``scores``: the finite values of the metric, one for each run that has one."""

    settings: dict[str, Any]
    runs: list[dict[str, Any]]
    scores: list[float]
    is_best: bool = False

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of a sample; ``None`` of fewer than two runs."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """Return the group as plain values; runs by their ids."""
        numbers = {"mean": self.mean, "std": self.deviation, "scores": self.scores, "best": self.is_best}
        return {"settings": self.settings, **numbers, "runs": [run["id"] for run in self.runs]}


@dataclass(frozen=True)
class Grouping:
    """Groups, best first; ``mode`` is ``min`` or ``max``, or ``None`` where nothing says which one is better."""

    keys: list[str]
    metric: str
    mode: str | None
    groups: list[Group]

    def as_dict(self) -> dict[str, Any]:
        """Return the grouping as plain values."""
        groups = [group.as_dict() for group in self.groups]
        return {"by": self.keys, "metric": self.metric, "mode": self.mode, "groups": groups}

    def table(self, text: Callable[[Any], str]) -> tuple[list[str], list[list[str]]]:
        """Return columns and rows of text: settings, the metric's mean ± standard deviation, and the runs."""
        rows = []
        for group in self.groups:
            score = text(group.mean) + ("" if group.deviation is None else f" ± {text(group.deviation)}")
            completed = sum(run["status"] == "completed" for run in group.runs)
            runs = f"{completed} of {len(group.runs)} completed" if completed < len(group.runs) else str(completed)
            values = [str(group.settings[key]) for key in self.keys]
            rows.append([*values, score, "best" if group.is_best else "", runs])
        return [*self.keys, self.metric or "metric", "", "runs"], rows


class Facts:
    """Values of a run by name: fields of its summary, metrics, and settings, which are read when needed."""

    def __init__(self, summary: dict[str, Any]) -> None:
        self.summary = summary
        self._settings: dict[str, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting, with dotted keys."""
        if self._settings is None:
            self._settings = settings_of(RunDir(Path(self.summary["path"])))
        return self._settings

    def value(self, key: str) -> Any:
        """Return the value of ``key``, or ``None``."""
        if key == "tag":
            return self.summary["tags"]
        for values in (self.summary["metrics"], self.summary):
            if key in values:
                return values[key]
        return self.settings.get(key)


def facts_of(runs: Sequence[RunDir]) -> list[Facts]:
    """Read the facts of ``runs``."""
    return [Facts(summarize(run)) for run in runs]


def matching(runs: Sequence[Facts], conditions: Sequence[str]) -> list[Facts]:
    """Return the runs for which all ``conditions`` hold, such as ``status=completed`` or ``val_loss<0.3``.

    Raises:
        UsageError: a condition of another form.
    """
    every_run = runs
    for condition in conditions:
        parts = _CONDITION.fullmatch(condition)
        if parts is None:
            fix = "write for example --where status=completed or --where 'val_loss<0.3'"
            raise UsageError(f"{condition!r} is not a condition", fix=fix)
        key, operator, text = parts.groups()
        _require(every_run, key)
        runs = [run for run in runs if _holds(run.value(key), operator, text)]
    return list(runs)


def _require(runs: Sequence[Facts], key: str) -> None:
    """Raise :class:`UsageError` where no run has a value of that name."""
    if runs and all(run.value(key) in (None, "") for run in runs):
        raise UsageError(f"no run has {key!r}", fix="name a metric, a setting, or a column of `lockstep runs --json`")


def _holds(value: Any, operator: str, text: str) -> bool:
    if operator in ("=", "!="):
        values = value if isinstance(value, list | tuple) else [value]
        is_equal = any(str(item) == text or _number(item) == _number(text) is not None for item in values)
        return is_equal == (operator == "=")
    number = _number(value)
    limit = _number(text)
    if number is None or limit is None:
        return False
    return {"<": number < limit, ">": number > limit, "<=": number <= limit, ">=": number >= limit}[operator]


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def in_order(runs: Sequence[Facts], order: str) -> list[Facts]:
    """Sort ``runs`` by the value of a key, ascending, or descending with ``KEY:desc``; runs without one last.

    Raises:
        UsageError: no run has a value of that name.
    """
    key, _, direction = order.partition(":")
    if direction not in ("", "desc"):
        raise UsageError(f"{order!r} is not an order", fix=f"write {key} or {key}:desc")
    _require(runs, key)
    numbers = [(value, run) for run in runs if (value := _number(run.value(key))) is not None and value == value]
    texts = [(str(value), run) for run in runs if _number(value := run.value(key)) is None and value not in (None, "")]
    is_falling = direction == "desc"
    ordered = [
        *(run for _, run in sorted(numbers, key=itemgetter(0), reverse=is_falling)),
        *(run for _, run in sorted(texts, key=itemgetter(0), reverse=is_falling)),
    ]
    return ordered + [run for run in runs if run not in ordered]


def group_runs(runs: Sequence[Facts], by: Sequence[str] = (), metric: str = "") -> Grouping:
    """Group ``runs`` by the settings ``by``; empty: by each setting in which they differ, other than the seed.

    Args:
        metric: a name such as ``test_accuracy``; empty: the metric that selects their best checkpoints.
    """
    for key in by:
        _require(runs, key)
    keys = list(by) or _differing(runs)
    monitors = [run.summary["monitor"] for run in runs if run.summary["monitor"]]
    name = metric or (statistics.mode(monitors) if monitors else "")
    members: dict[str, list[Facts]] = {}
    for run in runs:
        values = [run.value(key) for key in keys]
        members.setdefault(json.dumps(values, default=str), []).append(run)
    groups = [_group(some, keys, name) for some in members.values()]
    mode = _mode(runs, name)
    sign = -1 if mode == "max" else 1
    groups.sort(key=lambda group: math.inf if group.mean is None else sign * group.mean)
    if mode is not None and groups and groups[0].mean is not None:
        best = groups[0]
        groups[0] = Group(best.settings, best.runs, best.scores, is_best=True)
    return Grouping(keys, name, mode, groups)


def _group(runs: Sequence[Facts], keys: Sequence[str], metric: str) -> Group:
    values = [_number(run.summary["metrics"].get(metric)) for run in runs]
    scores = [value for value in values if value is not None and math.isfinite(value)]
    return Group({key: runs[0].value(key) for key in keys}, [run.summary for run in runs], scores)


def _differing(runs: Sequence[Facts]) -> list[str]:
    first: Mapping[str, Any] = runs[0].settings if runs else {}
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [
        key for key in keys if key not in _OF_ONE_RUN and any(run.settings.get(key) != first.get(key) for run in runs)
    ]


def _mode(runs: Sequence[Facts], metric: str) -> str | None:
    for run in runs:
        if run.summary["monitor"] == metric:
            plan = or_else(RunDir(Path(run.summary["path"])).plan, {})
            if plan.get("mode") in ("min", "max"):
                return str(plan["mode"])
    return natural_mode(metric)
