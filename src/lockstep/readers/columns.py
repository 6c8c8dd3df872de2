"""Parquet and Arrow files: rows of typed columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.arrays import as_arrays, as_tensor
from lockstep.data.collation import find_misfit
from lockstep.errors import DataError
from lockstep.readers.files import Files, FileSamples, file_system, open_file

#: How an Arrow IPC file begins; a stream does not.
_ARROW_MAGIC = b"ARROW1"


class ParquetFiles(FileSamples):
    """Rows of Parquet (``.parquet``) or Arrow IPC (``.arrow``, ``.feather``) files; sample ``i`` is a dictionary.

    Of names such as ``year=2024/part-0.parquet`` the year is a column, too, as for pyarrow's data sets: a number, or a
    text where one of the values is none. Values are NumPy's numbers and arrays, and ``None`` where one is missing.

    Args:
        files: a file, folder, pattern, fsspec URL, or several of them.
        columns: those to read; ``None``: all.
        transform: makes a sample of a row.
        window: without effect: rows are read by their number, so all of them are shuffled together.
        streaming: give a stream of the rows in their order, without a copy.

    Raises:
        DataError: a missing, empty or damaged file, or one whose columns differ from those of the first.
    """

    suffixes: tuple[str, ...] = (".parquet",)
    _format = "parquet"

    def __init__(
        self,
        files: Files,
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        window: int | None = None,
        streaming: bool = False,
    ) -> None:
        if window is not None and window < 1:
            raise DataError(f"a window of {window} row groups", fix="leave window out")
        self.columns = None if columns is None else [columns] if isinstance(columns, str) else list(columns)
        # Only folders below one that was given name columns; of other names, all folders.
        self._base = str(files).rstrip("/") if isinstance(files, str | Path) and Path(files).is_dir() else ""
        super().__init__(files, transform, streaming=streaming, key=f"{self.columns} {self._base}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_whole", "_fragments")}

    @cached_property
    def _whole(self) -> Any:
        """All files as a data set of pyarrow, which reads columns from the names of folders."""
        from pyarrow import dataset

        systems = {type(system): system for system, _ in map(file_system, self.files)}
        if len(systems) > 1:
            names = ", ".join(kind.__name__ for kind in systems)
            raise DataError(f"the files are on several file systems: {names}", fix="give those of one in a data set")
        return dataset.dataset(
            [file_system(name)[1] for name in self.files],
            format=self._format,
            filesystem=next(iter(systems.values())),
            partitioning=dataset.partitioning(flavor="hive"),
            partition_base_dir=file_system(self._base)[1] if self._base else None,
        )

    @cached_property
    def _fragments(self) -> list[Any]:
        return [*self._whole.get_fragments()]

    def tables(self, number: int) -> Iterator[Any]:
        import pyarrow

        name = self.files[number]
        schema = self._whole.schema
        fragment = self._fragments[number]
        types = [_types(fragment), _types(self._fragments[0])]
        for column in self.columns or {**types[1], **types[0]}:
            if types[0].get(column) != types[1].get(column) or column not in types[0]:
                raise DataError(
                    f"the column {column!r} of {name} is missing or differs",
                    why=f"{self.files[0]} has {types[1].get(column, 'none')}, "
                    f"{name} has {types[0].get(column, 'none')}",
                    fix="name the columns to read: columns=[…]",
                )
        for batch in fragment.to_batches(schema=schema, columns=self.columns, use_threads=False, batch_readahead=0):
            yield pyarrow.Table.from_batches([batch])

    def records(self, table: Any) -> list[Any]:
        columns = {name: np.array(values) for name, values in as_arrays(table, self._gaps).items()}
        return [{name: values[row] for name, values in columns.items()} for row in range(len(table))]

    @cached_property
    def _gaps(self) -> list[str]:
        """Columns in which a value is missing."""
        table = None if self.rows is None else self.rows.data
        return [name for name in table.column_names if table.column(name).null_count] if table is not None else []

    def check_collatable(self) -> None:
        """Raise :class:`DataError` where a row cannot be a sample of ``default_collate``, for a missing value."""
        if self.transform is None and self._gaps:
            column = self.rows.data.column(self._gaps[0])
            row = column.is_null().index(True).as_py()
            misfit = find_misfit(None, row, f"the column {self._gaps[0]!r}")
            assert misfit is not None
            ends = np.cumsum([fragment.count_rows() for fragment in self._fragments])
            file = int(np.searchsorted(ends, row, side="right"))
            raise DataError(
                f"{misfit.text}: row {row - int(ends[file - 1] if file else 0) + 1} of {self.files[file]}",
                why="a batch has numbers and texts",
                fix="fill it in with transform=…, name other columns with columns=[…], or write Task.collate",
            )

    @cached_property
    def is_plain(self) -> bool:
        """Whether samples are the numbers of their columns, so that :meth:`gathered` may make a batch of them."""
        schema = self.rows.features.arrow_schema
        return self.transform is None and not self._gaps and all(_is_plain(field.type) for field in schema)

    def gathered(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """The batch that ``default_collate`` makes of the samples ``indices``."""
        # Copies, since the memory may be that of the mapped file.
        return {name: as_tensor(np.array(values)) for name, values in as_arrays(self.rows[indices.tolist()]).items()}


class ArrowFiles(ParquetFiles):
    """As :class:`ParquetFiles`, of Arrow IPC files."""

    suffixes = (".arrow", ".feather")
    _format = "ipc"

    def tables(self, number: int) -> Iterator[Any]:
        for name in dict.fromkeys((self.files[0], self.files[number])):
            with open_file(name) as file:
                beginning = file.read(len(_ARROW_MAGIC))
            if beginning[:4] == b"\xff\xff\xff\xff":
                fix = f"give datasets.Dataset.from_file({name!r}), or write it with pyarrow.ipc.new_file"
                raise DataError(f"{name} is an Arrow stream", why="only Arrow files have rows by number", fix=fix)
        yield from super().tables(number)


def _types(fragment: Any) -> dict[str, str]:
    """The type of each column of a file, those in the name of its folder included."""
    from pyarrow import dataset

    types = dict.fromkeys(dataset.get_partition_keys(fragment.partition_expression), "of the folder")
    return {**types, **{field.name: str(field.type) for field in fragment.physical_schema}}


def _is_plain(kind: Any) -> bool:
    """Of an Arrow type: a number that torch has, or a list of numbers of fixed size."""
    kind = kind.value_type if hasattr(kind, "list_size") else kind
    return str(kind) in ("bool", "int8", "int16", "int32", "int64", "uint8", "halffloat", "float", "double")
