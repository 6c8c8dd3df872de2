"""The value that keeps ``default_collate`` from making a batch."""

from __future__ import annotations

from collections.abc import Mapping
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
