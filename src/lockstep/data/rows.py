"""Data sets whose batches are rows of tensors, and are gathered whole: the same values as ``default_collate`` gives.

Those are torch's ``TensorDataset``, tensors and arrays themselves, a ``Subset`` or ``ConcatDataset`` of them, and
Hugging Face data sets in torch format. A class that overrides ``__getitem__`` is not among them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from lockstep.data.arrays import ArrayDataset, as_tensor

Indices = NDArray[np.int64]
Gather = Callable[[Indices], Any]


def leaf_of(dataset: Any, index: int) -> tuple[Any, int]:
    """The data set behind ``Subset`` and ``ConcatDataset`` that has sample ``index``, and its number there."""
    while True:
        if type(dataset) is Subset:
            dataset, index = dataset.dataset, int(dataset.indices[index])
        elif type(dataset) is ConcatDataset:
            place = bisect_right(dataset.cumulative_sizes, index)
            index -= dataset.cumulative_sizes[place - 1] if place else 0
            dataset = dataset.datasets[place]
        else:
            return dataset, index


def leaves(dataset: Any) -> Iterator[Any]:
    """The data sets behind ``Subset`` and ``ConcatDataset``."""
    if type(dataset) is Subset:
        yield from leaves(dataset.dataset)
    elif type(dataset) is ConcatDataset:
        for part in dataset.datasets:
            yield from leaves(part)
    else:
        yield dataset


def gather_of(dataset: Any, collate: Any) -> Gather | None:
    """What makes a whole batch of ``dataset``'s samples at given indices; ``None`` where they are read one by one."""
    if type(dataset) is ArrayDataset:
        return dataset.__getitems__
    if all(type(leaf) is ArrayDataset for leaf in leaves(dataset)) and type(dataset) is Subset:
        return lambda indices: tuple(_gathered(dataset, indices))
    if collate is not default_collate:
        return None
    if is_hugging_face(dataset) and dataset.format["type"] == "torch":
        return lambda indices: _hugging_face(dataset, indices)
    rows = [_rows(leaf) for leaf in leaves(dataset)]
    if None in rows or len({tuple(map(_kind, tensors)) for tensors in rows if tensors is not None}) != 1:
        return None
    alone = {isinstance(leaf, (Tensor, np.ndarray)) for leaf in leaves(dataset)}
    if len(alone) != 1:
        return None
    if alone == {True}:
        return lambda indices: _gathered(dataset, indices)[0]
    return lambda indices: _gathered(dataset, indices)


def is_hugging_face(dataset: Any) -> bool:
    return type(dataset).__module__ == "datasets.arrow_dataset" and type(dataset).__name__ == "Dataset"


def _rows(leaf: Any) -> tuple[Tensor, ...] | None:
    """The tensors whose rows are ``leaf``'s samples; ``None`` where that is not known."""
    if type(leaf) in (TensorDataset, ArrayDataset):
        tensors: tuple[Tensor, ...] = leaf.tensors
    elif type(leaf) in (np.ndarray, np.memmap) and leaf.ndim > 1 and leaf.dtype.kind in "biufc":
        tensors = (as_tensor(leaf),)
    elif type(leaf) is Tensor and leaf.dim() > 0:
        tensors = (leaf,)
    else:
        return None
    return tensors if tensors and all(map(_is_plain, tensors)) else None


def _is_plain(tensor: Tensor) -> bool:
    strided = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not strided or tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    try:
        tensor[:1].index_select(0, torch.zeros(min(1, len(tensor)), dtype=torch.int64))
    except RuntimeError:  # not there for every type
        return False
    return True


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape[1:]


def _gathered(dataset: Any, indices: Indices) -> list[Tensor]:
    """The rows of a data set that :func:`gather_of` has looked at, as tensors of shape ``(n, …)``."""
    if type(dataset) is Subset:
        where: Any = dataset.indices
        known = [where[i] for i in indices.tolist()] if isinstance(where, list) else where[indices]
        return _gathered(dataset.dataset, np.asarray(known, dtype=np.int64))
    if type(dataset) is ConcatDataset:
        return _concatenated(dataset, indices)
    tensors = (as_tensor(dataset),) if isinstance(dataset, np.ndarray) else getattr(dataset, "tensors", (dataset,))
    index = torch.from_numpy(indices)
    return [tensor.index_select(0, index) for tensor in tensors]


def _concatenated(dataset: Any, indices: Indices) -> list[Tensor]:
    parts = np.searchsorted(dataset.cumulative_sizes, indices, side="right")
    starts = [0, *dataset.cumulative_sizes]
    whole: list[Tensor] = []
    for part in np.unique(parts).tolist():
        mine = np.flatnonzero(parts == part)
        rows = _gathered(dataset.datasets[part], indices[mine] - starts[part])
        whole = whole or [row.new_empty((len(indices), *row.shape[1:])) for row in rows]
        for column, row in zip(whole, rows, strict=True):
            column.index_copy_(0, torch.from_numpy(mine), row)
    return whole


def _hugging_face(dataset: Any, indices: Indices) -> dict[str, Any]:
    batch: dict[str, Any] = dataset[indices.tolist()]
    if not all(type(column) is Tensor and len(column) == len(indices) for column in batch.values()):
        raise ValueError("samples of different sizes, or what is not a tensor")
    return batch
