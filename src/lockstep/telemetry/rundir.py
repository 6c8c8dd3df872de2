"""The run folder: the interface between training and everything that reads it; and finding a run.

One writer per file; shared files are the launcher's until rank 0 begins an attempt, then rank 0's.
JSON files are replaced atomically, JSONL files appended (see :mod:`lockstep.telemetry.files`).
Nothing here runs code from a folder: only the launcher reads ``task.pkl``.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config import RunConfig
from lockstep.config.load import MAX_CONFIG_BYTES
from lockstep.errors import RunFolderError, StorageError
from lockstep.planning.decision import upgraded
from lockstep.telemetry import files, records
from lockstep.telemetry.files import JsonLines, absolute, damaged, names_in, read_json, read_jsonl, write_json
from lockstep.telemetry.heartbeat import Beat, Heartbeat, announce, is_alive, read_beat
from lockstep.telemetry.records import LIVE, RunRecord, new_run_id, utc_now

__all__ = ["LIVE", "Beat", "Heartbeat", "RunDir", "RunRecord", "new_run_id", "read_json", "utc_now", "write_json"]

#: In ``logs``, with the rank behind it: what NCCL writes when a collective times out.
NCCL_DUMP = "nccl-rank-"
#: How long a run may stay pending after its creator ended: the time to hand it over to a launcher.
PENDING_GRACE_S = 15.0

_MAX_RECORD_BYTES = 4 << 20
_updating = threading.Lock()
T = TypeVar("T")


class _In:
    """The path of a name in the run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """A folder that holds one run. Make it with :meth:`create` or :meth:`open`.

    Reading raises :class:`RunFolderError`, writing :class:`StorageError`.
    """

    path: Path

    run_file = _In("run.json")
    config_file = _In("config.yaml")
    #: Of LightningCLI; only its runs have one.
    cli_config_file = _In("cli_config.yaml")
    heartbeat_file = _In("heartbeat.json")
    metrics_file = _In("metrics.json")
    steps_file = _In("steps.jsonl")
    evaluations_file = _In("evaluations.jsonl")
    ranks_file = _In("ranks.jsonl")
    profile = _In("profile")
    plan_file = _In("plan.json")
    task_file = _In("task.pkl")
    forecast_file = _In("forecast.json")
    slurm_file = _In("slurm.json")
    attempts = _In("attempts")
    checkpoints = _In("checkpoints")
    pictures = _In("pictures")
    audio = _In("audio")
    remarks_file = _In("remarks.jsonl")
    logs = _In("logs")

    @cached_property
    def _steps(self) -> JsonLines:
        return JsonLines(self.steps_file)

    def samples_file(self, rank: int) -> Path:
        """Where ``rank`` writes ``{"attempt", "step", "epoch" (from 1), "indices"}``, a line before each step."""
        return self.path / f"samples-rank{rank}.jsonl"

    @classmethod
    def create(cls, path: Path, config: RunConfig, *, run_id: str, command: Sequence[str]) -> RunDir:
        """Make the folder of a new, pending run atomically.

        Raises:
            ConfigError: the configuration could not be read from the folder again.
            RunFolderError: the folder holds a run or foreign files, or it cannot be written.
        """
        path = absolute(path)
        content = records.frozen_text(config, path)
        record = RunRecord(
            id=run_id,
            name=files.plain(config.name),
            task=files.plain(config.task.name),
            created_at=utc_now(),
            pid=os.getpid(),
            host=socket.gethostname(),
            command=files.plain(list(command)),
            versions=records.versions(),
        )

        def fill(folder: Path) -> None:
            run = cls(folder)
            for inner in (run.attempts, run.checkpoints, run.logs):
                inner.mkdir()
            files.write_text(run.config_file, content)
            announce(run.heartbeat_file, handing_over=True)
            write_json(run.run_file, record.model_dump())

        _refuse_occupied(path)
        try:
            files.make_folder(path, fill)
        except StorageError as error:
            fix = error.fix if "--save-dir" in error.fix else "choose another --save-dir, or free some space there"
            raise RunFolderError(f"cannot make the run folder {path}: {error.what}", why=error.why, fix=fix) from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        run = cls(absolute(path))
        run.read()
        return run

    def begin_attempt(self, plan: Mapping[str, Any], placement: Mapping[str, Any], resumed_from_step: int = 0) -> int:
        """Record that the calling process trains from this step on; returns the attempt's number, from 1."""
        numbers = [int(name) for name in names_in(self.attempts) if _is_number(name)]
        attempt = max([self.read().attempt, *numbers]) + 1
        folder = self.attempts / str(attempt)
        building = self.attempts / files.temporary_name(str(attempt))
        with files.storing(folder):
            try:
                files.remove_leftovers(self.path)
                files.remove_leftovers(self.attempts)
                building.mkdir(parents=True)
                shutil.copyfile(self.config_file, building / self.config_file.name)
                write_json(building / "plan.json", plan)
                write_json(building / "placement.json", {**placement, "resumed_from_step": resumed_from_step})
                building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
        write_json(self.plan_file, plan)
        announce(self.heartbeat_file, resumed_from_step, handing_over=True)
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        begun = {"status": "pending", "error": None, "completed_at": None}
        self.update(attempt=attempt, placement=dict(placement), **process, **begun)
        return attempt

    def keep_plan(self, plan: Mapping[str, Any], attempt: int) -> None:
        """Replace the plan of the newest attempt."""
        for file in (self.plan_file, self.attempts / str(attempt) / self.plan_file.name):
            write_json(file, plan)

    # What the run is.

    def read(self) -> RunRecord:
        if not os.path.lexists(self.run_file):
            there = os.path.lexists(self.path)
            what = f"{self.path} is not a run folder" if there else f"there is no run folder {self.path}"
            raise RunFolderError(what, why="it has no run.json", fix="`lockstep runs` lists the runs")
        return records.parse_record(read_json(self.run_file, max_bytes=_MAX_RECORD_BYTES), self.run_file)

    def update(self, **changes: Any) -> RunRecord:
        """Replace some fields of ``run.json``, atomically."""
        with _updating:
            record = self.read().changed({key: files.plain(value) for key, value in changes.items()})
            write_json(self.run_file, record.model_dump())
        with contextlib.suppress(OSError):
            os.utime(self.path.parent)  # says that a record in there has changed, without a look at each
        return record

    def config(self, attempt: int | None = None) -> RunConfig:
        """The run's frozen configuration, or that of an earlier ``attempt``."""
        file = self.config_file if attempt is None else self.attempts / str(attempt) / self.config_file.name
        content = files.read_bytes(file, max_bytes=MAX_CONFIG_BYTES)
        try:
            return records.parse_frozen(content, self.path)
        except records.NO_CONFIG as error:
            raise damaged(file, str(error)[:500], "restore the file, or start a new run") from None

    def keep_config(self, config: RunConfig) -> None:
        """Replace the configuration, unless it could not be read from the folder again (:class:`ConfigError`)."""
        files.write_text(self.config_file, records.frozen_text(config, self.path))

    def plan(self) -> dict[str, Any]:
        plan = _mapping(read_json(self.plan_file), self.plan_file)
        try:
            plan = upgraded(plan)
            names, decisions = ("key", "title", "shown", "reason"), plan.get("decisions", {}).values()
            if all(isinstance(decision[name], str) for decision in decisions for name in names):
                return plan
        except (AttributeError, KeyError, TypeError):
            pass
        fix = f"copy the newest plan.json of {self.attempts} over it"
        raise damaged(self.plan_file, "its decisions are not titles, values and reasons", fix)

    def progress(self) -> Beat | None:
        return read_beat(self.heartbeat_file)

    def status(self, now: float | None = None) -> str:
        return self.judge(self.read(), now)

    def judge(self, record: RunRecord, now: float | None = None) -> str:
        """pending, running, completed, failed, stopped or lost; ``now`` is in seconds since the epoch.

        A pending or running run whose process is gone is lost: at once where that can be seen, after
        some minutes of silence when it ran on another host.
        """
        if record.status not in LIVE:
            return record.status
        now = time.time() if now is None else now
        beat = self.progress()
        if beat is not None and is_alive(beat, now):
            return record.status
        if record.status == "pending":
            heard = max(record.created_at.timestamp(), beat.updated if beat else 0.0)
            handing_over = beat is None or beat.handing_over
            queued = record.attempt == 0 and self.slurm_file.exists()
            if queued or (handing_over and now - heard < PENDING_GRACE_S):
                return "pending"
        return "lost"

    def is_between_processes(self, record: RunRecord) -> bool:
        """Whether the run is pending between two processes: a launcher may still take it over."""
        beat = self.progress()
        return self.judge(record) == "pending" and not (beat is not None and is_alive(beat, time.time()))

    # Its rows, without those that a later attempt superseded.

    def epochs(self) -> list[dict[str, Any]]:
        if not os.path.lexists(self.metrics_file):
            return []
        rows = _mapping(read_json(self.metrics_file), self.metrics_file).get("epochs")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise damaged(self.metrics_file, "it has no list of epochs", "remove the file; it contains curves only")
        return records.newest_per_epoch(records.surviving(rows, self.resumed_from()))

    def _rows(self, file: Path) -> list[dict[str, Any]]:
        return records.surviving(read_jsonl(file), self.resumed_from())

    def steps(self) -> list[dict[str, Any]]:
        return self._rows(self.steps_file)

    def evaluations(self) -> list[dict[str, Any]]:
        return self._rows(self.evaluations_file)

    def remarks(self) -> list[dict[str, Any]]:
        return self._rows(self.remarks_file)

    def ranks(self) -> list[dict[str, Any]]:
        return self._rows(self.ranks_file)

    def write_epochs(self, rows: Iterable[Mapping[str, Any]]) -> None:
        write_json(self.metrics_file, {"epochs": list(rows)})

    def append_step(self, row: Mapping[str, Any]) -> None:
        self._steps.append(row)

    def resumed_from(self) -> dict[int, int]:
        """From which step each attempt resumed; attempts that cannot be read are left out."""
        found = {}
        names = names_in(self.attempts)
        for name in names if len(names) > 1 else ():  # a single one supersedes nothing
            placement = or_else(partial(read_json, self.attempts / name / "placement.json"), None)
            step = placement.get("resumed_from_step") if isinstance(placement, dict) else None
            if _is_number(name) and isinstance(step, int):
                found[int(name)] = step
        return found


def _refuse_occupied(path: Path) -> None:
    """Raise :class:`RunFolderError` unless ``path`` is free: missing, or an empty folder."""
    if not os.path.lexists(path):
        return
    if not files.is_folder(path):
        raise RunFolderError(f"{path} is a file, not a folder", fix="choose another --save-dir")
    run = RunDir(path)
    if not os.path.lexists(run.run_file):
        if names := sorted(names_in(path)):
            why, fix = f"for example {names[0]}", "choose another --save-dir: a missing or an empty folder"
            raise RunFolderError(f"{path} contains files that are not a run's", why=why, fix=fix)
        return
    record = run.read()
    status = run.judge(record)
    kind, why = "unfinished", f"its status is {status}"
    fix = "add --resume to resume it, or choose another --save-dir"
    if status == "completed":
        kind, why = "finished", "a run folder contains one run, and it is not overwritten"
        fix = "choose another --save-dir"
    elif status in LIVE:
        why = f"process {record.pid} on {record.host} is still training it"
        fix = f"wait for it, or `lockstep stop {record.id}` and add --resume"
    raise RunFolderError(f"{path} contains the {kind} run {record.id}", why=why, fix=fix)


def _mapping(content: Any, path: Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise damaged(path, "its top level is not an object")
    return content


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


# Finding runs, and reading files that may be damaged.


def or_else(read: Callable[[], T], otherwise: Any) -> T | Any:
    """What ``read`` returns of a run folder; ``otherwise`` if the file is missing or damaged."""
    try:
        return read()
    except RunFolderError:
        return otherwise


def one_line(error: RunFolderError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what


def read_runs(root: Path, report: Callable[[str], None] | None = None) -> list[tuple[RunDir, RunRecord]]:
    """Runs directly below ``root`` with their records, newest first; ``report`` receives why one cannot be read."""
    found = []
    root = absolute(root)
    for name in names_in(root):
        run = RunDir(root / name)
        if name.startswith(".") or not os.path.lexists(run.run_file):
            continue
        try:
            found.append((run, run.read()))
        except RunFolderError as error:
            if report is not None:
                report(one_line(error))
    return sorted(found, key=lambda pair: (pair[1].created_at, pair[1].id), reverse=True)


def find_run(ref: str, runs_dir: Path) -> RunDir:
    """The run that ``ref`` names: a folder, an id, the beginning of an id (with or without ``run-``), or ``last``.

    Raises:
        RunFolderError: no run has this name, or several have.
    """
    if not ref or "\0" in ref:
        raise RunFolderError("no run was named", fix="give a folder, an id, the beginning of an id, or `last`")
    here = Path(ref)
    if os.sep in ref or os.path.lexists(here / "run.json"):
        return RunDir.open(here)
    runs = read_runs(runs_dir)
    if ref == "last" and runs:
        return runs[0][0]
    exact = [run for run, record in runs if ref in {record.id, run.path.name}]
    near = exact or [run for run, record in runs if record.id.startswith((ref, f"run-{ref}"))]
    if len(near) == 1:
        return near[0]
    if near:
        what = f"{ref!r} means several runs: {', '.join(run.path.name for run in near[:5])}"
        raise RunFolderError(what, fix="give more of the id, or the folder")
    if files.is_folder(here):
        return RunDir.open(here)
    close = difflib.get_close_matches(ref, [record.id for _, record in runs], n=1)
    listed = f"`lockstep runs` lists the runs of {runs_dir}; name one elsewhere (--save-dir) by its folder"
    raise RunFolderError(
        f"there is no run {ref!r}",
        why=f"{runs_dir} holds {len(runs)} runs" if runs else f"{runs_dir} holds no runs",
        fix=f"did you mean {close[0]}?" if close else listed,
    )
