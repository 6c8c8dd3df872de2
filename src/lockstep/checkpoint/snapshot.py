"""The content of a checkpoint, and reading it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.manifest import MODEL, TRAINER, Manifest, model_shard, trainer_shard

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.pieces import Pieces


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after ``step`` optimizer steps.

    ``model`` holds CPU tensors by name; tensors that are the same memory stay so. ``trainer`` holds
    what ``torch.load(weights_only=True)`` allows: tensors, numbers, text, lists, dicts. ``manifest``
    is JSON, for readers without torch.

    Of a state that is divided among ranks, each has a snapshot with its rows of the divided tensors: those of the
    model, and in ``rows`` those that ``trainer`` has marks for (:mod:`.pieces`). The first rank's has all the rest.
    """

    step: int
    model: dict[str, Any]
    trainer: dict[str, Any]
    manifest: dict[str, Any]
    rows: dict[str, Tensor] = field(default_factory=dict)


def read_snapshot(folder: Path, manifest: Manifest, *, in_pieces: bool = False) -> Snapshot:
    """What lies in ``folder``; with ``in_pieces`` the tensors of shards are :class:`.pieces.Pieces`.

    Raises:
        CheckpointError: it cannot be read.
    """
    from lockstep.checkpoint.content import read_model, read_trainer
    from lockstep.checkpoint.pieces import open_pieces, put_back

    trainer, extra, shards = read_trainer(folder / TRAINER), dict(manifest.extra), range(manifest.shards)
    if not shards:
        return Snapshot(manifest.step, read_model(folder / MODEL, dict(manifest.aliases)), trainer, extra)

    def read(pieces: dict[str, Pieces]) -> dict[str, Any]:
        return dict(pieces) if in_pieces else {name: tensor.whole() for name, tensor in pieces.items()}

    model = open_pieces([folder / model_shard(number, len(shards)) for number in shards], manifest.aliases)
    rows = open_pieces([folder / trainer_shard(number, len(shards)) for number in shards], {})
    return Snapshot(manifest.step, read(model), put_back(trainer, read(rows)), extra)
