"""Parquet and Arrow files: rows by number, read in groups of rows, a bounded number of which stay in memory."""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.errors import DataError
from lockstep.readers.files import Files, FileSamples

Array = NDArray[Any]


class ParquetFiles(FileSamples):
    """Rows of Parquet (``.parquet``) or Arrow IPC (``.arrow``, ``.feather``) files; sample ``i`` is a dictionary.

    Of names such as ``year=2024/part-0.parquet`` the year is a column, too, as for pyarrow's data sets: a number, or a
    text where one of the values is none.

    Samples are shuffled within a window of ``window`` row groups, which are drawn from all files; each row group is
    then read once an epoch, and a window is in memory. The window is the same on any number of ranks.

    Args:
        files: a file, folder, pattern, fsspec URL, or several of them.
        columns: those to read; ``None``: all.
        transform: makes a sample of a row.
        window: row groups (Arrow: record batches) shuffled together.

    Raises:
        DataError: a missing, empty or damaged file, or one whose columns differ from those of the first.
    """

    suffixes: tuple[str, ...] = (".parquet",)

    def __init__(
        self,
        files: Files,
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        window: int = 8,
    ) -> None:
        self.columns = None if columns is None else [columns] if isinstance(columns, str) else list(columns)
        if window < 1:
            raise DataError(f"a window of {window} row groups", fix="give a number from 1")
        self.shuffle_window, self._plain, self._types = window, True, dict[str, str]()
        self._hive: list[dict[str, Any]] = []
        super().__init__(files, transform)
        #: Rows of each row group, in order.
        self.chunks: NDArray[np.int64] = np.diff(self._ends, prepend=0)
        self._groups = _Groups(self._load, self.chunks, window + 1)

    def _sizes(self, number: int) -> list[int]:
        self._hive = self._hive or _hive_columns(self.below)
        rows, schema = self._footer(number)
        for column, value in self._hive[number].items():
            if column not in schema.names:
                schema = schema.append(_arrow().field(column, value.type))
        name, own = self.files[number], {field.name: str(field.type) for field in schema}
        self._types = self._types or own
        for column in self.columns or {**self._types, **own}:
            if own.get(column) != self._types.get(column) or column not in own:
                why = f"{self.files[0]} has {self._types.get(column, 'none')}, {name} has {own.get(column, 'none')}"
                what = f"the column {column!r} of {name} is missing or differs"
                raise DataError(what, why=why, fix="name the columns to read: columns=[…]")
        self._plain = self._plain and all(_is_plain(schema.field(column).type) for column in self.columns or own)
        return rows

    def _open(self, number: int) -> Any:
        _arrow()
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self.path(number))

    def _footer(self, number: int) -> tuple[list[int], Any]:
        """Rows of each group, and the schema."""
        file = self._opened(number)
        return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)], file.schema_arrow

    def _table(self, file: Any, group: int) -> Any:
        return file.read_row_group(group, columns=self.columns, use_threads=False)

    def _load(self, chunk: int) -> dict[str, Array]:
        number = self._file_of[chunk]
        group = chunk - bisect_left(self._file_of, number)
        try:
            table = self._table(self._opened(number), group)
        except Exception as error:
            what = f"rows {self._ends[chunk] - self.chunks[chunk]} to {self._ends[chunk] - 1} cannot be read"
            why = f"row group {group} of {self.files[number]}: {error}"
            raise DataError(what, why=why, fix="replace the file, or leave it out") from error
        for column, value in self._hive[number].items():
            if column not in table.column_names and column in (self.columns or self._types):
                table = table.append_column(column, _arrow().repeat(value, int(self.chunks[chunk])))
        return as_arrays(table)

    def _record(self, part: int, place: int) -> Any:
        row = self._groups.row(part) + place
        # What lies in a row of an array is copied: another group may take its place.
        return {name: v[row] if v.ndim == 1 else v[row].copy() for name, v in self._groups.columns.items()}

    @property
    def is_plain(self) -> bool:
        """Whether samples are the numbers of their columns, so that :meth:`gathered` may make a batch of them."""
        return self.transform is None and self._plain

    def gathered(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """The batch that ``default_collate`` makes of the samples ``indices``."""
        parts = np.searchsorted(self._groups.ends, indices, side="right")
        rows = self._groups.rows(parts)
        if rows is None:  # more groups than are kept
            order = np.argsort(parts, kind="stable")
            halves = [self.gathered(half) for half in np.array_split(indices[order], 2)]
            back = torch.from_numpy(np.argsort(order))
            return {name: torch.cat([half[name] for half in halves])[back] for name in halves[0]}
        where = torch.from_numpy(rows + indices - self._groups.ends[parts] + self.chunks[parts])
        return {name: torch.from_numpy(v).index_select(0, where) for name, v in self._groups.columns.items()}


class ArrowFiles(ParquetFiles):
    """As :class:`ParquetFiles`, of Arrow IPC files."""

    suffixes = (".arrow", ".feather")

    def _open(self, number: int) -> Any:
        # Not memory-mapped: a file that is cut short meanwhile would end the process.
        return _arrow().ipc.open_file(_arrow().OSFile(str(self.path(number))))

    def _footer(self, number: int) -> tuple[list[int], Any]:
        self._opened(number)
        file = _arrow().ipc.open_file(_arrow().memory_map(str(self.path(number))))  # without reading the batches
        return [file.get_batch(number).num_rows for number in range(file.num_record_batches)], file.schema

    def _table(self, file: Any, group: int) -> Any:
        table = _arrow().Table.from_batches([file.get_batch(group)])
        return table.select([name for name in self.columns or table.column_names if name in table.column_names])


class _Groups:
    """The latest ``most`` row groups: the arrays of each column have a slot for each, of the largest group's size."""

    def __init__(self, load: Callable[[int], dict[str, Array]], sizes: NDArray[np.int64], most: int) -> None:
        self._load, self._sizes, self._most = load, sizes, min(most, len(sizes))
        self.ends, self._slot_rows = np.cumsum(sizes), int(sizes.max())
        self.columns: dict[str, Array] = {}
        #: The first row of each group in the arrays; -1: it is not there.
        self._first = np.full(len(sizes), -1)
        self._known: dict[int, int] = {}

    def row(self, group: int) -> int:
        """The row of the arrays at which a group begins."""
        if group in self._known:
            return self._known[group]
        values, row = self._load(group), len(self._known) * self._slot_rows
        if len(self._known) == self._most:
            oldest = next(iter(self._known))
            row, self._first[oldest] = self._known.pop(oldest), -1
        for name, new in values.items():
            rows = self.columns.get(name)
            if rows is None:
                rows = np.empty((self._most * self._slot_rows, *new.shape[1:]), new.dtype)
            elif rows.dtype != new.dtype:  # a group with values that are missing
                rows = _objects(list(rows.copy()))
            self.columns[name] = rows
            rows[row : row + len(new)] = new if new.dtype == rows.dtype else _objects(list(new))
        self._known[group] = self._first[group] = row
        return row

    def rows(self, groups: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Where each of ``groups`` begins; ``None``: they are more than are kept."""
        first = self._first[groups]
        if (first < 0).any():
            wanted = np.unique(groups).tolist()
            if len(wanted) > self._most:
                return None
            for group in wanted:  # those that are there become the latest
                if group in self._known:
                    self._known[group] = self._known.pop(group)
            for group in wanted:
                self.row(group)
            first = self._first[groups]
        return first

    def __reduce__(self) -> Any:
        return _Groups, (self._load, self._sizes, self._most)


def _hive_columns(files: Sequence[str]) -> list[dict[str, Any]]:
    """Of each file the columns that the folders in its name have, by Hive's ``column=value``, as Arrow's scalars."""
    given = [dict(re.findall(r"([^/=]+)=([^/]*)/", name)) for name in files]
    columns = list(dict.fromkeys(chain.from_iterable(given)))
    if not columns:
        return given
    from pyarrow import ArrowInvalid, array, dataset, int32, scalar, schema, string

    kinds = dict.fromkeys(columns, string())
    for column in columns:
        with contextlib.suppress(ArrowInvalid):
            array([each[column] for each in given if each.get(column, _NULL) != _NULL]).cast(int32())
            kinds[column] = int32()
    found = map(dataset.HivePartitioning(schema(kinds)).parse, files)
    return [{n: scalar(v, kinds[n]) for n, v in dataset.get_partition_keys(each).items()} for each in found]


#: In the name of a folder: there is no value.
_NULL = "__HIVE_DEFAULT_PARTITION__"


def _is_plain(kind: Any) -> bool:
    """Of an Arrow type: a number that torch has, or a list of numbers of fixed size."""
    kind = kind.value_type if _arrow().types.is_fixed_size_list(kind) else kind
    return str(kind) in ("bool", "int8", "int16", "int32", "int64", "uint8", "halffloat", "float", "double")


def as_arrays(table: Any) -> dict[str, Array]:
    return {name: _values(column) for name, column in zip(table.column_names, table.columns, strict=True)}


def _values(column: Any) -> Array:
    """An array by row: of numbers where there are only numbers, else of Python's values."""
    kind = _arrow().types
    flat, shape = column, [len(column)]
    if kind.is_fixed_size_list(column.type) and not column.null_count:
        flat = column.combine_chunks()
        flat = (flat.chunk(0) if hasattr(flat, "chunk") else flat).flatten()
        shape.append(column.type.list_size)
    numbers = kind.is_integer(flat.type) or kind.is_floating(flat.type) or kind.is_boolean(flat.type)
    return np.asarray(flat).reshape(shape) if numbers and not flat.null_count else _objects(column.to_pylist())


def _objects(values: list[Any]) -> Array:
    return np.fromiter(values, object, len(values))


def _arrow() -> Any:
    try:
        import pyarrow.ipc
    except ImportError:
        raise DataError("Parquet and Arrow files need pyarrow", fix="pip install 'lockstep-train[data]'") from None
    return pyarrow
