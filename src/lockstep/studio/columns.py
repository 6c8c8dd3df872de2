"""Rows of a run's files as columns: appended, truncated after a resume, downsampled, and packed for the page."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Above this number of rows the page gets the minimum and maximum of buckets.
FULL_ROWS = 100_000
#: Rows of a thinned-out history.
POINTS = 20_000
#: ``ranks.jsonl`` has seven numbers a rank: enough for 1,024 ranks.
_MAX_COLUMNS = 8192
_MAX_DEPTH = 4
#: Counts and times that single precision would round.
_DOUBLE = ("step", "time", "samples_seen")

Column = NDArray[Any]


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

    @property
    def names(self) -> list[str]:
        return list(self._data)

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
        """Remove what follows the first ``rows`` rows."""
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
        xs = self[self.x]
        start = 0 if low is None else int(np.searchsorted(xs, low, side="left"))
        end = self.rows if high is None else int(np.searchsorted(xs, high, side="right"))
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
            order = np.sort(np.stack([lowest, highest], axis=1), axis=1)
            pairs = np.take_along_axis(grid, order, axis=1)
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
    placed = [row for row in rows if _number(row.get(x)) == _number(row.get(x))]
    found: dict[str, Column] = {x: np.empty(0)}
    if placed:
        _collect(placed, "", 0, found)
    return found


def _collect(rows: Sequence[Mapping[str, Any]], prefix: str, depth: int, found: dict[str, Column]) -> None:
    keys = dict.fromkeys(key for row in rows for key in row)
    for key in keys:
        values = [row.get(key) for row in rows]
        kinds = set(map(type, values))
        name = f"{prefix}{key}"
        if dict in kinds or list in kinds:
            if depth < _MAX_DEPTH:
                inner = [_as_mapping(value) for value in values]
                named = any(isinstance(v, list) and v and isinstance(v[0], dict) and "id" in v[0] for v in values)
                _collect(inner, prefix if named else f"{name}.", depth + 1, found)
        elif kinds & {int, float} and len(found) <= _MAX_COLUMNS:  # one too many, for `cut`
            found[name] = _array(values, _type_of(name))


def _array(values: list[Any], kind: Any) -> Column:
    try:
        return np.array(values, dtype=np.float64).astype(kind, copy=False)
    except (ValueError, TypeError, OverflowError):
        return np.array([_number(value) for value in values]).astype(kind, copy=False)


def _as_mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    if not isinstance(value, list):
        return {}
    return {
        str(item["id"] if isinstance(item, dict) and "id" in item else position): item
        for position, item in enumerate(value[:_MAX_COLUMNS])
    }


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _type_of(name: str) -> Any:
    return np.float64 if name in _DOUBLE else np.float32
