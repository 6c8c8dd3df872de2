"""Follow a JSON lines file: what was appended since the last poll, as columns."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from lockstep.studio.columns import Column, Columns, columns_of
from lockstep.telemetry.files import open_regular

#: Read at once: small enough not to block other threads for long.
CHUNK_BYTES = 1 << 20
#: Above this size a coarse sample of the file is shown first.
LARGE_BYTES = 8 << 20
#: Of the coarse sample: rows with hundreds of values are few, or it would take longer than the file.
_SAMPLE_LINES, _SAMPLE_BYTES = 1000, 2 << 20


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
