"""Record every step, so that two runs can be compared (``lockstep verify``).

Each rank leaves ``trace-rank<r>.npz`` in the run folder. Content of samples is kept as a sum of hashes, which is the
same however the samples of a step are divided and arranged.

======================= ====================== ==================================================================
column                  shape                  content
======================= ====================== ==================================================================
digest, samples         [steps]                of the samples of this rank: sum of hashes modulo 2⁶⁴, number
grad_norm               [steps]                of the reduced gradient, as this rank sees it
names                   [parameters]           all floating-point parameters of the model at the start, frozen or not
sums                    [1 + 2 steps, names]   checksums of this rank's weights: at the start, then for each step after
                                               the update and after the hooks; not of a divided model
merged                  [merges]               steps after which buffers are read: 0, and where ranks merge them
shared                  [buffers]              saved buffers that all ranks should share
buffer_sums             [merges, shared]       their checksums; not of a divided model
loss, count             [steps]                over all ranks; this and all that follows on rank 0 alone
lr                      [steps, groups]        learning rates
group:<n>.<setting>     [1 + steps]            the other numbers in the optimizer's ``param_groups``
sizes, weights          [names], [1 + steps,]  how many values are kept of each parameter, and those values
buffer:<name>           [merges, values]       values of a buffer that checkpoints keep
draws                   [functions]            random functions that the forward pass has called
======================= ====================== ==================================================================
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lockstep.config import DebugConfig
from lockstep.data.reader import Indices
from lockstep.data.requests import BatchRequest, Source
from lockstep.engine.distributed.buffers import bit_sum, weights_of
from lockstep.engine.fingerprint import as_array, feed
from lockstep.engine.optim.step import Update
from lockstep.engine.partition import pick

#: Values kept of each parameter and buffer, spread over it: enough to see any update, few enough for any model.
VALUES_PER_TENSOR = 1024
_MODULUS = 2**64


def trace_file(run_dir: Path, rank: int) -> Path:
    return run_dir / f"trace-rank{rank}.npz"


class Traced(NamedTuple):
    """A batch and the sum of the hashes of its samples."""

    digest: int
    batch: Any


@dataclass(frozen=True)
class TracedSource(Source):
    """Batches come with the hashes of their samples."""

    def batch(self, request: BatchRequest) -> Any:
        """Return :class:`Traced`; () for a request without samples."""
        batch = super().batch(request)
        if request.size == 0:
            return batch
        if not isinstance(batch, Traced):
            batch = Traced(_digest_rows(batch, self.indices(request)), batch)
        return batch.batch if request.ghost else batch


@dataclass(frozen=True)
class DigestingCollate:
    """Collates samples, and hashes them before padding can touch them."""

    collate: Callable[[Sequence[Any]], Any]

    def __call__(self, samples: Sequence[Any]) -> Traced:
        return Traced(sum(map(_digest, samples)) % _MODULUS, self.collate(samples))


class Trace:
    """Collects what happened on one rank, for ``debug.trace``. ``draws``: of the forward pass; it may still grow."""

    def __init__(
        self, settings: DebugConfig, file: Path, is_main: bool, update: Update, model: nn.Module, draws: Set[str]
    ) -> None:
        self._settings = settings
        self._file = file
        self._is_main = is_main
        self._update = update
        self._model = model
        self._draws = draws
        self._digest = 0
        # By name, since requires_grad, and the tensor of a name, may change on the way.
        self._names = {name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
        self._picks = {name: _picked(p) for name, p in self._names.items()}
        saved = model.state_dict().keys()
        self._saved = {name: _picked(b) for name, b in model.named_buffers() if name in saved and b.numel()}
        self._shared = sorted(weights_of(model).keys() & self._saved.keys())
        names = ("digest", "samples", "grad_norm", "sums", "merged", "buffer_sums")
        self._columns: dict[str, list[Any]] = {name: [] for name in (*names, *(("loss", "count") if is_main else ()))}
        self._rates: list[list[float]] = []
        self._weights: list[NDArray[np.float32]] = []
        self._groups: list[dict[str, float]] = []
        self._buffers: dict[str, list[NDArray[np.float32]]] = {}
        self._read_sums()
        self._read()
        self._read_buffers(0)

    def source(self, source: Source) -> Source:
        return TracedSource(
            dataset=source.dataset,
            collate=DigestingCollate(source.collate),
            seed=source.seed,
            order=source.order,
            lanes=source.lanes,
            skipped=source.skipped,
            min_samples=source.min_samples,
            pad=source.pad,
            full=source.full,
            arrangement=self._settings.trace,
        )

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        return map(self._unpack, batches)

    def _unpack(self, batch: Any) -> Any:
        if not isinstance(batch, Traced):
            return batch
        self._digest = (self._digest + batch.digest) % _MODULUS
        return batch.batch

    def after_update(self, requests: Sequence[BatchRequest], total: Any, count: Any) -> None:
        """Begin the row of the step that has just ended, before its hooks are called."""
        norm = self._update.grad_norm
        row: dict[str, Any] = {
            "digest": self._digest,
            "samples": sum(request.size for request in requests if not request.ghost),
            "grad_norm": math.nan if norm is None else float(norm),
        }
        self._digest = 0
        if self._is_main:
            row |= {"loss": float(total), "count": float(count)}
            self._rates.append([float(group["lr"]) for group in self._update.optimizer.param_groups])
        for name, value in row.items():
            self._columns[name].append(value)
        self._read_sums()

    def after_hooks(self, step: int, *, merged: bool) -> None:
        """Complete the row; ``merged``: ranks have just merged their buffers."""
        self._read_sums()
        self._read()
        if merged:
            self._read_buffers(step)

    def _read_sums(self) -> None:
        if self._update.divided is None:
            self._columns["sums"].append(_bits(dict(self._model.named_parameters()), self._names))

    def _read(self) -> None:
        if self._is_main or self._update.divided is not None:
            weights = self._pick(dict(self._model.named_parameters()), self._picks)
            if self._is_main:
                self._weights.append(weights)
                self._groups.append(dict(_settings(self._update.optimizer.param_groups)))

    def _read_buffers(self, step: int) -> None:
        self._columns["merged"].append(step)
        if self._update.divided is None:
            self._columns["buffer_sums"].append(_bits(weights_of(self._model), self._shared))
        if self._is_main or self._update.divided is not None:
            now = dict(self._model.named_buffers())
            for name, places in self._saved.items():
                values = self._pick(now, {name: places})
                if self._is_main:
                    self._buffers.setdefault(name, []).append(values)

    def _pick(self, tensors: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> NDArray[np.float32]:
        """Return the values at ``places``; NaN for tensors that are gone, or have another size."""
        chosen = []
        for name, at in places.items():
            tensor = tensors.get(name, torch.empty(0))
            fits = len(at) == 0 or int(at[-1]) == tensor.numel() - 1
            chosen.append(tensor if fits else torch.full((), math.nan).expand(int(at[-1]) + 1))
        read = pick if self._update.divided is None else self._update.divided.pick
        return read(chosen, list(places.values())).numpy()

    def write(self) -> None:
        if not self._columns["digest"]:  # the run ended before a step
            return
        kinds = {"digest": np.uint64, **dict.fromkeys(("samples", "sums", "merged", "buffer_sums"), np.int64)}
        columns: dict[str, Any] = {
            name: np.array(values, dtype=kinds.get(name, np.float64)) for name, values in self._columns.items()
        }
        columns |= {"names": np.array(list(self._names), dtype=str), "shared": np.array(self._shared, dtype=str)}
        if self._is_main:
            rates = zip_longest(*self._rates, fillvalue=math.nan)  # a hook may add a group
            columns["lr"] = np.array(list(rates), dtype=np.float64).T
            columns |= {f"buffer:{name}": np.stack(values) for name, values in self._buffers.items()}
            for name in sorted({name for row in self._groups for name in row}):
                columns[f"group:{name}"] = np.array([row.get(name, math.nan) for row in self._groups])
            columns["sizes"] = np.array([len(places) for places in self._picks.values()], dtype=np.int64)
            columns["weights"] = np.stack(self._weights)
            columns["draws"] = np.array(sorted(self._draws), dtype=str)
        np.savez(self._file, **columns)


def _picked(tensor: Tensor) -> Tensor:
    number = min(tensor.numel(), VALUES_PER_TENSOR)
    return torch.linspace(0, tensor.numel() - 1, number, dtype=torch.float64).long()


def _bits(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[int]:
    """Compute :func:`bit_sum` of each, 0 of one that is gone."""
    return [int(bit_sum(tensors[name])) if name in tensors else 0 for name in names]


def _settings(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of ``param_groups``, by name; learning rates are a column."""
    for group_number, group in enumerate(groups):
        for name, value in group.items():
            if name not in {"params", "lr", "initial_lr"}:
                values = value if isinstance(value, (list, tuple)) else [value]
                for number, item in enumerate(values):
                    if isinstance(item, (int, float)) or (isinstance(item, Tensor) and item.numel() == 1):
                        yield f"{group_number}.{name}" + (f"[{number}]" if values is value else ""), float(item)


def _digest(sample: Any) -> int:
    digest = hashlib.blake2b(digest_size=8)
    feed(digest, sample)
    return int.from_bytes(digest.digest(), "little")


def _digest_rows(batch: Any, indices: Indices) -> int:
    """Hash the samples of a batch that came whole, by rows. Zeros at a row's end may be padding."""
    columns = list(_columns(batch, len(indices)))
    total = 0
    for row, index in enumerate(indices):
        rows = (column[row] for column in columns)
        cells = [cell.tobytes().rstrip(b"\0") if isinstance(cell, np.ndarray | np.generic) else cell for cell in rows]
        total += _digest(cells or int(index))
    return total % _MODULUS


def _columns(batch: Any, size: int) -> Iterator[Any]:
    """Yield the parts of a batch with a row for each of its ``size`` samples: tensors, arrays and lists."""
    if isinstance(batch, Tensor):
        if batch.layout == torch.strided and batch.dim() and len(batch) == size:
            yield as_array(batch)
    elif isinstance(batch, np.ndarray):
        if batch.ndim and len(batch) == size:
            yield batch
    elif isinstance(batch, Mapping):
        for key in sorted(batch.keys(), key=str):  # iterating a TensorDict gives its rows
            yield from _columns(batch[key], size)
    elif isinstance(batch, (list, tuple)):
        if len(batch) == size and not any(isinstance(item, Tensor | np.ndarray | Mapping) for item in batch):
            yield batch
        else:
            for item in batch:
                yield from _columns(item, size)
    elif hasattr(batch, "__dict__"):
        yield from _columns(vars(batch), size)
