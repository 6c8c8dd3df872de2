"""Follow the files of a run: what was appended since the last poll, as columns and as frames for the page."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from lockstep.studio.columns import Column, Columns, columns_of, pack
from lockstep.studio.home import modified_ns
from lockstep.telemetry.files import open_regular
from lockstep.telemetry.lookup import or_else
from lockstep.telemetry.rundir import RunDir

#: Read at once: small enough not to block other threads for long.
CHUNK_BYTES = 1 << 20
#: Above this size a coarse sample of the file is shown first.
LARGE_BYTES = 8 << 20
#: Of the coarse sample: rows with hundreds of values are few, or it would take longer than the file.
_SAMPLE_LINES, _SAMPLE_BYTES = 1000, 2 << 20
#: How often epochs and new files are checked; streams are read at every poll.
_STATE_S = 0.5
#: Chunks read in one poll of a long file.
_CHUNKS = 4


class Tail:
    """One file. ``x`` is ``step`` (later attempts supersede rows) or ``time``."""

    def __init__(self, path: Path, x: str) -> None:
        self.columns = Columns(x)
        self._path = path
        self._attempts: Mapping[int, int] = {}
        self._file: tuple[int, int] = (0, 0)
        self._offset = 0
        self._rest = b""
        self.behind = False

    def poll(self) -> bool:
        """Read at most one chunk; return whether anything changed. ``behind``: there is more."""
        self.behind = False
        before = (self.columns.rows, self.columns.generation)
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    self._file = (status.st_dev, status.st_ino)
                    self.restart(self._attempts)
                if status.st_size > self._offset:
                    self._offset = _next_data(file.fileno(), self._offset)
                    file.seek(self._offset)
                    content = file.read(CHUNK_BYTES)
                    self._offset += len(content)
                    self.behind = self._offset < status.st_size
                    self._take(self._rest + content)
        except OSError:
            return False
        return (self.columns.rows, self.columns.generation) != before

    def restart(self, attempts: Mapping[int, int]) -> None:
        """Read the file again. ``attempts``: from which step each attempt resumed (:meth:`RunDir.resumed_from`)."""
        self._attempts = attempts
        self.columns.clear()
        self._offset, self._rest = 0, b""

    def sample(self) -> Columns | None:
        """A coarse sample of a file that takes long to read; ``None`` for a short one."""
        try:
            with open_regular(self._path, buffer_bytes=8192) as file:
                size = os.fstat(file.fileno()).st_size
                if size < LARGE_BYTES:
                    return None
                lines, room = [], _SAMPLE_BYTES
                wanted = max(2, min(_SAMPLE_LINES, room // max(1, len(file.readline(CHUNK_BYTES)))))
                for position in range(0, size, size // wanted):
                    file.seek(_next_data(file.fileno(), position))
                    file.readline(CHUNK_BYTES)  # rest of a line
                    line = file.readline(CHUNK_BYTES)
                    if line.startswith(b"{") and (room := room - len(line)) > 0:
                        lines.append(line)
        except OSError:
            return None
        picture = Columns(self.columns.x)
        _append_increasing(picture, columns_of(_rows(lines), picture.x))
        return picture

    def _take(self, content: bytes) -> None:
        *lines, self._rest = content.split(b"\n")
        if len(self._rest) > 4 * CHUNK_BYTES:
            self._rest = b""  # Lockstep writes no such line
        columns = columns_of(_rows(lines), self.columns.x)
        if self.columns.x == "step":
            self._add_steps(columns)
        else:
            _append_increasing(self.columns, columns)

    def _add_steps(self, columns: Mapping[str, Column]) -> None:
        """As :func:`lockstep.telemetry.records.surviving`, on stretches of rows instead of single ones."""
        steps = columns["step"]
        attempts = np.nan_to_num(columns.get("attempt", np.ones(len(steps))), nan=1)
        breaks = np.flatnonzero((np.diff(steps) <= 0) | (np.diff(attempts) != 0)) + 1
        edges = [0, *breaks.tolist(), len(steps)]
        for start, end in itertools.pairwise(edges):
            if start == end:
                continue
            kept = start + int(np.searchsorted(steps[start:end], self._limit(int(attempts[start])), side="right"))
            if kept > start:
                self.columns.truncate(
                    int(np.searchsorted(self.columns["step"], steps[start])) if self.columns.rows else 0
                )
                self.columns.append(columns, start, kept)

    def _limit(self, attempt: int) -> float:
        return min((step for later, step in self._attempts.items() if later > attempt), default=np.inf)


def _next_data(file: int, offset: int) -> int:
    """The next offset that is not in a hole of a sparse file, or its end."""
    try:
        return max(offset, os.lseek(file, offset, os.SEEK_DATA))
    except OSError as error:
        return os.fstat(file).st_size if error.errno == errno.ENXIO else offset


def _append_increasing(target: Columns, columns: Mapping[str, Column]) -> None:
    """Add the rows whose x is beyond what there is: a clock that was set back must not fold the curve."""
    xs = columns[target.x]
    if not len(xs):
        return
    last = target[target.x][-1] if target.rows else -np.inf
    before = np.concatenate([[last], np.maximum.accumulate(np.maximum(xs, last))[:-1]])
    keep = xs > before
    target.append({name: values[keep] for name, values in columns.items()})


def _rows(lines: list[bytes]) -> list[dict[str, Any]]:
    """The rows among ``lines``; a line that a power cut damaged is left out."""
    try:
        found = from_json(b"[" + b",".join(line for line in lines if line) + b"]", allow_inf_nan=True)
    except ValueError:
        found = [_row(line) for line in lines]
    return [row for row in found if isinstance(row, dict)]


def _row(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class Feed:
    """Reads a run's files when :meth:`poll` is called, from one thread at a time."""

    def __init__(self, run: RunDir, name: str) -> None:
        self.name = name
        self.epochs: list[dict[str, Any]] = []
        #: Counts its changes, to know what each tab has seen.
        self.epochs_version = 0
        self.tails: dict[str, Tail] = {}
        self.previews: dict[str, Columns] = {}
        self.lock = threading.Lock()
        self._run = run
        self._looked = -_STATE_S
        self._attempts: dict[int, int] = {}
        self._attempts_stamp = 0
        self._epochs_stamp = (-1, -1)
        #: Those made since the last poll.
        self._frames: dict[tuple[Any, ...], bytes] = {}

    @property
    def behind(self) -> bool:
        """Whether a file is longer than what has been read of it."""
        return any(tail.behind for tail in self.tails.values())

    def poll(self) -> bool:
        """Read the files; return whether anything changed."""
        with self.lock:
            self._frames.clear()
            now = time.monotonic()
            changed = self._notice_attempts()
            if now - self._looked >= _STATE_S:
                self._looked = now
                changed |= self._look()
                if any(tail.behind and not tail.columns.rows for tail in self.tails.values()):
                    return True  # the preview first
            for name, tail in list(self.tails.items()):
                for _ in range(_CHUNKS):
                    changed |= tail.poll()
                    if not tail.behind:
                        changed |= self.previews.pop(name, None) is not None
                        break
            return changed

    def frame(self, kind: str, stream: str, columns: Columns, start: int, *, preview: bool = False) -> bytes:
        """The rows from ``start`` on, the same for every tab: a ``delta``, or all of a ``history``."""
        key = (kind, stream, preview, start)
        if key not in self._frames:
            self._frames[key] = self._frame(kind, stream, columns, start, columns.rows, preview=preview)
        return self._frames[key]

    def range(self, stream: str, low: float | None, high: float | None, request: Any) -> bytes:
        """A frame of the rows with ``low`` ≤ x ≤ ``high``."""
        columns = self.tails[stream].columns
        return self._frame("range", stream, columns, *columns.between(low, high), request=request)

    def _frame(self, kind: str, stream: str, columns: Columns, start: int, end: int, **more: Any) -> bytes:
        part, thin = columns.part(start, end)
        where = {"kind": kind, "run": self.name, "stream": stream, "x": columns.x, "start": start, "rows": end - start}
        state = {"generation": columns.generation, "total": columns.rows, "downsampled": thin, "cut": columns.cut}
        return pack({**where, **state, "preview": False, **more}, part)

    def _look(self) -> bool:
        """Check for new streams and epochs; return whether epochs changed."""
        for pattern in ("steps", "evaluations", "ranks", "system-*"):
            for file in sorted(self._run.path.glob(f"{pattern}.jsonl"))[:64]:
                if file.stem not in self.tails:
                    self.tails[file.stem] = Tail(file, "time" if file.stem.startswith("system-") else "step")
                    self._begin(file.stem)
        stamp = (modified_ns(self._run.metrics_file), self._attempts_stamp)
        if stamp == self._epochs_stamp:
            return False
        self._epochs_stamp = stamp
        self.epochs = or_else(self._run.epochs, [])
        self.epochs_version += 1
        return True

    def _notice_attempts(self) -> bool:
        """A new attempt supersedes rows: read the streams again."""
        stamp = modified_ns(self._run.attempts)
        if stamp == self._attempts_stamp:
            return False
        self._attempts_stamp = stamp
        attempts = self._run.resumed_from()
        if attempts == self._attempts:
            return False
        self._attempts = attempts
        for name in self.tails:
            self._begin(name)
        return True

    def _begin(self, name: str) -> None:
        tail = self.tails[name]
        tail.restart(self._attempts)
        preview = tail.sample()
        if preview is not None and preview.rows:
            self.previews[name] = preview
            tail.behind = True
