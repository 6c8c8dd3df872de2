"""Every run below the runs folder, as the page lists it. Files are read again only after a change."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from lockstep.errors import RunFolderError
from lockstep.rundir.files import names_in, plain
from lockstep.rundir.folder import LIVE, RunDir, RunRecord, new_run_id
from lockstep.rundir.heartbeat import Beat
from lockstep.rundir.heartbeat import is_alive as is_beating
from lockstep.rundir.summary import one_line, summarize
from lockstep.studio.commands import Command, Labels, Starts, is_alive, last_lines
from lockstep.studio.home import Home, is_run_name, state_of
from lockstep.studio.schemas import run_not_found

#: Fields of a summary that the list does not need.
_IN_DETAIL = {"command", "versions", "placement", "format_version"}
_FILES = ("run.json", "heartbeat.json", "metrics.json", "plan.json")
Signature = tuple[tuple[int, int, int] | None, ...]
Summary = dict[str, Any]
_log = logging.getLogger(__name__)


@dataclass
class Entry:
    """The summary of one run, and the state of the files that it was read from."""

    run: RunDir
    id: str = ""
    signature: Signature = ()
    base: Summary = field(default_factory=dict)
    record: RunRecord | None = None
    problem: str = ""
    beat: Beat | None = None
    #: Another object after each change.
    summary: Summary = field(default_factory=dict)
    #: Something may change without a change of the files: a process ends, labels are not written yet.
    restless: bool = True


class RunIndex:
    """Summaries of all runs; safe to use from several threads."""

    def __init__(self, home: Home, starts: Starts) -> None:
        self._home = home
        self._starts = starts
        #: By the name of the folder.
        self._entries: dict[str, Entry] = {}
        #: The folder's name by run id.
        self._folders: dict[str, str] = {}
        self._stopping: set[str] = set()
        self._lock = threading.RLock()

    def summaries(self) -> list[Summary]:
        """List a summary for each run, newest first."""
        with self._lock:
            return self._listed()

    def watched(self) -> tuple[list[Summary], list[str]]:
        """Return :meth:`summaries`, each the same object until it changes, and :meth:`problems`."""
        with self._lock:
            return self._listed(), self.problems()

    def listed(self) -> dict[str, Any]:
        return {"runs": self.summaries(), "problems": self.problems()}

    def problems(self) -> list[str]:
        """List the problems of folders that cannot be read as runs."""
        with self._lock:
            return sorted(entry.problem for entry in self._entries.values() if entry.problem)

    def locate(self, ref: str) -> str:
        """Return the folder's name of the run with this id or folder name."""
        with self._lock:
            if ref not in self._folders and not os.path.lexists(self._home.run(ref)):
                self._listed()
            return self._folders.get(ref, ref)

    def summary(self, ref: str) -> Summary:
        with self._lock:
            entry = self._refresh(self.locate(ref))
            if entry is None or not entry.summary:
                raise run_not_found(ref) if entry is None else RunFolderError(entry.problem)
            return entry.summary

    def run(self, ref: str) -> RunDir:
        """Open the folder of a run that can be read."""
        run = RunDir(self._home.run(self.locate(ref)))
        if not os.path.lexists(run.run_file):
            raise run_not_found(ref)
        run.read()
        return run

    def run_folder(self, ref: str) -> RunDir:
        """Return the folder of a run, even if its command has not made it yet."""
        run = RunDir(self._home.run(self.locate(ref)))
        if not os.path.lexists(run.run_file) and self._starts.read(run.path.name) is None:
            raise run_not_found(ref)
        return run

    def going(self) -> list[Summary]:
        return [summary for summary in self.summaries() if summary["status"] in LIVE]

    def users(self) -> dict[str, list[str]]:
        """Return the live runs of each device."""
        runs_by_device: dict[str, list[str]] = {}
        for summary in self.going():
            for device in dict.fromkeys(summary["devices"]):
                runs_by_device.setdefault(device, []).append(summary["id"])
        return runs_by_device

    def stopping(self, ref: str) -> None:
        """Note that the run has been asked to stop; this is cleared when it has ended."""
        with self._lock:
            self._stopping.add(self.locate(ref))

    def _listed(self) -> list[Summary]:
        noted = set(names_in(self._home.starts))
        names = sorted(filter(is_run_name, noted.union(names_in(self._home.runs_dir))))  # before their copies
        for gone in self._entries.keys() - set(names):
            self._drop(gone)
        for name in names:
            self._refresh(name, noted=name in noted)
        shown = [entry.summary for entry in self._entries.values() if entry.summary]
        return sorted(shown, key=lambda summary: (summary["created_at"] or "", summary["id"]), reverse=True)

    def _refresh(self, name: str, *, noted: bool = True) -> Entry | None:
        """Bring the entry of a run up to date; ``None`` without such a run.

        ``noted``: the studio may have notes on it.
        """
        entry = self._entries.get(name)
        path = f"{self._home.runs_dir}/{name}"
        record = state_of(f"{path}/{_FILES[0]}")
        notes = state_of(f"{self._home.starts}/{name}") if noted else None
        # A run that has ended and is unchanged needs no more than this check: an attempt begins with its record.
        if entry is not None and not entry.restless and (entry.signature[0], entry.signature[-1]) == (record, notes):
            return entry
        start = self._starts.read(name) if notes is not None else None
        if record is None and (start is None or self._starts.was_made(name, start)):
            self._drop(name)
            return None
        if entry is None:
            entry = self._entries[name] = Entry(RunDir(self._home.run(name)))
        try:
            signature = (record, *[state_of(f"{path}/{file}") for file in _FILES[1:]], notes)
            if entry.signature != signature:
                self._read(entry, start, there=record is not None)
                entry.signature = signature
            summary = self._complete(entry, start) if not entry.problem or start is not None else {}
        except Exception as error:  # an unexpected error in one run must not hide the others
            if not entry.problem:
                _log.exception("run %s cannot be shown", name)
            entry.problem = f"{path} cannot be shown: {type(error).__name__}: {error}"
            entry.signature = ()
            entry.restless = True
            summary = {}
        if summary != entry.summary:
            entry.summary = summary
        return entry

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._folders.pop(entry.id, None)

    def _read(self, entry: Entry, start: Command | None, *, there: bool) -> None:
        """Read the files of a run; ``there``: it has a record. Else its command has not made its folder yet."""
        entry.record = None
        entry.beat = None
        entry.problem = ""
        summary: Summary = {}
        try:
            if there:
                record = entry.run.read()
                summary = summarize(entry.run, record)
                entry.record = record
                entry.beat = entry.run.progress()
        except RunFolderError as error:
            entry.problem = one_line(error)
        if entry.record is None and start is not None:
            began = datetime.fromtimestamp(start.at, UTC)
            placed = {"devices": start.devices}
            # The entry has another id.
            record = RunRecord(id=new_run_id(), task=start.task, created_at=began, pid=start.pid, placement=placed)
            summary = summarize(entry.run, record)
        entry.base = plain({key: value for key, value in summary.items() if key not in _IN_DETAIL})
        # Its record's id, or the name of its folder if another folder has this id already.
        folder = entry.run.path.name
        self._folders.pop(entry.id, None)
        run_id = entry.record.id if entry.record is not None else folder
        entry.id = next(name for name in (run_id, folder, f"{folder}~") if name not in self._folders)
        self._folders[entry.id] = folder

    def _complete(self, entry: Entry, start: Command | None) -> Summary:
        """Complete the summary from the files by the state of processes and the labels."""
        run = entry.run
        record = entry.record
        base = dict(entry.base)
        name = run.path.name
        labels = self._starts.labels(name) if entry.signature[-1] is not None else Labels()
        alive = start is not None and is_alive(start.process)
        unseen = start is not None and (record.attempt if record is not None else 0) <= start.attempt_before
        status = "pending" if alive and unseen else "failed" if record is None else run.judge(record)
        resume_error = None
        if start is not None:
            output = self._starts.output(name)  # is moved into the run's folder
            if unseen and not alive:
                lines, _ = last_lines(output, 40, skip_bytes=start.output_from)
                text = "\n".join(lines) or "the command ended without output"
                if start.attempt_before:
                    resume_error = text
                elif status in {"failed", "lost"}:
                    base["error"] = base["error"] or text
        entry.restless = alive or status in LIVE or (entry.beat is not None and is_beating(entry.beat, time.time()))
        if status not in LIVE:
            self._stopping.discard(name)
            if not entry.restless and record is not None and labels.changes():
                self._starts.settle(run)
        return {
            **base,
            **labels.changes(),
            "id": entry.id,
            "status": status,
            "starting": alive and unseen,
            "resume_error": resume_error,
            "stopping": name in self._stopping,
            "eta_s": base["eta_s"] if status == "running" else None,
        }
