"""Every run below the runs folder, as the page lists it. Files are read again only when they have changed."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import RunFolderError
from lockstep.studio.home import Home, is_run_name, iso
from lockstep.studio.launch_records import Labels, Start, Starts
from lockstep.studio.problems import run_not_found
from lockstep.studio.processes import is_alive, reap
from lockstep.telemetry.files import plain
from lockstep.telemetry.heartbeat import Beat
from lockstep.telemetry.heartbeat import is_alive as is_beating
from lockstep.telemetry.lookup import or_else, planned_epochs
from lockstep.telemetry.rundir import RunDir, RunRecord

LIVE = {"pending", "running"}
#: Over how long the speed of a run is measured for its ETA.
_WINDOW_S = 30.0
#: How often a watched list looks at runs that are over: somebody may resume one in a terminal.
_THOROUGH_S = 5.0

_FILES = ("run.json", "heartbeat.json", "metrics.json", "plan.json")
Signature = tuple[tuple[int, int, int] | None, ...]
_log = logging.getLogger(__name__)


@dataclass
class Entry:
    """What is known of one run, and from which state of its files."""

    run: RunDir
    signature: Signature = ()
    base: dict[str, Any] = field(default_factory=dict)
    record: RunRecord | None = None
    problem: str = ""
    beat: Beat | None = None
    beats: list[tuple[float, int]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    #: Something may change without a file that changes: a process ends, labels wait to be written.
    restless: bool = True
    _encoded: tuple[int, bytes] = (0, b"")

    def encoded(self) -> bytes:
        """The summary as JSON."""
        if self._encoded[0] != self.version:
            self._encoded = (self.version, json.dumps(self.summary, separators=(",", ":")).encode())
        return self._encoded[1]


class RunIndex:
    """Summaries of all runs; safe to use from several threads."""

    def __init__(self, home: Home, starts: Starts) -> None:
        self._home = home
        self._starts = starts
        self._starts_dir = str(home.starts)
        self._entries: dict[str, Entry] = {}
        self._stopping: set[str] = set()
        self._lock = threading.RLock()
        self._version = 0
        self._looked = 0.0

    def summaries(self) -> list[dict[str, Any]]:
        """One summary a run, newest first."""
        return [entry.summary for entry in self._listed()]

    def encoded(self) -> bytes:
        """:meth:`summaries` as a JSON array."""
        return b"[" + b",".join(entry.encoded() for entry in self._listed()) + b"]"

    def versions(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """By run: a number that changes with its summary, and the summary. Newest first.

        Called every second; runs that are over are looked at only every few seconds.
        """
        now = time.monotonic()
        thorough = now - self._looked >= _THOROUGH_S
        if thorough:
            self._looked = now
        return {entry.summary["id"]: (entry.version, entry.summary) for entry in self._listed(thorough=thorough)}

    def problems(self) -> list[str]:
        """Why folders that should be runs cannot be read."""
        with self._lock:
            return sorted(entry.problem for entry in self._entries.values() if entry.problem)

    def summary(self, name: str) -> dict[str, Any]:
        """The summary of one run. Raises :class:`ApiError` when there is none."""
        with self._lock:
            reap()
            entry = self._refresh(name, str(self._home.run(name)))
            if entry is None or not entry.summary:
                raise run_not_found(name) if entry is None else RunFolderError(entry.problem)
            return entry.summary

    def run(self, name: str) -> RunDir:
        """The folder of a run that can be read. Raises :class:`LockstepError`."""
        run = RunDir(self._home.run(name))
        if not os.path.lexists(run.run_file):
            raise run_not_found(name)
        run.read()
        return run

    def run_folder(self, name: str) -> RunDir:
        """The folder of a run, also of one whose command has not made it yet. Raises :class:`ApiError`."""
        run = RunDir(self._home.run(name))
        if not os.path.lexists(run.run_file) and self._starts.read(name) is None:
            raise run_not_found(name)
        return run

    def users(self) -> dict[str, list[str]]:
        """The live runs of each device."""
        found: dict[str, list[str]] = {}
        for summary in self.summaries():
            if summary["status"] in LIVE:
                for device in dict.fromkeys(summary["devices"]):
                    found.setdefault(device, []).append(summary["id"])
        return found

    def stopping(self, name: str, on: bool) -> None:
        """Note that somebody has asked a run to stop, or that this is over."""
        with self._lock:
            (self._stopping.add if on else self._stopping.discard)(name)

    def _listed(self, *, thorough: bool = True) -> list[Entry]:
        with self._lock:
            reap()
            names = dict(self._names())
            for gone in self._entries.keys() - names.keys():
                del self._entries[gone]
            known = {} if thorough else {name: entry for name, entry in self._entries.items() if not entry.restless}
            entries = [known.get(name) or self._refresh(name, path) for name, path in names.items()]
            shown = [entry for entry in entries if entry is not None and entry.summary]
            return sorted(shown, key=lambda e: (e.summary["created_at"] or "", e.summary["id"]), reverse=True)

    def _names(self) -> Iterator[tuple[str, str]]:
        started = {name for name in self._starts.names() if is_run_name(name)}
        try:
            with os.scandir(self._home.runs_dir) as found:
                for item in found:
                    if is_run_name(item.name):
                        started.discard(item.name)
                        yield item.name, item.path
        except OSError:
            return
        for name in started:
            yield name, str(self._home.runs_dir / name)

    def _refresh(self, name: str, path: str) -> Entry | None:
        """The entry of a run, up to date; ``None`` when there is no such run."""
        signature: Signature = tuple([_stat(f"{path}/{file}") for file in _FILES])
        entry = self._entries.get(name)
        start = None
        notes = _stat(f"{self._starts_dir}/{name}")
        signature = (*signature, notes)
        # A run that is over and unchanged needs nothing more than this look at its files.
        if entry is not None and entry.signature == signature and not entry.restless:
            return entry
        if notes is not None:
            start = self._starts.read(name)
        if signature[0] is None and start is None:
            self._entries.pop(name, None)
            return None
        if entry is None:
            entry = self._entries[name] = Entry(RunDir(self._home.run(name)))
        try:
            self._renew(entry, start, signature)
        except Exception as error:  # one run that nobody has foreseen does not hide the others
            if not entry.problem:
                _log.exception("run %s cannot be shown", name)
            entry.problem = f"{path} cannot be shown: {type(error).__name__}: {error}"
            entry.signature, entry.summary, entry.restless = (), {}, True
        return entry

    def _renew(self, entry: Entry, start: Start | None, signature: Signature) -> None:
        """Bring ``entry`` to the state of the files that ``signature`` stands for."""
        if entry.signature != signature:
            _read(entry, there=signature[0] is not None)
            entry.signature = signature
        if entry.problem and start is None:
            return
        summary = self._complete(entry, start)
        if summary != entry.summary:
            self._version += 1
            entry.summary, entry.version = summary, self._version

    def _complete(self, entry: Entry, start: Start | None) -> dict[str, Any]:
        """The summary: what the files say, and what can only be judged now."""
        run, name = entry.run, entry.run.path.name
        labels = self._starts.labels(name) if start is not None or entry.signature[-1] is not None else None
        alive = start is not None and is_alive(start.process)
        base = dict(entry.base) if entry.record is not None else _not_yet(name, start, str(run.path))
        record = entry.record
        attempt = record.attempt if record is not None else 0
        starting = alive and start is not None and attempt <= start.attempt_before
        if starting:
            status = "pending"
        elif record is None:
            status = "failed"
        else:
            status = run.judge(record)
        resume_error = None
        if start is not None and not alive and attempt <= start.attempt_before:
            said = self._starts.last_words(name, start) or "the command ended without a word"
            if start.attempt_before:
                resume_error = said
            elif status in {"failed", "lost"}:
                base["error"] = base["error"] or said
        entry.restless = alive or status in LIVE or (entry.beat is not None and is_beating(entry.beat, time.time()))
        if status not in LIVE:
            self._stopping.discard(name)
            if not entry.restless and record is not None and labels not in (None, Labels()):
                self._starts.settle(run)
        if labels is not None and labels.name is not None:
            base["name"] = labels.name or None
        if labels is not None and labels.tags is not None:
            base["tags"] = list(labels.tags)
        done, total = base["step"], base["total_steps"]
        running = status == "running" and not starting
        return {
            **base,
            "status": status,
            "starting": starting,
            "resume_error": resume_error,
            "stopping": name in self._stopping,
            "progress": min(1.0, done / total) if done is not None and total else None,
            "eta_s": _eta_s(entry.beats, total) if running else None,
            "samples_per_s": (base["last_epoch"] or {}).get("samples_per_s"),
        }


def _read(entry: Entry, *, there: bool) -> None:
    """Take in what the files of a run say; ``there``: it has a record."""
    entry.record, entry.base, entry.beat = None, {}, None
    if not there:
        entry.problem = ""
        return
    run = entry.run
    try:
        record = run.read()
        devices = _devices(record, run)
    except RunFolderError as error:
        entry.problem = f"{error.what}: {error.why}" if error.why else error.what
        entry.summary = {}
        return
    beat = run.progress()
    if beat is not None:
        entry.beats = [pair for pair in entry.beats if beat.updated - pair[0] < _WINDOW_S and pair[1] <= beat.step]
        entry.beats.append((beat.updated, beat.step))
    # Only the progress of a run that is going needs them: a list of a thousand others opens no file for it.
    rows, planned = (or_else(run.epochs, []), planned_epochs(run)) if record.status in LIVE else ([], None)
    last = rows[-1] if rows else None
    placement = record.placement or {}
    # The record's texts have been checked; its metrics and what comes from elsewhere may hold what JSON cannot.
    entry.base = record.model_dump(mode="json", exclude={"command", "versions", "placement", "format_version"})
    entry.base |= plain(
        {
            "best_metric": record.best_metric,
            "final_metrics": record.final_metrics,
            "restarts": record.restarts,
            "id": run.path.name,
            "run_id": record.id,
            "devices": devices,
            **{key: placement.get(key) for key in ("world_size", "strategy", "precision")},
            "epoch": last.get("epoch") if last else None,
            "epochs": planned,
            "last_epoch": last,
            "step": beat.step if beat else None,
            "total_steps": beat.total if beat else None,
            "path": str(run.path),
        }
    )
    entry.record, entry.beat, entry.problem = record, beat, ""


def _devices(record: RunRecord, run: RunDir) -> list[str]:
    """The devices of the newest attempt. Raises :class:`RunFolderError`."""
    devices = (record.placement or {}).get("devices") or []
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise RunFolderError(
            f"{run.run_file} is damaged",
            why="the devices of its placement are not a list of names",
            fix="restore the file, or delete the run",
        )
    return devices


def _eta_s(beats: list[tuple[float, int]], total: int | None) -> float | None:
    """Seconds to the end at the speed of the last half minute, rounded so that it does not flicker."""
    if total is None or len(beats) < 2 or beats[-1][1] <= beats[0][1]:
        return None
    per_step = (beats[-1][0] - beats[0][0]) / (beats[-1][1] - beats[0][1])
    return round(max(0, total - beats[-1][1]) * per_step, 1)


def _not_yet(name: str, start: Start | None, path: str) -> dict[str, Any]:
    """The summary of a run whose command has not made its folder yet."""
    empty = (
        *("name", "started_at", "completed_at", "host", "world_size", "strategy", "precision", "epoch", "epochs"),
        *("last_epoch", "step", "total_steps", "best_epoch", "error"),
    )
    return {
        **dict.fromkeys(empty),
        "id": name,
        "run_id": name,
        "tags": [],
        "task": start.task if start else "",
        "created_at": iso(start.at if start else time.time()),
        "attempt": 0,
        "pid": start.pid if start else None,
        "devices": list(start.devices) if start else [],
        "best_metric": {},
        "final_metrics": {},
        "path": path,
    }


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - a thousand runs are looked at in one go
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
