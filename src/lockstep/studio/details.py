"""One run in full, and the comparison of several, read from their folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.checkpoint.store import CheckpointStore
from lockstep.config import RunConfig, dump, resolve
from lockstep.studio.launch_records import Start
from lockstep.studio.settings import REFUSED, command_text, flatten
from lockstep.telemetry import comparison
from lockstep.telemetry.files import names_in
from lockstep.telemetry.lookup import or_else
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.summary import LIVE

#: Settings that the page may not set, and that a copy gets in another way.
_OF_ITS_OWN = {"save_dir", "runs_dir", "task.name", "task.datamodule"}


def describe(run: RunDir, summary: Mapping[str, Any], start: Start | None) -> dict[str, Any]:
    """Everything that the page shows of a run, its summary included."""
    config = or_else(run.config, None)
    record = run.read() if os.path.lexists(run.run_file) else None
    words = start.shown if start else []
    words = words or (list(record.command[1:]) if record is not None else [])
    return {
        **summary,
        "config": config.model_dump(mode="json") if config else None,
        "config_yaml": dump(config) if config else "",
        "plan": or_else(run.plan, {}) or None,
        "epochs_rows": or_else(run.epochs, []),
        "checkpoints": CheckpointStore(run.checkpoints).listed(),
        "logs": log_names(run),
        "command": ["lockstep", *(words or (start.arguments if start else []))],
        "command_text": command_text(words or (start.arguments if start else [])),
        "versions": record.versions if record is not None else {},
        "resumable": record is not None and summary["status"] not in LIVE | {"completed"},
        "streams": sorted(
            file.stem
            for pattern in ("steps", "evaluations", "ranks", "system-*")
            for file in run.path.glob(f"{pattern}.jsonl")
        ),
    }


def log_names(run: RunDir) -> list[str]:
    """Text files in ``logs``; the command's own output first."""
    if run.logs.is_symlink():  # it may lead anywhere
        return []
    names = [name for name in names_in(run.logs) if name.endswith(".log") and not name.startswith(".")]
    return sorted(names, key=lambda name: (name != "output.log", name))


def form_of(config: RunConfig, task_defaults: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The form's content to start such a run again, and the settings that the page may not set.

    The form starts from the task's defaults: a value that equals a general default may differ from them. The name is
    left out, since the copy gets another one.
    """
    given: dict[str, Any] = {}
    left_out = []
    defaults = dict(flatten(resolve(task_defaults).model_dump(mode="json")))
    for key, value in flatten(config.model_dump(mode="json")):
        section, dot, name = key.partition(".")
        if key == "name" or (section != "task" and defaults.get(key) == value):
            continue
        if key in REFUSED:
            left_out += [key] if value and key not in _OF_ITS_OWN else []
        elif dot:
            given.setdefault(section, {})[name] = value
        else:
            given[key] = value
    return given, left_out


def compare(runs: Sequence[RunDir], summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of several runs, and where their settings and plans differ."""
    found = comparison.compare(runs)
    return {
        "runs": summaries,
        "metrics": _rows(found.results),
        "config": _rows(found.settings),
        "plan": _rows(found.plan),
    }


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [{"key": key, "values": values} for key, values in columns.items()]
