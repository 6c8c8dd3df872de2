"""Runs as every reader shows them: finding one; its status, progress, results, why it ended; and several, compared.

``lockstep runs``, ``show`` and ``top``, the report and the page all render :func:`summarize`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.load import MAX_CONFIG_BYTES, parse_yaml
from lockstep.errors import RunFolderError, many
from lockstep.rundir.copies import Copy
from lockstep.rundir.files import absolute, damaged, flattened, is_folder, last_row, names_in, read_bytes
from lockstep.rundir.folder import RunDir, RunRecord, or_else
from lockstep.rundir.remote import is_url

#: A run folder from elsewhere may contain texts of any length.
_MAX_NAME = 200
_MAX_TAGS = 20
_MAX_ERROR = 20_000
#: Older samples are stale: the run has ended, or its node has stopped.
FRESH_S = 15.0
#: The beginning of a line that is not indented.
_SECTION = re.compile(r"(?m)^(?=\w)")
#: Parts of a plan that are not compared: the configuration, and texts.
_NOT_COMPARED = ("config", "reasons", "notes", "decisions", "task.")


def summarize(run: RunDir, record: RunRecord | None = None) -> dict[str, Any]:
    """Return the fields of ``run.json`` (``record``, if read already), its status as judged now, and some more.

    - ``location``: the folder's name; ``path``: the folder
    - ``devices``, ``strategy``, ``precision``, ``world_size``: of the newest attempt
    - ``step`` of ``total_steps`` (optimizer steps), ``progress`` from 0 to 1, ``epoch`` (completed) of ``epochs``
    - ``monitor``: the metric that decides which checkpoint is best, the ``min`` or ``max`` of ``monitor_mode``
    - ``eta_s``: seconds to the end of a running run, if that can be estimated
    - ``metrics``: validation metrics of the best epoch, and the test's
    - ``last_epoch``: the newest row of ``metrics.json``; ``samples_per_s``: the median of all rows

    Raises:
        RunFolderError: the folder holds no run, or its record is damaged.
    """
    record = record or run.read()
    status = run.judge(record)
    beat = run.progress()
    rows = or_else(run.epochs, [])
    plan = or_else(run.plan, {})
    placement = record.placement or {}
    last = rows[-1] if rows else {}
    devices = placement.get("devices") or []
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise damaged(
            run.run_file, "the devices of its placement are not a list of names", "restore the file, or delete the run"
        )
    step, total = (beat.step, beat.total) if beat else (None, None)
    speeds = [speed for row in rows if isinstance(speed := row.get("samples_per_s"), int | float)]
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
        "devices": devices,
        **{key: placement.get(key) for key in ("world_size", "strategy", "precision")},
        "epoch": last.get("epoch"),
        "epochs": epochs if isinstance(epochs := plan.get("epochs"), int) else None,
        "monitor": monitor if isinstance(monitor := plan.get("monitor"), str) else None,
        "monitor_mode": mode if (mode := plan.get("mode")) in ("min", "max") else None,
        "step": step,
        "total_steps": total,
        "progress": min(1.0, step / total) if step is not None and total else None,
        "eta_s": beat.seconds_left() if beat and status == "running" else None,
        "metrics": results(record, rows),
        "last_epoch": last or None,
        "samples_per_s": statistics.median_high(speeds) if speeds else None,
    }


def results(record: RunRecord, epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the best epoch's validation metrics (``val_…``), the monitored one, and the test's (``test_…``)."""
    best: Mapping[str, Any] = next((row for row in epochs if row.get("epoch") == record.best_epoch), {})
    validation = {name: value for name, value in best.items() if name.startswith("val_")}
    return {**validation, **record.best_metric, **record.final_metrics}


def summaries(root: Path, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Summarise the runs in the folders below ``root``, newest first; ``report`` receives what cannot be read."""
    rows = []
    for run, record in read_runs(root, report):
        try:
            rows.append(summarize(run, record))
        except RunFolderError as error:
            report(one_line(error))
    return rows


def live_state(run: RunDir, now: float | None = None) -> dict[str, Any]:
    """Summarise ``run`` for polling: its newest step, every rank; ``nodes``: the newest sample of each."""
    now = time.time() if now is None else now
    summary = summarize(run)
    ranks = last_row(run.ranks_file) or {}
    state = {
        **summary,
        "seconds_left": summary["eta_s"],
        "logged": last_row(run.steps_file),
        "ranks": ranks.get("ranks", []),
        "slow_rank": ranks.get("slow_rank"),
    }
    nodes = [sample for sample in newest_samples(run.path) if now - sample.get("time", 0) < FRESH_S]
    return {"run": state, "nodes": nodes}


def newest_samples(folder: Path) -> list[dict[str, Any]]:
    """Read the last row of each node's ``system-<node>.jsonl``, by file name."""
    rows = [last_row(file) for file in sorted(folder.glob("system-*.jsonl"))]
    return [row for row in rows if row is not None]


@dataclass(frozen=True)
class Comparison:
    """One value per run under each name, in the order of ``labels``; of settings and plans, what differs."""

    labels: list[str]
    results: dict[str, list[Any]]
    settings: dict[str, list[Any]]
    plan: dict[str, list[Any]]

    @property
    def differences(self) -> dict[str, list[Any]]:
        return self.settings | {f"plan: {key}": values for key, values in self.plan.items()}


def compare(runs: Sequence[RunDir]) -> Comparison:
    """Compare ``runs``; a value that cannot be read counts as not set."""
    run_summaries = [summarize(run) for run in runs]
    plans = [flattened(or_else(run.plan, {})) for run in runs]
    decided = differences(plans)
    return Comparison(
        labels=labels(run_summaries),
        results=_results(run_summaries, plans),
        settings=differences([settings_of(run) for run in runs]),
        plan={key: row for key, row in decided.items() if not key.startswith(_NOT_COMPARED) and ".reasons." not in key},
    )


def labels(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the name of each run, or its folder's, by default its id; with the id where several have the same."""
    names = [summary["name"] or summary["location"] for summary in summaries]
    pairs = zip(names, summaries, strict=True)
    return [f"{name} ({summary['id']})" if names.count(name) > 1 else name for name, summary in pairs]


def settings_of(run: RunDir) -> dict[str, Any]:
    """Return the run's settings with dotted keys, without its folder; empty if they cannot be read."""
    return flattened({key: value for key, value in or_else(partial(sections_of, run), {}).items() if key != "save_dir"})


def sections_of(run: RunDir) -> dict[str, Any]:
    """Return the content of ``config.yaml`` for tables, unchecked. Raises :class:`RunFolderError`.

    Sections are parsed one by one and kept, since the runs of a sweep share most of them: to parse the YAML takes most
    of the time of a comparison of 1,500 runs.
    """
    try:
        text = read_bytes(run.config_file, max_bytes=MAX_CONFIG_BYTES).decode()
        sections = [_parsed(section) for section in _SECTION.split(text)]
    except (yaml.YAMLError, ValueError) as error:
        raise damaged(run.config_file, str(error)[:200]) from None
    return {key: value for section in sections if isinstance(section, dict) for key, value in section.items()}


@lru_cache(maxsize=8192)
def _parsed(section: str) -> Any:
    return parse_yaml(section)


def _results(run_summaries: Sequence[Mapping[str, Any]], plans: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {
        "run": [summary["id"] for summary in run_summaries],
        **{name: [summary[name] for summary in run_summaries] for name in ("task", "status")},
        "devices": [", ".join(summary["devices"]) for summary in run_summaries],
        "strategy": [summary["strategy"] for summary in run_summaries],
        "global batch": [plan.get("batch.global_batch") for plan in plans],
        "steps": [summary["step"] for summary in run_summaries],
        "samples/s": [summary["samples_per_s"] for summary in run_summaries],
        "git commit": [commit_text(summary["git"]) for summary in run_summaries],
        "best epoch": [summary["best_epoch"] for summary in run_summaries],
    }
    bests = [summary["best_metric"] for summary in run_summaries]
    newest_rows = [summary["last_epoch"] or {} for summary in run_summaries]
    lasts = [{name: row.get(name) for name in best} for row, best in zip(newest_rows, bests, strict=True)]
    finals = [final_values(summary) for summary in run_summaries]
    for prefix, metrics in (("best", bests), ("last", lasts), ("final", finals)):
        for name in dict.fromkeys(name for values in metrics for name in values):
            rows[f"{prefix} {name}"] = [values.get(name) for values in metrics]
    return {name: values for name, values in rows.items() if any(value not in (None, "") for value in values)}


def final_values(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics with which a run ended, without those of its best evaluation."""
    return {name: value for name, value in summary["final_metrics"].items() if name not in summary["best_metric"]}


def commit_text(git: Mapping[str, Any] | None) -> str:
    """Shorten a commit; a tree with changes has ``+ changes`` behind it."""
    return "" if git is None else f"{git['commit'][:10]}{'' if git['clean'] else ' + changes'}"


def differences(values: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return keys whose values differ, with the value of each mapping (``None``: it lacks the key)."""
    keys = sorted({key for mapping in values for key in mapping})
    rows = {key: [mapping.get(key) for mapping in values] for key in keys}
    comparable = partial(json.dumps, sort_keys=True, default=str)
    return {key: row for key, row in rows.items() if len(set(map(comparable, row))) > 1}


def one_line(error: RunFolderError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what


def read_runs(root: Path, report: Callable[[str], None] | None = None) -> list[tuple[RunDir, RunRecord]]:
    """Read the records of runs directly below ``root``, newest first; ``report`` receives why one cannot be read."""
    pairs = []
    root = absolute(root)
    for name in names_in(root):
        run = RunDir(root / name)
        if name.startswith(".") or not os.path.lexists(run.run_file):
            continue
        try:
            pairs.append((run, run.read()))
        except RunFolderError as error:
            if report is not None:
                report(one_line(error))
    return sorted(pairs, key=lambda pair: (pair[1].created_at, pair[1].id), reverse=True)


def find_run(ref: str, runs_dir: Path) -> RunDir:
    """Find the run of ``ref``: a folder, an id, the beginning of an id (with or without ``run-``), or ``last``.

    Of the URL of a mirror, its copy on this machine, which is only read and has no weights.

    Raises:
        RunFolderError: no run has this name, or several have.
    """
    if not ref or "\0" in ref:
        raise RunFolderError("no run was named", fix="give a folder, an id, the beginning of an id, or `last`")
    if is_url(ref):
        return Copy(ref).refresh()
    path = Path(ref).expanduser()
    if os.sep in ref or os.path.lexists(path / "run.json"):
        return RunDir.open(path)
    runs = read_runs(runs_dir)
    if ref == "last" and runs:
        return runs[0][0]
    exact = [run for run, record in runs if ref in {record.id, run.path.name}]
    near = exact or [run for run, record in runs if record.id.startswith((ref, f"run-{ref}"))]
    if len(near) == 1:
        return near[0]
    if near:
        ids = [record.id for run, record in runs if run in near]
        raise RunFolderError(
            f"{ref!r} means several runs: {', '.join(ids[:5])}" + (f" and {len(ids) - 5} more" if len(ids) > 5 else ""),
            fix="give more of the id, or the folder",
        )
    if is_folder(path):
        return RunDir.open(path)
    close = difflib.get_close_matches(ref, [record.id for _, record in runs], n=1)
    listed = "see `lockstep runs`; a run saved with --save-dir is named by its folder"
    present = f"{many(len(runs), 'run')} in {runs_dir}, none with this id"
    raise RunFolderError(
        f"there is no run {ref!r}",
        why=present if runs else f"there are no runs in {runs_dir}",
        fix=f"did you mean {close[0]}?" if close else listed,
    )


def find_runs(ref: str, runs_dir: Path) -> list[RunDir]:
    """Find the runs of ``runs_dir`` tagged ``ref``, such as a sweep's, oldest first; else the run that it names.

    A sweep may be named by its folder. Raises :class:`RunFolderError`: there is none.
    """
    tagged = [] if is_url(ref) else [run for run, record in read_runs(runs_dir) if Path(ref).name in record.tags]
    return tagged[::-1] or [find_run(ref, runs_dir)]
