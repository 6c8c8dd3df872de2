"""Follow the files of a run: what was appended since the last poll, as columns and as frames for the page."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from lockstep.rundir.files import open_regular, row_of
from lockstep.rundir.folder import RunDir, or_else
from lockstep.studio.home import modified_ns

#: Above this number of rows the page gets the minimum and maximum of buckets.
FULL_ROWS = 100_000
#: Rows of a thinned-out history.
POINTS = 20_000
#: ``ranks.jsonl`` has seven numbers a rank: enough for 1,024 ranks.
_MAX_COLUMNS = 8192
_MAX_DEPTH = 4
#: Counts and times that single precision would round.
_DOUBLE = ("step", "time", "samples_seen")
#: Read at once: small enough not to block other threads for long; and how often in one poll of a long file.
CHUNK_BYTES, _CHUNKS = 1 << 20, 4
#: Above this size a coarse sample of the file is shown first.
LARGE_BYTES = 8 << 20
#: Of the coarse sample: rows with hundreds of values are few, or it would take longer than the file.
_SAMPLE_LINES, _SAMPLE_BYTES = 1000, 2 << 20
#: How often streams are read; and attempts, epochs and new files are checked.
TICK_S, _STATE_S = 0.1, 0.5
_STREAMS = ("steps", "evaluations", "ranks", "system-*")

Column = NDArray[Any]
Message = dict[str, Any] | bytes


class Columns:
    """Equally long columns of numbers; a value that a row lacks is NaN. ``x`` names the increasing one."""

    def __init__(self, x: str) -> None:
        self.x = x
        self.rows = 0
        #: Changes when rows are removed: what was sent before is invalid.
        self.generation = 0
        #: Whether the rows have more columns than are kept.
        self.cut = False
        self._data: dict[str, Column] = {}

    def __getitem__(self, name: str) -> Column:
        return self._data[name][: self.rows]

    def append(self, columns: Mapping[str, Column], start: int = 0, end: int | None = None) -> None:
        """Add rows ``start`` to ``end`` of ``columns``, which are equally long."""
        end = len(columns[self.x]) if end is None else end
        total = self.rows + end - start
        for name in [name for name in columns if name not in self._data]:
            if len(self._data) < _MAX_COLUMNS:
                self._data[name] = np.full(max(total, 1024), np.nan, _type_of(name))
            else:
                self.cut = True
        for name, old in self._data.items():
            if len(old) < total:
                grown = np.full(max(total, 2 * len(old)), np.nan, old.dtype)
                grown[: self.rows] = old[: self.rows]
                self._data[name] = old = grown
            given = columns.get(name)
            old[self.rows : total] = np.nan if given is None else given[start:end]
        self.rows = total

    def truncate(self, rows: int) -> None:
        if rows < self.rows:
            self.rows = rows
            self.generation += 1

    def clear(self) -> None:
        """Remove all rows: the file was replaced."""
        self._data, self.rows, self.cut = {}, 0, False
        self.generation += 1

    def between(self, low: float | None, high: float | None) -> tuple[int, int]:
        """First and last-plus-one row with ``low`` ≤ x ≤ ``high``."""
        if not self.rows:
            return 0, 0
        start = 0 if low is None else int(np.searchsorted(self[self.x], low, side="left"))
        end = self.rows if high is None else int(np.searchsorted(self[self.x], high, side="right"))
        return start, max(start, end)

    def part(self, start: int, end: int) -> tuple[dict[str, Column], bool]:
        """Rows ``start`` to ``end`` as columns, and whether they were thinned out."""
        part = {name: values[start:end] for name, values in self._data.items()}
        thin = end - start > FULL_ROWS
        return thin_out(part, self.x, POINTS) if thin else part, thin


def thin_out(columns: Mapping[str, Column], x: str, points: int) -> dict[str, Column]:
    """Two rows a bucket: each column's minimum and maximum in the order in which they came.

    x is that of the bucket's first and middle row. Every peak stays visible; rows of an incomplete bucket are kept.
    """
    rows = len(columns[x])
    size = max(2, -(-2 * rows // max(2, points)))
    buckets = rows // size
    whole = buckets * size
    result: dict[str, Column] = {}
    for name, values in columns.items():
        grid = values[:whole].reshape(buckets, size)
        if name == x:
            pairs = grid[:, [0, size // 2]]
        else:
            lowest = np.where(np.isnan(grid), np.inf, grid).argmin(axis=1)
            highest = np.where(np.isnan(grid), -np.inf, grid).argmax(axis=1)
            pairs = np.take_along_axis(grid, np.sort(np.stack([lowest, highest], axis=1), axis=1), axis=1)
        result[name] = np.concatenate([pairs.reshape(-1), values[whole:]])
    return result


def pack(header: Mapping[str, Any], columns: Mapping[str, Column]) -> bytes:
    """One binary message: length of the header, header (JSON), columns; all aligned to 8 bytes."""
    described, chunks, offset = [], [], 0
    for name, values in columns.items():
        kind = "f64" if values.dtype == np.float64 else "f32"
        described.append({"name": name, "type": kind, "offset": offset, "length": len(values)})
        content = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
        content += bytes(-len(content) % 8)
        chunks.append(content)
        offset += len(content)
    text = json.dumps({**header, "columns": described}, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return b"".join([struct.pack("<I", len(text)), text, *chunks])


def columns_of(rows: Sequence[Mapping[str, Any]], x: str) -> dict[str, Column]:
    """Numbers of the rows, nested ones under dotted names; rows without a usable ``x`` are left out.

    List items with an ``id`` (``devices: [{"id": "gpu:0", …}]``) are named by it, others by position.
    """
    placed = [row for row in rows if not math.isnan(_number(row.get(x)))]
    found: dict[str, Column] = {x: np.empty(0)}
    if placed:
        _collect(placed, "", 0, found)
    return found


def _collect(rows: Sequence[Mapping[str, Any]], prefix: str, depth: int, found: dict[str, Column]) -> None:
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) for row in rows]
        kinds = set(map(type, values))
        name = f"{prefix}{key}"
        if dict in kinds or list in kinds:
            if depth < _MAX_DEPTH:
                named = any(isinstance(v, list) and v and isinstance(v[0], dict) and "id" in v[0] for v in values)
                _collect([_as_mapping(v) for v in values], prefix if named else f"{name}.", depth + 1, found)
        elif kinds & {int, float} and len(found) <= _MAX_COLUMNS:  # one too many, for `cut`
            try:
                column = np.array(values, dtype=np.float64)
            except (ValueError, TypeError, OverflowError):
                column = np.array([_number(value) for value in values])
            found[name] = column.astype(_type_of(name), copy=False)


def _as_mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, list):
        items = enumerate(value[:_MAX_COLUMNS])
        return {str(item["id"] if isinstance(item, dict) and "id" in item else place): item for place, item in items}
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _type_of(name: str) -> Any:
    return np.float64 if name in _DOUBLE else np.float32


class Tail:
    """One file. ``x`` is ``step`` (later attempts supersede rows) or ``time``."""

    def __init__(self, path: Path, x: str) -> None:
        self.columns = Columns(x)
        #: Whether the file is longer than what has been read of it.
        self.behind = False
        self._path = path
        self._attempts: Mapping[int, int] = {}
        self._file = (0, 0)
        self._offset = 0
        self._rest = b""

    def poll(self) -> bool:
        """Read at most one chunk; return whether anything changed."""
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
        """As :func:`lockstep.rundir.folder.surviving`, on stretches of rows instead of single ones."""
        steps, ours = columns["step"], self.columns
        attempts = np.nan_to_num(columns.get("attempt", np.ones(len(steps))), nan=1)
        breaks = np.flatnonzero((np.diff(steps) <= 0) | (np.diff(attempts) != 0)) + 1
        for start, end in itertools.pairwise([0, *breaks.tolist(), len(steps)]):
            if start == end:
                continue
            later = [step for attempt, step in self._attempts.items() if attempt > int(attempts[start])]
            kept = start + int(np.searchsorted(steps[start:end], min(later, default=np.inf), side="right"))
            if kept > start:
                ours.truncate(int(np.searchsorted(ours["step"], steps[start])) if ours.rows else 0)
                ours.append(columns, start, kept)


def _next_data(file: int, offset: int) -> int:
    """The next offset that is not in a hole of a sparse file, or its end."""
    try:
        return max(offset, os.lseek(file, offset, os.SEEK_DATA))
    except OSError as error:
        return os.fstat(file).st_size if error.errno == errno.ENXIO else offset


def _append_increasing(target: Columns, columns: Mapping[str, Column]) -> None:
    """Add the rows whose x is beyond what there is: a clock that was set back must not fold the curve."""
    xs = columns[target.x]
    if len(xs):
        last = target[target.x][-1] if target.rows else -np.inf
        before = np.concatenate([[last], np.maximum.accumulate(np.maximum(xs, last))[:-1]])
        target.append({name: values[xs > before] for name, values in columns.items()})


def _rows(lines: list[bytes]) -> list[dict[str, Any]]:
    """The rows among ``lines``; a line that a power cut damaged is left out."""
    try:
        found = from_json(b"[" + b",".join(line for line in lines if line) + b"]", allow_inf_nan=True)
    except ValueError:
        found = map(row_of, lines)
    return [row for row in found if isinstance(row, dict)]


class Feed:
    """Reads a run's files when :meth:`poll` is called."""

    def __init__(self, run: RunDir, name: str) -> None:
        self.name = name
        #: Another list after each change.
        self.epochs: list[dict[str, Any]] = []
        self.tails: dict[str, Tail] = {}
        self.previews: dict[str, Columns] = {}
        self.lock = threading.Lock()
        #: Whether a file is longer than what has been read of it.
        self.behind = False
        self._run = run
        self._polled = self._looked = -_STATE_S
        self._attempts: dict[int, int] = {}
        #: When attempts and epochs were changed, at the last look.
        self._stamp = (-1, -1)

    def poll(self) -> None:
        """Read what is new, though not again within half a tick, for several tabs. The caller has the lock."""
        now = time.monotonic()
        if now - self._polled < TICK_S / 2 and not self.behind:
            return
        self._polled = now
        if now - self._looked >= _STATE_S:
            self._looked = now
            self._look()
            if any(tail.behind and not tail.columns.rows for tail in self.tails.values()):
                self.behind = True
                return  # the preview first
        for name, tail in self.tails.items():
            for _ in range(_CHUNKS):
                tail.poll()
                if not tail.behind:
                    self.previews.pop(name, None)
                    break
        self.behind = any(tail.behind for tail in self.tails.values())

    def range(self, stream: str, low: float | None, high: float | None, request: Any) -> bytes:
        columns = self.tails[stream].columns
        return self.frame("range", stream, columns, *columns.between(low, high), request=request)

    def frame(
        self, kind: str, stream: str, columns: Columns, start: int = 0, end: int | None = None, **more: Any
    ) -> bytes:
        """Rows: all of a ``history``, a ``delta`` from ``start`` on, or a ``range``."""
        end = columns.rows if end is None else end
        part, thin = columns.part(start, end)
        where = {"kind": kind, "run": self.name, "stream": stream, "x": columns.x, "start": start, "rows": end - start}
        state = {"generation": columns.generation, "total": columns.rows, "downsampled": thin, "cut": columns.cut}
        return pack({**where, **state, "preview": False, **more}, part)

    def _look(self) -> None:
        """Notice attempts, which supersede rows, new streams and epochs."""
        stamp = (modified_ns(self._run.attempts), modified_ns(self._run.metrics_file))
        if stamp[0] != self._stamp[0] and (attempts := self._run.resumed_from()) != self._attempts:
            self._attempts = attempts
            for name in self.tails:
                self._begin(name)
        for pattern in _STREAMS:
            for file in sorted(self._run.path.glob(f"{pattern}.jsonl"))[:64]:
                if file.stem not in self.tails:
                    self.tails[file.stem] = Tail(file, "time" if file.stem.startswith("system-") else "step")
                    self._begin(file.stem)
        if stamp != self._stamp:
            self._stamp = stamp
            self.epochs = or_else(self._run.epochs, [])

    def _begin(self, name: str) -> None:
        tail = self.tails[name]
        tail.restart(self._attempts)
        preview = tail.sample()
        if preview is not None and preview.rows:
            self.previews[name] = preview
            tail.behind = True


@dataclass
class Subscription:
    """What a tab has received of one run."""

    feed: Feed
    #: By stream: generation and rows as the tab has them, and the rows of its last history.
    cursors: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    epochs: list[dict[str, Any]] | None = None

    def news(self) -> list[Message]:
        feed, news = self.feed, list[Message]()
        with feed.lock:
            feed.poll()
            if self.epochs is not feed.epochs:
                self.epochs = feed.epochs
                news.append({"type": "epochs", "run": feed.name, "epochs": feed.epochs})
            for stream in feed.tails:
                news += self._news_of(stream)
        return news

    def _news_of(self, stream: str) -> list[Message]:
        feed, columns = self.feed, self.feed.tails[stream].columns
        generation, rows, told = self.cursors.get(stream, (-2, 0, 0))
        if (preview := feed.previews.get(stream)) is not None:
            # The cursor of a preview matches no generation, so the complete history follows.
            self.cursors[stream] = (-1, 0, 0)
            return [feed.frame("history", stream, preview, preview=True)] if generation == -2 else []
        # After many new rows a downsampled history is sent again: a page that is open for days stays fast.
        if generation != columns.generation or columns.rows - told > FULL_ROWS:
            self.cursors[stream] = (columns.generation, columns.rows, columns.rows)
            return [feed.frame("history", stream, columns)]
        self.cursors[stream] = (generation, columns.rows, told)
        return [feed.frame("delta", stream, columns, rows)] if rows < columns.rows else []
