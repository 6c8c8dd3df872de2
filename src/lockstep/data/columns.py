"""Parquet and Arrow files: rows by number, read in groups of rows, a bounded number of which stay in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.files import Kept, found, local, shown
from lockstep.errors import DataError


class ColumnFiles:
    """Rows of Parquet (``.parquet``) or Arrow IPC (``.arrow``, ``.feather``) files; sample ``i`` is a dictionary.

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

    suffix = ".parquet"

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        window: int = 8,
    ) -> None:
        self.files, self.columns, self.transform = found(files, self.suffix), columns, transform
        sizes: list[int] = []
        owners: list[tuple[int, int]] = []
        schema: Any = None
        for number, name in enumerate(shown(self.files, "reading footers")):
            try:
                rows, own = self._footer(local(name))
            except DataError:
                raise
            except Exception as error:  # each library has its own
                what = f"{name} cannot be read as {self.suffix}"
                raise DataError(what, why=str(error), fix="replace it, or leave it out: it may be cut short") from error
            schema = schema or (name, own)
            self._check(name, own, *schema)
            sizes += rows
            owners += [(number, group) for group in range(len(rows))]
        wanted = schema[1] if self.columns is None else {name: schema[1][name] for name in self.columns}
        self._types: dict[str, str] = wanted
        #: Rows of each row group, in order.
        self.chunks: NDArray[np.int64] = np.array(sizes, np.int64)
        self.shuffle_window = window
        self._ends, self._owners = np.cumsum(self.chunks).tolist(), owners
        if not len(self):
            raise DataError(f"the {len(self.files)} files have no row", why=self.files[0], fix="check what wrote them")
        self._groups = Kept(self._load, window + 1)

    def _check(self, name: str, own: dict[str, str], first: str, expected: dict[str, str]) -> None:
        wanted = self.columns if self.columns is not None else {**expected, **own}
        for column in wanted:
            if own.get(column) != expected.get(column) or column not in own:
                has = f"has {own[column]}" if column in own else "lacks it"
                why = f"{first} has {expected.get(column, 'none')}, {name} {has}"
                raise DataError(
                    f"the column {column!r} of {name} differs", why=why, fix="name the columns to read: columns=[…]"
                )

    def _footer(self, path: Path) -> tuple[list[int], dict[str, str]]:
        """Rows of each group, and the type of each column."""
        file = _parquet().ParquetFile(path, memory_map=True)
        schema, about = file.schema_arrow, file.metadata
        rows = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
        return rows, {field.name: str(field.type) for field in schema}

    def _table(self, path: Path, group: int) -> Any:
        return (
            _parquet().ParquetFile(path, memory_map=True).read_row_group(group, columns=self.columns, use_threads=False)
        )

    def _load(self, chunk: int) -> dict[str, Any]:
        number, group = self._owners[chunk]
        try:
            table = self._table(local(self.files[number]), group)
        except Exception as error:
            what = f"rows {self._ends[chunk] - self.chunks[chunk]} to {self._ends[chunk] - 1} cannot be read"
            why = f"row group {group} of {self.files[number]}: {error}"
            raise DataError(what, why=why, fix="replace the file, or leave it out") from error
        return {name: _values(column) for name, column in zip(table.column_names, table.columns, strict=True)}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        chunk = bisect_right(self._ends, index)
        place = index - (self._ends[chunk - 1] if chunk else 0)
        row = {name: values[place] for name, values in self._groups(chunk).items()}
        return row if self.transform is None else self.transform(row)

    @property
    def is_plain(self) -> bool:
        """Whether samples are the numbers of their columns, so that :meth:`gathered` may make a batch of them."""
        return self.transform is None and all(_is_plain(self._types[name]) for name in self._types)

    def gathered(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """The batch that ``default_collate`` makes of the samples ``indices``."""
        chunks = np.searchsorted(self._ends, indices, side="right")
        batch: dict[str, NDArray[Any]] = {}
        for chunk in np.unique(chunks).tolist():
            mine = np.flatnonzero(chunks == chunk)
            places = indices[mine] - (self._ends[chunk - 1] if chunk else 0)
            for name, values in self._groups(chunk).items():
                if name not in batch:
                    batch[name] = np.empty((len(indices), *values.shape[1:]), values.dtype)
                batch[name][mine] = values[places]
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[int(index)] for index in indices]


class ParquetFiles(ColumnFiles):
    __doc__ = ColumnFiles.__doc__


class ArrowFiles(ColumnFiles):
    """As :class:`ParquetFiles`, of Arrow IPC files, which are memory-mapped."""

    suffix = ".arrow"

    def _footer(self, path: Path) -> tuple[list[int], dict[str, str]]:
        file = _arrow().ipc.open_file(_arrow().memory_map(str(path)))
        rows = [file.get_batch(number).num_rows for number in range(file.num_record_batches)]
        return rows, {field.name: str(field.type) for field in file.schema}

    def _table(self, path: Path, group: int) -> Any:
        batch = _arrow().ipc.open_file(_arrow().memory_map(str(path))).get_batch(group)
        table = _arrow().Table.from_batches([batch])
        return table if self.columns is None else table.select(list(self.columns))


def _is_plain(kind: str) -> bool:
    """Of an Arrow type by its name: a number, or a list of numbers of fixed size."""
    name = kind.removeprefix("fixed_size_list<").split(": ")[-1].split("[")[0].split(">")[0].removesuffix(" not null")
    return not kind.startswith("list<") and name in _NUMBERS


_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "float", "double")


def _values(column: Any) -> Any:
    """Something that can be indexed by row: an array where there are numbers, else a list."""
    kind = _arrow().types
    plain = kind.is_integer(column.type) or kind.is_floating(column.type) or kind.is_boolean(column.type)
    if plain and not column.null_count:
        return np.array(column)  # a copy: torch warns of arrays that cannot be written to
    if kind.is_fixed_size_list(column.type) and not column.null_count:
        flat = column.combine_chunks()
        flat = flat.chunk(0) if hasattr(flat, "chunk") else flat
        values = flat.flatten()
        if not values.null_count and (kind.is_integer(values.type) or kind.is_floating(values.type)):
            return np.array(values).reshape(-1, column.type.list_size)
    return column.to_pylist()


def _arrow() -> Any:
    try:
        import pyarrow.ipc
    except ImportError:
        raise DataError("Parquet and Arrow files need pyarrow", fix="pip install 'lockstep-train[data]'") from None
    return pyarrow


def _parquet() -> Any:
    _arrow()
    import pyarrow.parquet

    return pyarrow.parquet
