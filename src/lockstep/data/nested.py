"""Batches as people make them: tensors in containers and in objects of their own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def mapped(batch: Any, change: Callable[[Any], Any], method: str) -> Any:
    """``batch`` with ``change`` applied to its tensors and to objects with this ``method``, such as ``PackedSequence``.

    Mappings, lists, tuples and dataclasses are copied and keep their type, so that ``batch`` stays as it is; anything
    else is passed on.
    """
    kind = type(batch)
    if isinstance(batch, Tensor):
        return change(batch)
    if kind is list or kind is tuple:
        return kind([mapped(value, change, method) for value in batch])
    if kind is dict:
        return {key: mapped(value, change, method) for key, value in batch.items()}
    if callable(getattr(kind, method, None)):
        return change(batch)
    if isinstance(batch, Mapping):
        parts = {key: mapped(value, change, method) for key, value in batch.items()}
        try:
            clone: Any = copy.copy(batch)  # with its default factory, say
            for key, value in parts.items():
                clone[key] = value
        except TypeError:  # it cannot be changed, or not copied
            return parts
        return clone
    if isinstance(batch, tuple):
        values = [mapped(value, change, method) for value in batch]
        return kind(*values) if hasattr(batch, "_fields") else kind(values)
    if isinstance(batch, list):
        clone = copy.copy(batch)
        clone[:] = [mapped(value, change, method) for value in batch]
        return clone
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        clone = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(clone, field.name, mapped(getattr(batch, field.name), change, method))
        return clone
    return batch
