"""Samples in memory (or in a memory map), whose batches are one gather per array or column."""

from __future__ import annotations

import mmap
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from inspect import signature
from types import MethodType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate

from lockstep.data.collation import MixedKindsError, as_floats, check_kinds, find_misfit
from lockstep.errors import DataError, TaskError, many

#: The label, or target, that a loss ignores: torch's ``ignore_index``.
NO_LABEL = -100
Positions = npt.NDArray[np.int64]
Gather = Callable[[Positions], Any]
#: Names under which data sets have the label of each sample.
LABELS = ("targets", "labels", "label")
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
        #: Whether no sample is read from a disk. A memory map is recognised in NumPy arrays, not in tensors.
        self.is_in_memory = not any(map(_is_mapped, arrays))
        self.tensors = tuple(as_tensor(array) for array in arrays)
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        if len({shape[:1] for shape in shapes} - {()}) != 1 or () in shapes:
            raise DataError(
                f"arrays of shapes {', '.join(map(str, shapes)) or '(none)'} cannot be a data set",
                why="item i of every array belongs to sample i",
                fix="pass arrays with the same first dimension, for example ArrayDataset(samples, labels)",
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample."""
        return sum(tensor[:1].nbytes for tensor in self.tensors)

    @property
    def is_on_gpu(self) -> bool:
        return self.tensors[0].is_cuda

    def to(self, device: torch.device) -> ArrayDataset:
        """Return the same samples, with their arrays on ``device``."""
        return ArrayDataset(*(tensor.to(device) for tensor in self.tensors))

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: Indices) -> tuple[Tensor, ...]:
        """Return the samples at ``indices`` (each in [0, len)) as one batch: a tensor of shape ``(n, …)`` per array."""
        if isinstance(indices, Tensor):
            rows = indices.to(torch.int64)
        else:
            array = np.asarray(indices, dtype=np.int64)
            rows = torch.from_numpy(array if array.flags.writeable else array.copy())
        if self.is_on_gpu:  # page-locked: to copy other memory, the host would wait for all that the GPU has to do
            rows = rows.pin_memory().to(self.tensors[0].device, non_blocking=True)
        # Without Python's global lock, so a loader's thread can gather during the step.
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)


class FrameRows:
    """The rows of a frame; sample ``i`` is a dictionary of the values in row ``i``, whatever the frame's index."""

    def __init__(self, columns: dict[Any, npt.NDArray[Any]], samples: int) -> None:
        self.columns = {name: as_floats(column) for name, column in columns.items()}
        self._samples = samples
        self.targets = next((self.columns[name] for name in LABELS if name in self.columns), None)
        numbers = all(column.dtype.kind in "biuf" and min(column.strides) >= 0 for column in self.columns.values())
        self._tensors = {name: as_tensor(column) for name, column in self.columns.items()} if numbers else {}
        #: For the plan.
        self.remark = _gaps_remark(self.columns)
        #: For :meth:`gathered`.
        self.is_plain = bool(self._tensors) and all(map(_is_plain, self._tensors.values()))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[Any, Any]:
        if not -self._samples <= index < self._samples:
            raise IndexError(f"row {index} of {self._samples}")
        return {name: column[index] for name, column in self.columns.items()}

    def check_collatable(self) -> None:
        """Raise :class:`DataError` for a column with a value that ``default_collate`` cannot take."""
        for name, column in self.columns.items():
            kinds = set(map(type, column)) if column.dtype.kind not in "biufcSU" else set()
            if kinds <= {float} or kinds <= {str}:
                continue
            for row, value in enumerate(column):
                is_missing = str in kinds and isinstance(value, float) and value != value  # as pandas has texts
                misfit = find_misfit(None if is_missing else value, row, f"the column {name!r}")
                if misfit is not None:
                    raise DataError(
                        misfit.text,
                        why=f"a batch has tensors and texts, and the column is of type {column.dtype}",
                        fix=f"encode the frame with lockstep.data.FrameEncoder; or {misfit.fix}; or leave the column "
                        "out, or write Task.collate (or pass collate=)",
                    )
            check_list(column.tolist(), f"the column {name!r}")

    def gathered(self, indices: Positions) -> dict[Any, Tensor]:
        """Return the batch that ``default_collate`` makes of the samples ``indices``."""
        rows = torch.from_numpy(indices)
        return {name: tensor.index_select(0, rows) for name, tensor in self._tensors.items()}


def check_list(values: Sequence[Any], field: str = "") -> None:
    """Raise :class:`DataError` where the dtype of a batch would depend on those of ``values`` that are in it."""
    try:
        check_kinds(values, field)
    except MixedKindsError as error:
        raise DataError(
            str(error),
            why="a batch has one dtype for each field",
            fix="give it one type in all samples, such as float(x), or write Task.collate (or pass collate=)",
        ) from None


def _gaps_remark(columns: Mapping[Any, npt.NDArray[Any]]) -> str | None:
    """Name the columns of numbers with missing values, which a frame has as NaN."""
    floats = {name: column for name, column in columns.items() if column.dtype.kind == "f" and column.ndim == 1}
    gaps = {name: np.flatnonzero(np.isnan(column)) for name, column in floats.items()}
    texts = [f"{name!r} ({len(rows)}, the first in row {rows[0]})" for name, rows in gaps.items() if len(rows)]
    if not texts:
        return None
    return (
        f"The frame has missing values (NaN) in {', '.join(texts)}: the loss is NaN unless the task leaves them out. "
        "lockstep.data.FrameEncoder fills them."
    )


def is_loader(problem: str, loader: DataLoader[Any], fix: str) -> TaskError:
    """Make the error of a loader that was passed in place of its data set."""
    ours = type(loader.batch_sampler) in (torch_data.BatchSampler, type(None))
    sampler = loader.sampler if ours else loader.batch_sampler
    if isinstance(sampler, torch_data.WeightedRandomSampler):
        fix += "; its sampler goes to Datasets(train=…, weights=sampler) or session.batches(…, weights=sampler)"
    elif type(sampler).__module__.partition(".")[0] != "torch":
        fix += (
            f". Its {type(sampler).__name__} then has no effect: write weights=…, or give an iterable data "
            "set that yields samples in that order"
        )
    return TaskError(problem, why="Lockstep makes the batches: their order must not depend on the devices", fix=fix)


def by_row(dataset: Any) -> Any:
    """Return ``dataset``, or the rows of a frame of pandas, polars or pyarrow, whose ``[i]`` is a column.

    Raises:
        DataError: something else with a length and items: a text, or a group of arrays. TaskError: a loader.
    """
    package = type(dataset).__module__.partition(".")[0]
    name = type(dataset).__name__
    if (package, name) in (("pandas", "DataFrame"), ("pyarrow", "Table")):
        columns = dataset.columns if package == "pandas" else dataset.column_names
        twice = next((column for column, count in Counter(columns).items() if count > 1), None)
        if twice is not None:
            raise DataError(
                f"the column {twice!r} is in the {name} more than once",
                why="a sample has one value for each name",
                fix="rename one of them, or leave it out",
            )
    if package in ("pandas", "polars") and name == "Series":
        return dataset.to_numpy()
    if package == "pandas" and name == "DataFrame":
        return FrameRows({n: dataset.iloc[:, i].to_numpy() for i, n in enumerate(dataset.columns)}, len(dataset))
    if package == "polars" and name == "DataFrame":
        return FrameRows({column.name: column.to_numpy() for column in dataset.get_columns()}, len(dataset))
    if package == "pyarrow" and name == "Table":
        return FrameRows(as_arrays(dataset), len(dataset))
    if isinstance(dataset, DataLoader):
        fix = "give loader.dataset; training.batch_size and Task.collate (or session.batches(collate=)) do the rest"
        raise is_loader(f"the data set is a {name}", dataset, fix)
    if isinstance(dataset, str | bytes):
        fix = "open it, for example with lockstep.data.JsonLines"
        raise DataError(f"the data set is a text: {dataset[:60]!r}", why="its samples would be characters", fix=fix)
    if type(dataset) in (tuple, dict) and dataset:
        arrays = list(dataset.values()) if type(dataset) is dict else list(dataset)
        rows = {len(a) if isinstance(a, (Tensor, np.ndarray)) and a.ndim else 0 for a in arrays}
        if 0 not in rows and len(rows) == 1 and len(arrays) < max(rows):
            raise DataError(
                f"the data set is a {type(dataset).__name__} of {many(len(arrays), 'array')} of {max(rows)} rows",
                why="each sample would be a whole array",
                fix="give TensorDataset(x, y), or StackDataset(x=…, y=…) for dictionaries, of torch.utils.data",
            )
    return dataset


def resolve_index(index: int, samples: int) -> int:
    """Return ``index`` counted from 0: as in a sequence, -1 is the last one. Raises :class:`IndexError`."""
    position = index + samples if index < 0 else index
    if not 0 <= position < samples:
        raise IndexError(f"sample {index} of {samples}")
    return position


def as_arrays(table: Any, gaps: Sequence[str] = ()) -> dict[Any, npt.NDArray[Any]]:
    """Return the columns of a table of pyarrow by row, as numbers or as Python's values.

    Args:
        gaps: columns in which other rows have no value: their rows are NumPy's numbers, and ``None``.
    """
    return {name: _by_row(column, name in gaps) for name, column in zip(table.column_names, table.columns, strict=True)}


def _by_row(column: Any, has_gaps: bool) -> npt.NDArray[Any]:
    from pyarrow import types

    flat = column
    shape = [len(column)]
    is_list = types.is_fixed_size_list(column.type)
    kind = column.type.value_type if is_list else column.type
    has_gaps = has_gaps or column.null_count > 0
    if is_list and not has_gaps:
        flat = column.combine_chunks()
        flat = (flat.chunk(0) if hasattr(flat, "chunk") else flat).flatten()
        shape.append(column.type.list_size)
    numbers = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    if numbers and not has_gaps and not flat.null_count:
        return np.asarray(flat).reshape(shape)
    values = column.to_pylist()
    if numbers:  # so that the type of a value does not depend on the values of other rows
        dtype = np.dtype(kind.to_pandas_dtype())
        complete = (value is not None and (not is_list or None not in value) for value in values)
        values = [np.asarray(v, dtype)[()] if is_whole else v for v, is_whole in zip(values, complete, strict=True)]
    return np.fromiter(values, object, len(values))


def _is_mapped(array: Any) -> bool:
    """Return whether a NumPy array is, or is a view of, a map of a file."""
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
    except (TypeError, ValueError) as error:  # a type, a byte order or strides that torch lacks
        raise DataError(
            f"an array of dtype {np.asarray(array).dtype} cannot be a tensor",
            why=str(error)[:200],
            fix="convert it, for example with .astype(numpy.float32)",
        ) from None


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of ``tensor``, of any strides, in one dimension; shares the memory of a contiguous one."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # A tensor of one row is contiguous whatever its strides, and another type needs a stride of 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def draws_keyed(dataset: Any) -> bool:
    """Return whether ``dataset`` has Lockstep's ``sample(index, rng)``; replay buffers have another such method."""
    method = getattr(dataset, "sample", None)
    if not callable(method) or not hasattr(dataset, "__getitem__"):
        return callable(method)
    # Of the function, since reading a signature takes longer than a quick sample.
    return _takes_rng(method.__func__, 1) if isinstance(method, MethodType) else _takes_rng.__wrapped__(method, 0)


@lru_cache
def _takes_rng(function: Any, bound: int) -> bool:
    try:
        parameters = [*signature(function).parameters.values()][bound:]
    except (TypeError, ValueError):
        return False
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    by_place = all(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in needed
    )
    return by_place and (len(needed) == 2 or [parameter.name for parameter in parameters[1:2]] == ["rng"])


def leaf_of(dataset: Any, index: int) -> tuple[Any, int]:
    """Return the data set behind ``Subset`` and ``ConcatDataset`` that has sample ``index``, and its index there."""
    while True:
        if type(dataset) is Subset:
            index = int(dataset.indices[index])
            dataset = dataset.dataset
        elif type(dataset) is ConcatDataset:
            part = bisect_right(dataset.cumulative_sizes, index)
            index -= dataset.cumulative_sizes[part - 1] if part else 0
            dataset = dataset.datasets[part]
        else:
            return dataset, index


def leaves(dataset: Any) -> Iterator[Any]:
    """Yield the data sets behind ``Subset`` and ``ConcatDataset``."""
    if type(dataset) is Subset:
        yield from leaves(dataset.dataset)
    elif type(dataset) is ConcatDataset:
        for part in dataset.datasets:
            yield from leaves(part)
    else:
        yield dataset


def gather_of(dataset: Any, collate: Any) -> Gather | None:
    """Return a function that gathers the batch which ``default_collate`` would make of samples at given indices.

    ``None``: samples are read one by one, as of a class that overrides ``__getitem__``.
    """
    if type(dataset) is ArrayDataset:
        return dataset.__getitems__
    if all(type(leaf) is ArrayDataset for leaf in leaves(dataset)) and type(dataset) is Subset:
        return lambda indices: tuple(_gathered(dataset, indices))
    if collate is not default_collate:
        return None
    if getattr(dataset, "is_plain", False) is True:
        return cast(Gather, dataset.gathered)
    if is_hugging_face(dataset) and dataset.format["type"] == "torch":
        return lambda indices: _of_hugging_face(dataset, indices)
    kinds = set()
    for leaf in leaves(dataset):
        tensors = _rows(leaf)
        if tensors is None:
            return None
        kinds.add((isinstance(leaf, (Tensor, np.ndarray)), *((tensor.dtype, tensor.shape[1:]) for tensor in tensors)))
    if len(kinds) != 1:
        return None
    if next(iter(kinds))[0]:  # a sample is not a tuple
        return lambda indices: _gathered(dataset, indices)[0]
    return lambda indices: _gathered(dataset, indices)


def is_stream(dataset: Any) -> bool:
    """Return whether samples of ``dataset`` can only be iterated over; a ``DataLoader`` gives batches."""
    from torch.utils.data import DataLoader, IterableDataset

    iterates = hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or (iterates and not isinstance(dataset, DataLoader))


def is_hugging_face(dataset: Any) -> bool:
    return type(dataset).__module__ == "datasets.arrow_dataset" and type(dataset).__name__ == "Dataset"


def _rows(leaf: Any) -> tuple[Tensor, ...] | None:
    """Return the tensors whose rows are ``leaf``'s samples, or ``None`` for other data sets."""
    if type(leaf) in (TensorDataset, ArrayDataset):
        tensors: tuple[Tensor, ...] = leaf.tensors
    elif type(leaf) in (np.ndarray, np.memmap) and leaf.ndim > 1 and leaf.dtype.kind in "biufc":
        if not leaf.dtype.isnative or min(leaf.strides) < 0:
            return None
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


def _gathered(dataset: Any, indices: Positions) -> list[Tensor]:
    """Gather rows of a data set that :func:`gather_of` supports, as tensors of shape ``(n, …)``."""
    if type(dataset) is Subset:
        subset: Any = dataset.indices
        inner = [subset[i] for i in indices.tolist()] if isinstance(subset, list) else subset[indices]
        return _gathered(dataset.dataset, np.asarray(inner, dtype=np.int64))
    if type(dataset) is not ConcatDataset:
        tensors = (as_tensor(dataset),) if isinstance(dataset, np.ndarray) else getattr(dataset, "tensors", (dataset,))
        index = torch.from_numpy(indices)
        return [tensor.index_select(0, index) for tensor in tensors]
    parts = np.searchsorted(dataset.cumulative_sizes, indices, side="right")
    starts = [0, *dataset.cumulative_sizes]
    whole: list[Tensor] = []
    for part in np.unique(parts).tolist():
        rows_of_part = np.flatnonzero(parts == part)
        rows = _gathered(dataset.datasets[part], indices[rows_of_part] - starts[part])
        whole = whole or [row.new_empty((len(indices), *row.shape[1:])) for row in rows]
        for column, row in zip(whole, rows, strict=True):
            column.index_copy_(0, torch.from_numpy(rows_of_part), row)
    return whole


def _of_hugging_face(dataset: Any, indices: Positions) -> dict[str, Any]:
    batch: dict[str, Any] = dataset[indices.tolist()]
    if not all(type(column) is Tensor and len(column) == len(indices) for column in batch.values()):
        raise ValueError("samples of different sizes, or values that are not tensors")
    return batch


def filled(batch: Sequence[Tensor], samples: int, *labels: int) -> tuple[Tensor, ...]:
    """Repeat the last sample of ``batch`` up to ``samples``, without its label; serves as ``Task.pad``.

    Args:
        labels: which columns are labels.
    """
    whole = []
    for number, column in enumerate(batch):
        last = column[-1:].expand(samples - len(column), *column.shape[1:])
        whole.append(torch.cat([column, torch.full_like(last, NO_LABEL) if number in labels else last]))
    return tuple(whole)
