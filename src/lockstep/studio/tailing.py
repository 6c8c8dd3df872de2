"""Follow the files of a run: rows since the last poll, as columns and as messages for the page."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from lockstep.arithmetic import ceil_div
from lockstep.errors import RunFolderError
from lockstep.rundir.files import LONG_BYTES, AppendedRows, sparse_rows
from lockstep.rundir.folder import RunDir, or_else
from lockstep.studio.home import state_of

#: Above this number of rows the page gets the minimum and maximum of buckets: no chart is wider than half of POINTS.
FULL_ROWS = 5_000
#: Rows of a thinned-out history.
POINTS = 4_000
#: Maximum number of values in a message with every row.
MAX_VALUES = 5_000_000
#: ``ranks.jsonl`` has seven numbers a rank: enough for 1,024 ranks.
_MAX_COLUMNS = 8192
_MAX_DEPTH = 4
#: Chunks of a long file that are read in one poll.
_CHUNKS = 4
#: Rows of the coarse sample of a long file, which is shown first.
_SAMPLE_ROWS = 1000
#: How often files are read.
TICK_S = 1.0
_STREAMS = ("steps", "evaluations", "ranks", "system-*")
#: Seconds of training at a row of ``steps.jsonl``, computed here: samples divided by throughput, without pauses.
TRAINING_S = "training_s"
#: Columns that may be the x axis of a chart; they increase.
AXES = ("step", "time", "samples_seen", TRAINING_S)

Column = NDArray[np.float64]
#: A message for the page: JSON text, or an object.
Message = dict[str, Any] | str


class Part(NamedTuple):
    """Rows of a stream; ``is_thin``: only the extremes of buckets."""

    columns: dict[str, Column]
    is_thin: bool


class Columns:
    """Equally long columns of numbers; a value that a row lacks is NaN. ``x`` names the increasing one."""

    def __init__(self, x: str) -> None:
        self.x = x
        self.rows = 0
        #: Changes when rows are removed: rows sent before are invalid.
        self.generation = 0
        #: Whether the rows have more columns than are kept.
        self.cut = False
        self._data: dict[str, Column] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def __getitem__(self, name: str) -> Column:
        return self._data[name][: self.rows]

    def append(self, columns: Mapping[str, Column]) -> None:
        """Add the rows of ``columns``, which are equally long."""
        total = self.rows + len(columns[self.x])
        for name in [name for name in columns if name not in self._data]:
            if len(self._data) < _MAX_COLUMNS:
                self._data[name] = np.full(max(total, 1024), np.nan)
            else:
                self.cut = True
        for name, old in self._data.items():
            if len(old) < total:
                grown = np.full(max(total, 2 * len(old)), np.nan)
                grown[: self.rows] = old[: self.rows]
                self._data[name] = old = grown
            old[self.rows : total] = columns.get(name, np.nan)
        self.rows = total

    def last(self, name: str) -> float:
        """Return the newest value of a column; 0 without one."""
        return float(np.nan_to_num(self[name][-1])) if self.rows and name in self else 0.0

    def truncate(self, rows: int) -> None:
        if rows < self.rows:
            self.rows = rows
            self.generation += 1

    def clear(self) -> None:
        """Remove all rows: the file was replaced."""
        self._data = {}
        self.rows = 0
        self.cut = False
        self.generation += 1

    def between(self, low: float | None, high: float | None) -> tuple[int, int]:
        """First and last-plus-one row with ``low`` ≤ x ≤ ``high``."""
        if not self.rows:
            return 0, 0
        start = 0 if low is None else int(np.searchsorted(self[self.x], low, side="left"))
        end = self.rows if high is None else int(np.searchsorted(self[self.x], high, side="right"))
        return start, max(start, end)

    def part(self, start: int, end: int, names: Sequence[str] | None = None, *, full: bool = False) -> Part:
        """Rows ``start`` to ``end``, thinned out unless they are few, or as many as fit in ``full``.

        ``names``: these columns and the axes; default: all.
        """
        chosen = self._data.keys() if names is None else {*AXES, *names}
        part = {name: values[start:end] for name, values in self._data.items() if name in chosen}
        is_thin = end - start > FULL_ROWS and not (full and (end - start) * len(part) <= MAX_VALUES)
        return Part(thin_out(part, self.x, POINTS) if is_thin else part, is_thin)


def thin_out(columns: Mapping[str, Column], x: str, points: int) -> dict[str, Column]:
    """Thin out to two rows a bucket: each column's minimum and maximum, in their order.

    The axes have the values of the bucket's first and middle row. Every peak stays visible; rows of an incomplete
    bucket are kept.
    """
    rows = len(columns[x])
    size = max(2, ceil_div(2 * rows, max(2, points)))
    buckets = rows // size
    whole = buckets * size
    result: dict[str, Column] = {}
    for name, values in columns.items():
        grid = values[:whole].reshape(buckets, size)
        if name == x or name in AXES:
            pairs = grid[:, [0, size // 2]]
        else:
            lowest = np.where(np.isnan(grid), np.inf, grid).argmin(axis=1)
            highest = np.where(np.isnan(grid), -np.inf, grid).argmax(axis=1)
            pairs = np.take_along_axis(grid, np.sort(np.stack([lowest, highest], axis=1), axis=1), axis=1)
        result[name] = np.concatenate([pairs.reshape(-1), values[whole:]])
    return result


def columns_of(rows: Sequence[Mapping[str, Any]], x: str) -> dict[str, Column]:
    """Numbers of the rows, nested ones under dotted names; rows without a usable ``x`` are left out.

    List items with an ``id`` (``devices: [{"id": "gpu:0", …}]``) are named by it, others by position.
    """
    placed = [row for row in rows if not math.isnan(_number(row.get(x)))]
    columns: dict[str, Column] = {x: np.empty(0)}
    if placed:
        _collect(placed, "", 0, columns)
    return columns


def _collect(rows: Sequence[Mapping[str, Any]], prefix: str, depth: int, columns: dict[str, Column]) -> None:
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) for row in rows]
        kinds = set(map(type, values))
        name = f"{prefix}{key}"
        if dict in kinds or list in kinds:
            if depth < _MAX_DEPTH:
                named = any(isinstance(v, list) and v and isinstance(v[0], dict) and "id" in v[0] for v in values)
                _collect([_as_mapping(v) for v in values], prefix if named else f"{name}.", depth + 1, columns)
        elif kinds & {int, float} and len(columns) <= _MAX_COLUMNS:  # one too many, for `cut`
            try:
                columns[name] = np.array(values, dtype=np.float64)
            except (ValueError, TypeError, OverflowError):
                columns[name] = np.array([_number(value) for value in values])


def _as_mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, list):
        items = enumerate(value[:_MAX_COLUMNS])
        return {
            str(item["id"] if isinstance(item, dict) and "id" in item else position): item for position, item in items
        }
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


class Tail:
    """The columns of one file. x is ``step`` (later attempts supersede rows) or ``time``."""

    def __init__(self, path: Path, x: str) -> None:
        self.columns = Columns(x)
        self.reader = AppendedRows(path)
        #: A coarse sample, while a file that takes long is being read.
        self.preview: Columns | None = None
        self._attempts: Mapping[int, int] = {}

    def poll(self) -> None:
        """Read at most one chunk."""
        try:
            rows = self.reader.read()
        except OSError:
            return
        if self.reader.is_first and self.columns.rows:
            self.columns.clear()
        if rows:
            columns = columns_of(rows, self.columns.x)
            _append_increasing(self.columns, columns) if self.columns.x == "time" else self._add_steps(columns)

    def restart(self, attempts: Mapping[int, int]) -> None:
        """Read the file again. ``attempts``: from which step each attempt resumed (:meth:`RunDir.resumed_from`)."""
        self._attempts = attempts
        self.columns.clear()
        self.reader.restart()
        self.preview = self.sample()

    def sample(self) -> Columns | None:
        """Read a coarse sample of a file that takes long to read; ``None`` for a short one."""
        try:
            if self.reader.path.lstat().st_size < LONG_BYTES:
                return None
            rows = sparse_rows(self.reader.path, _SAMPLE_ROWS, links=False)
        except (OSError, RunFolderError):
            return None
        picture = Columns(self.columns.x)
        _append_increasing(picture, columns_of(rows, picture.x))
        return picture if picture.rows else None

    def _add_steps(self, columns: Mapping[str, Column]) -> None:
        """Add steps as :func:`lockstep.rundir.folder.surviving` does, for stretches of rows instead of single ones."""
        steps = columns["step"]
        all_rows = self.columns
        attempts = np.nan_to_num(columns.get("attempt", np.ones(len(steps))), nan=1)
        breaks = np.flatnonzero((np.diff(steps) <= 0) | (np.diff(attempts) != 0)) + 1
        for start, end in itertools.pairwise([0, *breaks.tolist(), len(steps)]):
            if start == end:
                continue
            later = [step for attempt, step in self._attempts.items() if attempt > int(attempts[start])]
            last = start + int(np.searchsorted(steps[start:end], min(later, default=np.inf), side="right"))
            if last > start:
                all_rows.truncate(int(np.searchsorted(all_rows["step"], steps[start])) if all_rows.rows else 0)
                all_rows.append(self._with_time({name: values[start:last] for name, values in columns.items()}))

    def _with_time(self, columns: dict[str, Column]) -> dict[str, Column]:
        """Add the seconds of training to rows that follow those that there are, if they have a throughput."""
        if "samples_per_s" not in columns and TRAINING_S not in self.columns:
            return columns
        missing = np.full(len(columns["step"]), np.nan)
        samples, speed = (columns.get(name, missing) for name in ("samples_seen", "samples_per_s"))
        more = np.diff(samples, prepend=self.columns.last("samples_seen"))
        spent = np.divide(more, speed, out=np.zeros(len(samples)), where=(speed > 0) & (more > 0))
        return {**columns, TRAINING_S: self.columns.last(TRAINING_S) + np.cumsum(spent)}


def _append_increasing(target: Columns, columns: Mapping[str, Column]) -> None:
    """Add the rows whose x is beyond what there is: a clock that was set back must not fold the curve."""
    xs = columns[target.x]
    if len(xs):
        last = target[target.x][-1] if target.rows else -np.inf
        before = np.concatenate([[last], np.maximum.accumulate(np.maximum(xs, last))[:-1]])
        target.append({name: values[xs > before] for name, values in columns.items()})


class Feed:
    """Reads a run's files when :meth:`poll` is called."""

    def __init__(self, run: RunDir, name: str) -> None:
        self.name = name
        #: The ends of epochs, as a message; another one after each change.
        self.epochs: dict[str, Any] = {}
        self.tails: dict[str, Tail] = {}
        self.lock = threading.Lock()
        #: Whether a file has rows that were not read yet.
        self.behind = False
        self._run = run
        self._polled = -TICK_S
        self._attempts: dict[int, int] = {}
        #: When attempts, epochs and the plan were changed, at the last look.
        self._stamp: tuple[Any, ...] = ()

    def poll(self) -> None:
        """Read new rows, though not again within half a tick, for several tabs. The caller has the lock."""
        now = time.monotonic()
        if now - self._polled < TICK_S / 2 and not self.behind:
            return
        self._polled = now
        if not self.behind:
            self._look()
            if any(tail.preview for tail in self.tails.values()):
                self.behind = True
                return  # the preview first
        for tail in self.tails.values():
            for _ in range(_CHUNKS):
                tail.poll()
                if not tail.reader.behind:
                    tail.preview = None
                    break
        self.behind = any(tail.reader.behind for tail in self.tails.values())

    def message(self, kind: str, stream: str, columns: Columns, part: Part, **more: Any) -> str:
        """Rows: all of a ``history``, a ``delta`` of new ones, or a ``range``; ``null``: no number."""
        header = {"type": "rows", "kind": kind, "run": self.name, "stream": stream, "x": columns.x}
        state = {"generation": columns.generation, "total": columns.rows, "cut": columns.cut}
        content = {name: values.tolist() for name, values in part.columns.items()}
        message = {**header, **state, "downsampled": part.is_thin, "preview": False, **more, "columns": content}
        return to_json(message, inf_nan_mode="null").decode()

    def _look(self) -> None:
        """Notice attempts, which supersede rows, new streams and epochs."""
        run = self._run
        stamp = tuple(map(state_of, (run.attempts, run.metrics_file, run.plan_file)))
        if stamp[:1] != self._stamp[:1] and (attempts := run.resumed_from()) != self._attempts:
            self._attempts = attempts
            for tail in self.tails.values():
                tail.restart(attempts)
        for pattern in _STREAMS:
            for file in sorted(run.path.glob(f"{pattern}.jsonl"))[:64]:
                if file.stem not in self.tails:
                    self.tails[file.stem] = Tail(file, "time" if file.stem.startswith("system-") else "step")
                    self.tails[file.stem].restart(self._attempts)
        if stamp != self._stamp:
            self._stamp = stamp
            steps = or_else(run.plan, {}).get("steps_per_epoch")
            rows = {
                "epochs": or_else(run.epochs, []),
                "steps_per_epoch": steps if isinstance(steps, int) and steps > 0 else None,
            }
            self.epochs = {"type": "epochs", "run": self.name, **rows}


@dataclass
class Subscription:
    """The rows of one run that a tab has received."""

    feed: Feed
    #: By stream: generation and rows as the tab has them, and the rows of its last history.
    cursors: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    epochs: dict[str, Any] | None = None

    def news(self) -> list[Message]:
        feed = self.feed
        news = list[Message]()
        with feed.lock:
            feed.poll()
            if self.epochs is not feed.epochs:
                self.epochs = feed.epochs
                news.append(feed.epochs)
            for stream in feed.tails:
                news += self._news_of(stream)
        return news

    def _news_of(self, stream: str) -> list[Message]:
        feed = self.feed
        columns = feed.tails[stream].columns
        generation, rows, sent = self.cursors.get(stream, (-2, 0, 0))
        if (preview := feed.tails[stream].preview) is not None:
            # The cursor of a preview matches no generation, so the complete history follows.
            self.cursors[stream] = (-1, 0, 0)
            sample = preview.part(0, preview.rows)
            return [feed.message("history", stream, preview, sample, preview=True)] if generation == -2 else []
        # After many new rows a downsampled history is sent again: a page that is open for days stays fast.
        if generation != columns.generation or columns.rows - sent > FULL_ROWS:
            self.cursors[stream] = (columns.generation, columns.rows, columns.rows)
            return [feed.message("history", stream, columns, columns.part(0, columns.rows))]
        self.cursors[stream] = (generation, columns.rows, sent)
        new = columns.part(rows, columns.rows)
        return [feed.message("delta", stream, columns, new)] if rows < columns.rows else []
