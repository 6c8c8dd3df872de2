"""Parquet and Arrow files: rows of typed columns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.arrays import as_arrays, as_tensor
from lockstep.data.collation import find_misfit
from lockstep.errors import DataError
from lockstep.readers.files import Files, FileSamples, open_file


class ParquetFiles(FileSamples):
    """Rows of Parquet (``.parquet``) or Arrow IPC (``.arrow``, ``.feather``) files; sample ``i`` is a dictionary.

    Values are NumPy's numbers and arrays, and ``None`` where one is missing.

    Args:
        files: a file, folder, pattern, fsspec URL, or several of them.
        columns: those to read; ``None``: all.
        transform: makes a sample of a row.
        streaming: give a stream of the rows in their order, without a copy.

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
        streaming: bool = False,
    ) -> None:
        self.columns = None if columns is None else [columns] if isinstance(columns, str) else list(columns)
        super().__init__(files, transform, streaming=streaming, key=str(self.columns))

    def _open(self, file: Any) -> tuple[Any, Iterator[Any]]:
        """Return the schema of an open file, and its rows as record batches."""
        from pyarrow import parquet

        opened = parquet.ParquetFile(file)
        return opened.schema_arrow, opened.iter_batches(columns=self.columns, use_threads=False)

    def tables(self, number: int) -> Iterator[Any]:
        import pyarrow

        with open_file(self.files[number]) as file, open_file(self.files[0]) as first:
            schema, batches = self._open(file)
            self._check_columns(number, schema, self._open(first)[0])
            for batch in batches:
                yield pyarrow.Table.from_batches([batch])

    def _check_columns(self, number: int, schema: Any, expected: Any) -> None:
        types = {field.name: str(field.type) for field in schema}
        expected_types = {field.name: str(field.type) for field in expected}
        if len(types) < len(schema):
            raise DataError(f"{self.files[number]} has two columns of one name", fix="rename one of them")
        for column in self.columns or {**expected_types, **types}:
            if types.get(column) != expected_types.get(column) or column not in types:
                raise DataError(
                    f"the column {column!r} of {self.files[number]} is missing or differs",
                    why=f"{self.files[0]} has {expected_types.get(column, 'none')}, "
                    f"{self.files[number]} has {types.get(column, 'none')}",
                    fix="name the columns to read: columns=[…]",
                )

    def records(self, table: Any) -> list[Any]:
        columns = {name: np.array(values) for name, values in as_arrays(table, self._gaps).items()}
        return [{name: values[row] for name, values in columns.items()} for row in range(len(table))]

    @cached_property
    def _gaps(self) -> list[str]:
        """Columns in which a value is missing, or one in a value."""
        if self.rows is None:
            return []
        table = self.rows.data
        return [name for name in table.column_names if any(map(_has_gap, table.column(name).chunks))]

    def check_collatable(self) -> None:
        """Raise :class:`DataError` where a row cannot be a sample of ``default_collate``, for a missing value."""
        if self.transform is None and self._gaps:
            column = self.rows.data.column(self._gaps[0])
            rows = ((value.as_py(), row, f"the column {self._gaps[0]!r}") for row, value in enumerate(column))
            misfit = next(filter(None, itertools.starmap(find_misfit, rows)))
            raise DataError(
                f"{misfit.text}, counted through {len(self.files)} files from {self.files[0]}",
                why="a batch has numbers and texts",
                fix="fill it in with transform=…, name other columns with columns=[…], or write Task.collate",
            )

    @cached_property
    def is_plain(self) -> bool:
        """Whether samples are the numbers of their columns, so that :meth:`gathered` may make a batch of them."""
        schema = self.rows.features.arrow_schema
        return self.transform is None and not self._gaps and all(_is_plain(field.type) for field in schema)

    def gathered(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the batch that ``default_collate`` makes of the samples ``indices``."""
        # Copies, since the memory may be that of the mapped file.
        return {name: as_tensor(np.array(values)) for name, values in as_arrays(self.rows[indices.tolist()]).items()}


class ArrowFiles(ParquetFiles):
    """As :class:`ParquetFiles`, of Arrow IPC files."""

    suffixes = (".arrow", ".feather")

    def _open(self, file: Any) -> tuple[Any, Iterator[Any]]:
        from pyarrow import ArrowInvalid, ipc

        try:
            opened = ipc.open_file(file)
        except ArrowInvalid:
            file.seek(0)
            opened = ipc.open_stream(file)  # raises if it is neither
            batches = iter(opened)
        else:
            batches = map(opened.get_batch, range(opened.num_record_batches))
        return opened.schema, (batch if self.columns is None else batch.select(self.columns) for batch in batches)


def _has_gap(array: Any) -> bool:
    from pyarrow import types

    if array.null_count:
        return True
    if types.is_struct(array.type):
        return any(map(_has_gap, array.flatten()))
    is_list = types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type)
    return is_list and _has_gap(array.flatten())


def _is_plain(kind: Any) -> bool:
    """Return whether an Arrow type is a number that torch has, or a list of numbers of fixed size."""
    kind = kind.value_type if hasattr(kind, "list_size") else kind
    return str(kind) in ("bool", "int8", "int16", "int32", "int64", "uint8", "halffloat", "float", "double")
