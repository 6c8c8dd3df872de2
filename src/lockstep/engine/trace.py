"""What every step did, written down so that two runs can be laid side by side (``lockstep verify``).

Each rank leaves ``trace-rank<r>.npz`` in the run folder: what it was given to learn from and, on rank 0, loss,
count, learning rate, gradient norm and weights of every step. Content of samples is kept as a sum of hashes,
which is the same however the samples of a step are divided and arranged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lockstep.config import DebugConfig
from lockstep.data.loader import Indices, Request, Source
from lockstep.data.randomness import derive_key
from lockstep.engine.facts import as_array, feed
from lockstep.engine.loop import StepResult
from lockstep.engine.update import Update

if TYPE_CHECKING:
    from lockstep.engine.divide import Divided

#: Weights kept of each parameter, spread over it: enough to see any update, little enough for any model.
WEIGHTS_PER_PARAMETER = 1024
_MODULUS = 2**64


def trace_file(run_dir: Path, rank: int) -> Path:
    return run_dir / f"trace-rank{rank}.npz"


class Traced(NamedTuple):
    """A batch and the sum of the hashes of its samples."""

    digest: int
    batch: Any


@dataclass(frozen=True)
class TracedSource(Source):
    """A source whose batches come with the hashes of their samples, which may be rearranged within each batch."""

    arrangement: str = "on"

    def batch(self, request: Request) -> Any:
        """:class:`Traced`; () for a request without samples."""
        batch = super().batch(request)
        if request.size == 0:
            return batch
        if not isinstance(batch, Traced):
            batch = Traced(_digest_rows(batch, request.size), batch)
        return batch.batch if request.ghost else batch

    def indices(self, request: Request) -> Indices:
        indices = super().indices(request)
        if self.arrangement == "reversed":
            return indices[::-1].copy()
        if self.arrangement == "shuffled":
            key = derive_key("arrangement", self.seed, request.epoch, request.start)
            return np.random.default_rng(key).permutation(indices)
        return indices

    @property
    def gathers(self) -> bool:
        return False


@dataclass(frozen=True)
class DigestingCollate:
    """Collates samples, and hashes them before padding can touch them."""

    collate: Callable[[Sequence[Any]], Any]

    def __call__(self, samples: Sequence[Any]) -> Traced:
        return Traced(sum(map(_digest, samples)) % _MODULUS, self.collate(samples))


@dataclass
class Trace:
    """Collects what happened on one rank; nothing at all when ``debug.trace`` is off.

    Args:
        draws: the random functions of the forward pass, a set that may still grow.
        divided: the model, where this rank has a part of it; reading its weights is collective.
    """

    settings: DebugConfig
    file: Path
    is_main: bool
    update: Update
    model: nn.Module
    draws: Set[str]
    divided: Divided | None = None
    _digest: int = 0
    _samples: int = 0
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _weights: list[NDArray[np.float32]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.is_on:
            self._picks = [_picked(p) for p in self.model.parameters() if p.requires_grad]
            self._weights.append(self._read_weights())

    @property
    def is_on(self) -> bool:
        return self.settings.trace != "off"

    def source(self, source: Source) -> Source:
        if not self.is_on:
            return source
        collate = DigestingCollate(source.collate)
        return TracedSource(
            source.dataset, collate, source.seed, source.order, source.lanes, arrangement=self.settings.trace
        )

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        return map(self._unpack, batches) if self.is_on else batches

    def _unpack(self, batch: Any) -> Any:
        if not isinstance(batch, Traced):
            return batch
        self._digest = (self._digest + batch.digest) % _MODULUS
        return batch.batch

    def after_step(self, result: StepResult) -> None:
        """Collects a row for the step that has just ended."""
        if not self.is_on:
            return
        samples = sum(request.size for request in result.window.requests if not request.ghost)
        row: dict[str, Any] = {"digest": self._digest, "samples": samples}
        self._digest = 0
        weights = self._read_weights() if self.is_main or self.divided is not None else None
        if self.is_main and weights is not None:
            norm = self.update.grad_norm
            row |= {
                "loss": float(result.loss_total),
                "count": float(result.loss_count),
                "grad_norm": float("nan") if norm is None else float(norm),
                "lr": [float(group["lr"]) for group in self.update.optimizer.param_groups],
            }
            self._weights.append(weights)
        self._rows.append(row)

    def _read_weights(self) -> NDArray[np.float32]:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        read = pick if self.divided is None else self.divided.pick
        return read(parameters, self._picks).numpy()

    def write(self) -> None:
        """Leave the file behind."""
        if not self._rows:
            return
        kinds = {"digest": np.uint64, "samples": np.int64}
        columns: dict[str, NDArray[Any]] = {
            key: np.array([row[key] for row in self._rows], dtype=kinds.get(key, np.float64)) for key in self._rows[0]
        }
        if self.is_main:
            columns["weights"] = np.stack(self._weights)
            columns["draws"] = np.array(sorted(self.draws), dtype=str)
        np.savez(self.file, **columns)  # type: ignore[arg-type]


def pick(parameters: Iterable[Tensor], places: Sequence[Tensor]) -> Tensor:
    """The elements ``places`` of each flattened parameter, one after the other; float32 on the host."""
    chosen = (p.detach().reshape(-1)[at.to(p.device)] for p, at in zip(parameters, places, strict=True))
    return torch.cat([values.float().cpu() for values in chosen])


def _picked(parameter: Tensor) -> Tensor:
    number = min(parameter.numel(), WEIGHTS_PER_PARAMETER)
    return torch.linspace(0, parameter.numel() - 1, number, dtype=torch.float64).long()


def _digest(sample: Any) -> int:
    digest = hashlib.blake2b(digest_size=8)
    feed(digest, sample)
    return int.from_bytes(digest.digest(), "little")


def _digest_rows(batch: Any, size: int) -> int:
    """The samples of a batch that came whole: the rows of its tensors. Zeros at a row's end may be padding."""
    columns = [as_array(c) for c in _tensors(batch) if c.dim() and len(c) == size]
    total = 0
    for row in range(size):
        total += _digest([column[row].tobytes().rstrip(b"\0") for column in columns])
    return total % _MODULUS


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for key in sorted(batch):
            yield from _tensors(batch[key])
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from _tensors(item)
