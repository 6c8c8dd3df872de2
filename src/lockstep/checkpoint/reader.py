"""Finding, proving and reading checkpoints, while their writer may replace or remove them."""

from __future__ import annotations

import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.checkpoint.manifest import (
    MODEL,
    TRAINER,
    Manifest,
    folder_name,
    is_frozen,
    read_manifest,
    refused,
    shard,
    step_in,
    verify_files,
)
from lockstep.errors import CheckpointError, NewerFormatError, RunFolderError, UnreadableError
from lockstep.telemetry.files import is_folder, names_in, read_bytes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after ``step`` optimizer steps.

    ``model`` holds CPU tensors by name; tensors that are the same memory stay so. ``trainer``, and what ``model`` has
    from ``get_extra_state()``, holds what ``torch.load(weights_only=True)`` allows: tensors, numbers, text, lists,
    dicts. ``manifest`` is JSON, for readers without torch.

    Of a state that is divided among ranks, each has a snapshot with its rows of the divided tensors: those of the
    model, and in ``rows`` those that ``trainer`` has marks for (:class:`.Pieces`). The first rank's has all the rest.

    ``frozen`` names tensors of the model that training does not change: checkpoints share the file that has them.
    """

    step: int
    model: dict[str, Any]
    trainer: dict[str, Any]
    manifest: dict[str, Any]
    rows: dict[str, Tensor] = field(default_factory=dict)
    frozen: Collection[str] = ()


def read_snapshot(folder: Path, manifest: Manifest, *, in_pieces: bool = False) -> Snapshot:
    """The checkpoint in ``folder``; with ``in_pieces`` the tensors of shards are :class:`.Pieces`.

    Raises:
        CheckpointError: it cannot be read.
    """
    from lockstep.checkpoint.content import EXTRA, open_pieces, put_back, read_model, read_trainer

    trainer, extra, shards = read_trainer(folder / TRAINER), dict(manifest.extra), range(manifest.shards)
    others = trainer.pop(EXTRA, {})
    frozen = sorted(folder / name for name in manifest.files if is_frozen(name))
    if not shards:
        weights = read_model([folder / MODEL, *frozen], dict(manifest.aliases))
        return Snapshot(manifest.step, weights | others, trainer, extra)

    def read(pieces: dict[str, Any]) -> dict[str, Any]:
        return dict(pieces) if in_pieces else {name: tensor.whole() for name, tensor in pieces.items()}

    parts = [folder / shard("model", number, len(shards)) for number in shards]
    model = open_pieces([*parts, *frozen], manifest.aliases)
    rows = open_pieces([folder / shard("trainer", number, len(shards)) for number in shards], {})
    return Snapshot(manifest.step, read(model) | others, put_back(trainer, read(rows)), extra)


Result = TypeVar("Result")

#: Suffix of a damaged checkpoint that a resume has set aside.
BROKEN = ".broken"
#: Behind the name of a checkpoint that gives way to another one of its step.
REPLACED = ".replaced"
#: A reader begins again when the checkpoint is replaced under it, but not for ever.
_READ_TRIES = 10


class CheckpointReader:
    """The checkpoints of one run, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, whole or broken, ascending.

        Raises:
            RunFolderError: the folder cannot be read.
        """
        found = {step_in(name.removesuffix(REPLACED)) for name in names_in(self.folder)}
        return sorted(step for step in found if step is not None)

    def listed(self) -> list[dict[str, Any]]:
        """The checkpoints, ascending: step, folder, and whether it is the ``last`` and the ``best``; none is opened."""
        marks = {mark: self.step_of(mark) for mark in ("last", "best")}
        return [
            {"step": step, "path": str(self.path_of(step)), **{mark: step == at for mark, at in marks.items()}}
            for step in self.steps()
        ]

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies, or would lie."""
        return self.folder / folder_name(step)

    def _find(self, step: int) -> Path:
        target = self.path_of(step)
        for _ in range(_READ_TRIES):
            for candidate in (target, target.with_name(target.name + REPLACED)):
                if _is_there(candidate):
                    return candidate
            if step not in self.steps():  # else it was renamed between the looks
                break
        there = ", ".join(str(other) for other in self.steps()[-5:])
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {self.folder}",
            why=f"the newest are of the steps {there}" if there else "the folder holds none",
            fix="choose one of those, or start a new run" if there else "start a new run",
        )

    def step_of(self, pointer: str) -> int | None:
        """The step that ``last`` or ``best`` means; ``None`` for other words, and when there is no such checkpoint.

        A copy of the folder that followed links has the whole checkpoint in place of the link.
        """
        if pointer not in ("last", "best"):
            return None
        link = self.folder / pointer
        try:
            if link.is_symlink():
                name = str(link.readlink())
            elif is_folder(link):
                name = folder_name(read_manifest(link).step)
            else:
                name = read_bytes(link, max_bytes=4096).decode("ascii").strip()
        except (OSError, RunFolderError, CheckpointError, UnicodeDecodeError):
            return None
        step = step_in(name)
        return step if step in self.steps() else None

    def manifest(self, step: int) -> dict[str, Any]:
        """What the run wrote into the manifest of a checkpoint (:attr:`Snapshot.manifest`). Needs no torch.

        Raises:
            CheckpointError: there is no such checkpoint, or its manifest is damaged. The rest is not looked at.
        """
        return dict(self._read(step, read_manifest).extra)

    def verify(self, step: int) -> Manifest:
        """Compare a checkpoint with its hashes; returns its manifest. Needs no torch.

        Raises:
            CheckpointError: it is missing or broken; says which file, and how.
        """
        return self._read(step, self._verified)

    def load(self, step: int) -> Snapshot:
        """The checkpoint of ``step``, whole, compared with its hashes first. Runs no code of the files'.

        Raises:
            CheckpointError: it is missing or broken; says which file, and how.
        """
        return self._read(step, lambda folder: read_snapshot(folder, self._verified(folder)))

    def open(self, step: int) -> Snapshot:
        """As :meth:`load`, but the tensors of shards are :class:`.Pieces`, and hashes are not compared.

        For ranks of which one has verified the checkpoint, while no process writes.

        Raises:
            CheckpointError: it is missing or broken.
        """
        return self._read(step, lambda folder: read_snapshot(folder, read_manifest(folder), in_pieces=True))

    def newest_verified(self, report: Callable[[str], None]) -> int | None:
        """The latest step whose checkpoint is valid; ``report`` is called for each damaged one after it.

        ``None`` when there is none.

        Raises:
            NewerFormatError: the newest is not for this version of Lockstep; falling back would throw work away.
            UnreadableError: one cannot be read now, and may be whole.
        """
        told: set[int] = set()
        while True:
            for step in reversed(self.steps()):
                try:
                    self.verify(step)
                    return step
                except CheckpointError as error:
                    if step not in self.steps():
                        break  # retired meanwhile, as old ones are: so there are newer ones
                    if isinstance(error, (NewerFormatError, UnreadableError)):
                        raise
                    if step not in told:
                        report(f"the checkpoint of step {step} is broken and passed over: {error.what} ({error.why})")
                    told.add(step)
            else:
                return None

    def _verified(self, folder: Path) -> Manifest:
        manifest = read_manifest(folder)
        if step_in(folder.name.removesuffix(REPLACED)) != manifest.step:
            raise CheckpointError(
                f"{folder} is damaged",
                why=f"its manifest is that of step {manifest.step}",
                fix="rename the folder back",
            )
        verify_files(folder, manifest)
        return manifest

    def _read(self, step: int, use: Callable[[Path], Result]) -> Result:
        """``use`` of a checkpoint's folder, again from the start if the folder is replaced meanwhile."""
        for _ in range(_READ_TRIES):
            folder = self._find(step)
            before = _identity(folder)
            try:
                result = use(folder)
            except CheckpointError:
                if before is not None and _identity(folder) == before:
                    raise
            else:
                if _identity(folder) == before:
                    return result
        raise UnreadableError(
            f"the checkpoint of step {step} keeps changing",
            why="its run is saving it again and again",
            fix="try again later",
        )


def _is_there(folder: Path) -> bool:
    """Whether there is such a folder. Raises :class:`UnreadableError` when it cannot be read."""
    try:
        return stat.S_ISDIR(folder.stat().st_mode)
    except OSError as error:
        found = refused(folder, error)
        if isinstance(found, UnreadableError):
            raise found from None
        return False


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """Distinguishes a folder from the next of its name; the number alone may be used again."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns
