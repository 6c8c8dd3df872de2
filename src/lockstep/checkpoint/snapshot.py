"""The content of a checkpoint, and reading it.

Each shard is a safetensors file with some rows (of the first dimension) of divided tensors, and with whole ones; no
shard says which is which. A tensor is what the shards hold under its name, one below the other. So whoever reads
needs neither the number of ranks that wrote nor their way of dividing, and reads no more rows than it wants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.manifest import MODEL, TRAINER, Manifest, is_frozen, model_shard, trainer_shard

if TYPE_CHECKING:
    from torch import Tensor

#: The only key of the placeholder in ``trainer.pt`` for a tensor of the shards; its value is the tensor's name there.
_MARK = "lockstep.in_shards"


class Pieces:
    """A tensor of ``shape`` and ``dtype`` in the shards of a checkpoint; nothing of it is read before it is asked for.

    What is read is on the host, in separate memory.
    """

    def __init__(self, name: str, parts: Sequence[tuple[Path, Any]]) -> None:
        import torch

        from lockstep.checkpoint.content import DTYPES

        self._name = name
        self._parts = [(path, file, tuple(file.get_slice(name).get_shape())) for path, file in parts]
        _, first, shape = self._parts[0]
        if len(self._parts) > 1:
            shape = (sum(part[0] for _, _, part in self._parts), *shape[1:])
        self.shape = torch.Size(shape)
        stored = first.get_slice(name).get_dtype()
        self.dtype = next(dtype for dtype, kind in DTYPES.items() if kind == stored)

    def whole(self) -> Tensor:
        """All of it. Raises :class:`CheckpointError`."""
        if len(self._parts) > 1:
            return self.rows(0, self.shape[0])
        path, file, _ = self._parts[0]
        with _reading(path):
            tensor: Tensor = file.get_tensor(self._name).clone()
        return tensor

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows from ``start`` to before ``stop``. Raises :class:`CheckpointError`."""
        import torch

        found = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        first = 0
        for path, file, (count, *_) in self._parts:
            a, b = max(start, first), min(stop, first + count)
            if a < b:
                with _reading(path):
                    found[a - start : b - start] = file.get_slice(self._name)[a - first : b - first]
            first += count
        return found


def open_pieces(paths: Sequence[Path], aliases: Mapping[str, str]) -> dict[str, Pieces]:
    """The tensors of the shards ``paths``, in the order of their parts, by name. Raises :class:`CheckpointError`."""
    from safetensors import safe_open

    parts: dict[str, list[tuple[Path, Any]]] = {}
    for path in paths:
        with _reading(path):
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118  # it cannot be iterated over
                parts.setdefault(name, []).append((path, file))
    found = {name: Pieces(name, own) for name, own in parts.items()}
    with _reading(paths[0]):
        return found | {name: found[other] for name, other in aliases.items()}


def mark(name: str) -> dict[str, str]:
    """The placeholder in a training state for the tensor ``name`` of its shards."""
    return {_MARK: name}


def put_back(state: Any, tensors: Mapping[str, Any]) -> Any:
    """``state`` with ``tensors`` in the places of their marks. Raises :class:`KeyError`."""
    if isinstance(state, dict):
        if state.keys() == {_MARK}:
            return tensors[state[_MARK]]
        return {key: put_back(value, tensors) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(put_back(value, tensors) for value in state)
    return state


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    from lockstep.checkpoint.content import unreadable

    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise unreadable(path, error) from None


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after ``step`` optimizer steps.

    ``model`` holds CPU tensors by name; tensors that are the same memory stay so. ``trainer`` holds
    what ``torch.load(weights_only=True)`` allows: tensors, numbers, text, lists, dicts. ``manifest``
    is JSON, for readers without torch.

    Of a state that is divided among ranks, each has a snapshot with its rows of the divided tensors: those of the
    model, and in ``rows`` those that ``trainer`` has marks for (:class:`Pieces`). The first rank's has all the rest.

    ``frozen`` names tensors of the model that training does not change: checkpoints share the file that has them.
    """

    step: int
    model: dict[str, Any]
    trainer: dict[str, Any]
    manifest: dict[str, Any]
    rows: dict[str, Tensor] = field(default_factory=dict)
    frozen: Collection[str] = ()


def read_snapshot(folder: Path, manifest: Manifest, *, in_pieces: bool = False) -> Snapshot:
    """The checkpoint in ``folder``; with ``in_pieces`` the tensors of shards are :class:`Pieces`.

    Raises:
        CheckpointError: it cannot be read.
    """
    from lockstep.checkpoint.content import read_model, read_trainer

    trainer, extra, shards = read_trainer(folder / TRAINER), dict(manifest.extra), range(manifest.shards)
    frozen = sorted(folder / name for name in manifest.files if is_frozen(name))
    if not shards:
        weights = read_model([folder / MODEL, *frozen], dict(manifest.aliases))
        return Snapshot(manifest.step, weights, trainer, extra)

    def read(pieces: dict[str, Pieces]) -> dict[str, Any]:
        return dict(pieces) if in_pieces else {name: tensor.whole() for name, tensor in pieces.items()}

    parts = [folder / model_shard(number, len(shards)) for number in shards]
    model = open_pieces([*parts, *frozen], manifest.aliases)
    rows = open_pieces([folder / trainer_shard(number, len(shards)) for number in shards], {})
    return Snapshot(manifest.step, read(model), put_back(trainer, read(rows)), extra)
