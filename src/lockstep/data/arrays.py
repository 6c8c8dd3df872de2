"""Samples that lie in memory (or in a memory map): a batch is one gather per array."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.errors import DataError

Indices = Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor


class ArrayDataset:
    """Arrays of equal length; sample ``i`` is the tuple of their ``i``-th items.

    Args:
        arrays: tensors or NumPy arrays of shape ``(samples, …)``. They are shared, not copied, so a
            read-only memory map stays on disk; nothing here writes to them.

    Raises:
        DataError: no array, an array without a first dimension, lengths that differ, or a dtype that torch lacks.
    """

    def __init__(self, *arrays: Tensor | npt.NDArray[Any]) -> None:
        #: Whether no sample is read from a disk, as far as NumPy arrays show it; tensors do not.
        self.is_in_memory = not any(map(_is_mapped, arrays))
        self.tensors = tuple(as_tensor(array) for array in arrays)
        if not self.tensors or any(tensor.dim() == 0 for tensor in self.tensors):
            raise DataError(
                "an array data set needs at least one array with a sample dimension",
                why=f"it was given shapes {[tuple(tensor.shape) for tensor in self.tensors]}",
                fix="pass arrays of shape (samples, …), for example ArrayDataset(samples, labels)",
            )
        lengths = [len(tensor) for tensor in self.tensors]
        if len(set(lengths)) > 1:
            raise DataError(
                f"the arrays of a data set differ in length: {', '.join(map(str, lengths))}",
                why="item i of every array belongs to sample i",
                fix="pass arrays with the same first dimension",
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample."""
        return sum(tensor[:1].nbytes for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: Indices) -> tuple[Tensor, ...]:
        """The samples at ``indices`` (each in [0, len)) as one finished batch: a tensor of shape ``(n, …)`` per array.

        ``index_select`` runs without Python's global lock, so a loader's thread can gather beside the step.
        """
        where = _as_index(indices)
        return tuple(tensor.index_select(0, where) for tensor in self.tensors)


def _is_mapped(array: Any) -> bool:
    """Whether a NumPy array is, or is a view of, a map of a file."""
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    return array is not None


def as_tensor(array: Tensor | npt.NDArray[Any]) -> Tensor:
    if isinstance(array, Tensor):
        return array
    try:
        with warnings.catch_warnings():
            # torch warns that it would let us write into a read-only array: we never do.
            warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
            return torch.from_numpy(np.asarray(array))
    except TypeError as error:
        raise DataError(
            f"an array of dtype {np.asarray(array).dtype} cannot be a tensor",
            why=str(error)[:200],
            fix="convert it to numbers, for example with .astype(numpy.float32)",
        ) from None


def _as_index(indices: Indices) -> Tensor:
    if isinstance(indices, Tensor):
        return indices.to(torch.int64)
    array = np.asarray(indices, dtype=np.int64)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
