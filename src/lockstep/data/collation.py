"""What keeps ``default_collate`` from making a batch, or lets a batch's dtype depend on the rows that are in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


class Misfit(NamedTuple):
    """A value that cannot be in a batch: its description, its sample, and the fix."""

    text: str
    fix: str


def find_misfit(sample: Any, number: int, field: str = "") -> Misfit | None:
    """Find the first value of ``sample`` that ``default_collate`` cannot take.

    Args:
        number: that of the sample, for the text.
        field: the field of it that ``sample`` is.
    """
    if isinstance(sample, Mapping | list | tuple):
        parts = sample.items() if isinstance(sample, Mapping) else enumerate(sample)
        inner = (find_misfit(part, number, f"{field}[{key!r}]" if field else f"{key!r}") for key, part in parts)
        return next((misfit for misfit in inner if misfit is not None), None)
    reason = _reason_against(sample)
    name = f"{field} of sample {number}" if field else f"sample {number}"
    return None if reason is None else Misfit(f"{name} is {reason[0]}", reason[1])


def _reason_against(value: Any) -> tuple[str, str] | None:
    """Describe a value that no batch can have, and what to do about it; ``None``: a batch can have it."""
    if isinstance(value, Tensor | str | bytes | bool | int | float):
        return None
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU":
        return None
    text = f"{value!r:.60}"
    name = type(value).__name__
    if value is None or name in ("NAType", "NaTType"):
        return f"{text}, a missing value", "fill it in, or exclude the sample with lockstep.data.select()"
    if name in ("Timestamp", "datetime", "date", "Timedelta", "timedelta", "datetime64", "timedelta64"):
        return f"{text}, a time", "convert it to a number, such as seconds since a date"
    if name == "Decimal":
        return f"{text}, a decimal", "convert it, for example with float()"
    return f"{text}, of type {name}", "convert it to a number, an array or a tensor"


#: The kind of a value: of a dictionary and a list, those of its items (of a list in which all have one, that alone); of
#: others, a name or a dtype.
Kind = Any
#: Whole numbers beyond the first are not all values of float64; those from the second on are none of int64.
_EXACT = 2**53
_INT64 = 2**63
_INT = "a whole number"
_LARGE = "a whole number beyond 2^53"
_HUGE = "a whole number beyond int64"
FLOAT = "a number with a fraction"
_MISSING = "a missing value"
_NAMES = {type(None): _MISSING, bool: "a boolean", float: FLOAT, str: "a text", bytes: "bytes"}
#: NumPy's scalars that ``default_collate`` treats as Python's.
_AS_PYTHON = {np.bool_, np.int64, np.float64}
_WHOLE = (int, np.int64)


class MixedKindsError(ValueError):
    """Values of one field that have no common dtype; the message names the field and both kinds."""


def kind_of(value: Any) -> Kind:
    """Return the kind of ``value``, which decides the dtype that ``default_collate`` gives it."""
    cls = type(value)
    if cls is int:
        return _INT if -_EXACT <= value <= _EXACT else _LARGE if -_INT64 <= value < _INT64 else _HUGE
    if cls in _NAMES:
        return _NAMES[cls]
    if cls in _AS_PYTHON:
        return kind_of(value.item())
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return _NAMES[str] if isinstance(value, str) else _name_of(value.dtype)
    if isinstance(value, list | tuple):
        if len(value) > 8:  # quick for long lists
            types = set(map(type, value))
            if types == {float} or (types == {int} and max(map(abs, value)) <= _EXACT):
                return [kind_of(value[0])]
        return _shortened([kind_of(part) for part in value])
    if isinstance(value, Mapping):
        return {key: kind_of(value[key]) for key in value.keys()}  # noqa: SIM118 - a TensorDict iterates over rows
    if isinstance(value, int):
        return kind_of(int(value))
    return next((name for base, name in _NAMES.items() if isinstance(value, base)), cls.__name__)


def kind_of_batch(samples: Sequence[Any], field: str = "", *, converts: bool = False) -> Kind:
    """Return the kind that all of ``samples`` have; arguments and errors as of :func:`joined_kind`."""
    first = samples[0]
    cls = type(first)
    if len(set(map(type, samples))) == 1:  # by columns, which is much faster than by values
        inner = partial(kind_of_batch, converts=converts)
        if issubclass(cls, list | tuple) and len(set(map(len, samples))) == 1:
            columns = enumerate(zip(*samples, strict=True))
            return _shortened([inner(column, f"{field}[{number}]") for number, column in columns])
        if cls is dict and all(sample.keys() == first.keys() for sample in samples):
            return {key: inner([*map(itemgetter(key), samples)], _inner(field, key)) for key in first}
        if issubclass(cls, Tensor | np.ndarray) and len(set(map(attrgetter("dtype"), samples))) == 1:
            return kind_of(first)
        if cls in _WHOLE and kind_of(min(samples)) == kind_of(max(samples)) == _INT:
            return _INT
        if (cls in _NAMES or issubclass(cls, np.generic)) and cls not in _WHOLE:
            return kind_of(first)
    kinds = [kind_of(sample) for sample in samples]
    joined = kinds[0]
    for kind in () if kinds.count(joined) == len(kinds) else kinds:
        joined = joined_kind(joined, kind, field, converts=converts)
    return joined


def check_kinds(samples: Sequence[Any], field: str = "") -> None:
    """Raise :class:`MixedKindsError`, with the number of a sample, where no batch can have all of ``samples``."""
    try:
        kind_of_batch(samples, field)
    except MixedKindsError:
        joined = kind_of(samples[0])
        for number, sample in enumerate(samples):
            try:
                joined = joined_kind(joined, kind_of(sample), field)
            except MixedKindsError as error:
                raise MixedKindsError(f"{error}: sample {number}") from None
        raise


def joined_kind(first: Kind, second: Kind, field: str = "", *, converts: bool = False, same_keys: bool = True) -> Kind:
    """Return the kind of a field that has values of both kinds.

    Args:
        field: its name, for the error.
        converts: whole numbers beside others are converted to floats; else they are not accepted there.
        same_keys: one kind may not have keys that the other lacks.

    Raises:
        MixedKindsError: there is none. Numbers beside booleans, texts or missing values, whole numbers beyond 2^53
            beside fractions, arrays of two dtypes, or a key that is missing.
    """
    if first == second:
        return first
    join = partial(joined_kind, converts=converts, same_keys=same_keys)
    if isinstance(first, dict) and isinstance(second, dict):
        if same_keys and first.keys() != second.keys():
            key = next(key for key in (*first, *second) if (key in first) != (key in second))
            raise MixedKindsError(f"{_inner(field, key)} is missing in one row, and not in another")
        common = {key: join(first[key], kind, _inner(field, key)) for key, kind in second.items() if key in first}
        return {**first, **second, **common}
    if isinstance(first, list) and isinstance(second, list):
        if not first or not second:
            return first or second
        length = max(len(first), len(second))
        pairs = ((_item(first, number), _item(second, number)) for number in range(length))
        return _shortened([join(*pair, f"{field}[{number}]") for number, pair in enumerate(pairs)])
    for narrow, wide in ((first, second), (second, first)):
        if narrow == _INT and (wide == _LARGE or (converts and wide == FLOAT)):
            return wide
    raise MixedKindsError(
        f"{field or 'the sample'} is {_described(first)} in one row and {_described(second)} in another"
    )


def refused_in(kind: Kind, field: str = "") -> str | None:
    """Name a field that has no value, or a whole number that no tensor has."""
    if isinstance(kind, dict | list):
        parts = kind.items() if isinstance(kind, dict) else enumerate(kind)
        inner = (refused_in(part, _inner(field, key)) for key, part in parts)
        return next(filter(None, inner), None)
    return f"{field or 'the sample'} is {kind}" if kind in (_MISSING, _HUGE) else None


def as_kind(value: Any, kind: Kind) -> Any:
    """Return ``value`` with floats for the whole numbers of fields that have other numbers too."""
    if isinstance(value, dict):
        return {key: as_kind(part, kind[key]) for key, part in value.items()}
    if kind == [FLOAT]:
        return [*map(float, value)]
    if isinstance(value, list):
        return [as_kind(part, _item(kind, number)) for number, part in enumerate(value)]
    return float(value) if kind == FLOAT and type(value) is int else value


def as_floats(column: Any) -> Any:
    """Return an array of Python's numbers, of which some are whole and others not, as float64; others as they are."""
    if column.dtype != object or set(map(type, column)) != {int, float}:
        return column
    return column.astype(np.float64) if set(map(kind_of, column)) == {_INT, FLOAT} else column


def _inner(field: str, key: Any) -> str:
    return f"{field}[{key!r}]" if field else f"{key!r}"


def _shortened(kinds: list[Kind]) -> list[Kind]:
    return kinds[:1] if all(kind == kinds[0] for kind in kinds[1:]) else kinds


def _item(kinds: list[Kind], number: int) -> Kind:
    return kinds[min(number, len(kinds) - 1)]


def _described(kind: Kind) -> str:
    return "a dictionary" if isinstance(kind, dict) else "a list" if isinstance(kind, list) else str(kind)


@lru_cache
def _name_of(dtype: Any) -> str:
    return f"of dtype {dtype}".replace("torch.", "")  # a tensor may follow an array
