"""Frames as numbers: categories, texts, times, decimals and missing values encoded as the training frame has them."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError, UnsupportedError

_NUMBERS = (int, float, Decimal, np.number, np.bool_)


class FrameEncoder:
    """Encodes frames of pandas, polars or pyarrow as numbers, by the values that ``frame`` has: the training data.

    - Categories and texts become whole numbers from 1, in sorted order or that of the categories; 0 is a missing value,
      or one that ``frame`` does not have. Where none is missing, nothing trains row 0 of an embedding: set its
      ``padding_idx=0``, so that such a value is a row of zeros.
    - Numbers, booleans, decimals and times become float32 with mean 0 and standard deviation 1; a missing one is 0.
    - The ``target`` stays as it is if it has numbers; else it becomes whole numbers from 0, and ``classes`` are its
      values. It may be missing in a frame to predict, not in a row.

    Example::

        encoder = FrameEncoder(train, target="species")
        Datasets(train=encoder(train), val=encoder(val))

    Attributes:
        numbers: names of the float32 columns.
        sizes: the number of values of each column of categories, with 0: ``nn.Embedding(encoder.sizes["colour"], 8,
            padding_idx=0)``.
        classes: the values of the target; empty for numbers.

    Raises:
        DataError: a value of another type, by column and row; a target that is missing.
    """

    def __init__(self, frame: Any, target: str | None = None) -> None:
        table = _as_pandas(frame)
        if target is not None and target not in table:
            raise DataError(f"the frame has no column {target!r}", fix=f"choose from {', '.join(map(str, table))}")
        self.target = target
        self._values: dict[str, list[Any]] = {}
        self._scales: dict[str, tuple[float, float]] = {}
        for name, column in table.items():
            numbers = _numbers_of(name, column)
            if numbers is None:
                has_order = hasattr(column, "cat")
                self._values[name] = list(column.cat.categories if has_order else sorted(column.dropna().unique()))
            elif name != target:
                finite = numbers[~np.isnan(numbers)]
                mean = float(finite.mean()) if len(finite) else 0.0
                deviation = float(finite.std()) if len(finite) else 0.0
                self._scales[name] = (mean, deviation or 1.0)
        self.numbers = tuple(self._scales)
        self.sizes = {name: len(values) + 1 for name, values in self._values.items() if name != target}
        self.classes: tuple[Any, ...] = tuple(self._values.get(target, ())) if target is not None else ()

    def __call__(self, frame: Any) -> Any:
        """Encode a frame: a frame of pandas with the columns of the training frame. Others are left out."""
        import pandas

        table = _as_pandas(frame)
        absent = [name for name in (*self.numbers, *self.sizes) if name not in table]
        if absent:
            raise DataError(f"the frame has no column {absent[0]!r}", why="the training frame has it")
        columns: dict[str, Any] = {}
        for name, (mean, deviation) in self._scales.items():
            numbers = _numbers_of(name, table[name])
            if numbers is None:
                raise _misfit(name, table[name], table[name].notna(), "the training frame has numbers there")
            columns[name] = np.nan_to_num((numbers - mean) / deviation).astype(np.float32)
        for name in self.sizes:
            columns[name] = self._codes(name, table[name]) + 1
        if self.target is not None and self.target in table:
            columns[self.target] = self._targets(table[self.target])
        return pandas.DataFrame(columns)

    def _codes(self, name: str, column: Any) -> npt.NDArray[np.int64]:
        """Return the place of each value among those of the training frame; -1: it has no such value."""
        import pandas

        places = pandas.Index(self._values[name], dtype=object).get_indexer(column.astype(object))
        return np.asarray(places, np.int64)

    def _targets(self, column: Any) -> Any:
        assert self.target is not None
        if not self.classes:
            numbers = _numbers_of(self.target, column)
            if numbers is None or np.isnan(numbers).any():
                is_wrong = column.notna() if numbers is None else np.isnan(numbers)
                raise _misfit(self.target, column, is_wrong, "the target of each row is a number")
            return column.to_numpy() if column.dtype.kind in "iub" else numbers.astype(np.float32)
        codes = self._codes(self.target, column)
        if (codes < 0).any():
            raise _misfit(self.target, column, codes < 0, "the classes are those of the training frame")
        return codes


def _as_pandas(frame: Any) -> Any:
    try:
        import pandas
    except ImportError:
        raise UnsupportedError(
            "frames are encoded by pandas, which is not installed", fix="pip install pandas"
        ) from None
    table = frame.to_pandas() if hasattr(frame, "to_pandas") else frame
    if not isinstance(table, pandas.DataFrame):
        raise DataError(f"a {type(frame).__name__} is not a frame", fix="give a frame of pandas, polars or pyarrow")
    return table


def _numbers_of(name: str, column: Any) -> npt.NDArray[np.float64] | None:
    """Convert numbers, booleans, decimals and times (in seconds) to float64, NaN where missing; ``None``: others."""
    import pandas
    from pandas.api import types

    if isinstance(column.dtype, pandas.CategoricalDtype | pandas.StringDtype):
        return None
    if types.is_object_dtype(column):
        kinds = set(map(type, column.dropna()))
        accepted = next((kind for kind in (str, date) if any(issubclass(cls, kind) for cls in kinds)), _NUMBERS)
        is_wrong = column.notna() & ~column.map(lambda value: isinstance(value, accepted))
        if is_wrong.any():
            raise _misfit(name, column, is_wrong, "a column has numbers, times or texts")
        if accepted is str:
            return None
        if accepted is date:
            return _numbers_of(name, pandas.to_datetime(column))
        column = column.map(float, na_action="ignore")
    elif types.is_datetime64_any_dtype(column):
        column = (column - pandas.Timestamp(0, tz=column.dt.tz)).dt.total_seconds()
    elif types.is_timedelta64_dtype(column):
        column = column.dt.total_seconds()
    numbers: npt.NDArray[np.float64] = pandas.to_numeric(column).to_numpy(dtype=np.float64, na_value=np.nan)
    return numbers


def _misfit(name: str, column: Any, is_wrong: Any, reason: str) -> DataError:
    row = int(np.flatnonzero(np.asarray(is_wrong))[0])
    value = column.iloc[row]
    return DataError(
        f"the column {name!r} has {value!r:.60}, of type {type(value).__name__}, in row {row}",
        why=reason,
        fix="numbers, booleans, decimals, times, texts and categories are encoded: convert the column, or leave it out",
    )
