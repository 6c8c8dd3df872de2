"""Checkpoints on disk: each is there whole, with hashes that prove it, or not there.

A checkpoint is built in a temporary folder, its manifest last, all of it made durable, and renamed.
Whatever ends the process at whatever moment, the checkpoints before are untouched. Names::

    step-00000123/            a checkpoint
    step-00000123.replaced/   its predecessor, for the moment between two renames
    last, best                relative links (text files where links cannot be made)
    .*.tmp-*                  being made, or being removed; never read
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lockstep.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    TRAINER,
    Digest,
    Manifest,
    folder_name,
    read_manifest,
    step_in,
    verify_files,
)
from lockstep.errors import CheckpointError, NewerFormatError, RunFolderError
from lockstep.telemetry.files import (
    fsync_folder,
    is_folder,
    names_in,
    read_bytes,
    remove_leftovers,
    storage_error,
    temporary_name,
    write_json,
    write_text,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.content import HashingFile

Pointer = Literal["last", "best"]
Result = TypeVar("Result")

_REPLACED = ".replaced"
#: A reader begins again when the checkpoint is replaced under it, but not for ever.
_READ_TRIES = 10


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after ``step`` optimizer steps.

    ``model`` holds CPU tensors by name; tensors that are the same memory stay so. ``trainer`` holds
    what ``torch.load(weights_only=True)`` allows: tensors, numbers, text, lists, dicts. ``manifest``
    is JSON, for readers without torch.
    """

    step: int
    model: dict[str, Tensor]
    trainer: dict[str, Any]
    manifest: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run, in ``folder``. One process writes; any number may read meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # Writing.

    def save(self, snapshot: Snapshot, best: bool = False) -> Path:
        """Write a checkpoint and let ``last`` (and ``best``) point to it; returns its folder.

        One that is there already, whole and with the same content, is left as it is; otherwise it is
        replaced, with one of the two being there at any moment.

        Raises:
            StorageError: it could not be written; the older ones are as before, nothing is left behind.
            CheckpointError: the state holds something that cannot be saved.
        """
        temporary = self.folder / temporary_name(folder_name(snapshot.step))
        target = self.path_of(snapshot.step)
        try:
            self.folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone stays gone
            temporary.mkdir()
            manifest = self._write_content(temporary, snapshot)
            if not self._holds(target, manifest):
                self._put(temporary, target)
            self._point("last", snapshot.step)
            if best:
                self._point("best", snapshot.step)
        except OSError as error:
            raise storage_error(error, target) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target

    def adopt(self, folder: Path, pointers: Collection[Pointer]) -> Path:
        """Take over a copy of another store's checkpoint from ``folder``, inside this store's; returns where it is now.

        Raises:
            CheckpointError: it is not whole; nothing has changed.
            StorageError: it could not be moved.
        """
        manifest = read_manifest(folder)
        verify_files(folder, manifest)
        target = self.path_of(manifest.step)
        try:
            fsync_folder(folder)
            self._put(folder, target)
            for pointer in pointers:
                self._point(pointer, manifest.step)
        except OSError as error:
            raise storage_error(error, target) from error
        return target

    def _write_content(self, folder: Path, snapshot: Snapshot) -> Manifest:
        from lockstep.checkpoint.content import check_trainer, write_model, write_trainer

        self._stage("begun")
        with contextlib.closing(self._open(folder / MODEL)) as file:
            aliases = write_model(file, snapshot.model)
            files: dict[str, Digest] = {MODEL: file.sync()}
        self._stage("model written")
        with contextlib.closing(self._open(folder / TRAINER)) as file:
            write_trainer(file, snapshot.trainer)
            files[TRAINER] = file.sync()
        self._stage("trainer written")
        check_trainer(folder / TRAINER)
        manifest = Manifest(snapshot.step, files, aliases, snapshot.manifest)
        write_json(folder / MANIFEST, manifest.as_json())
        self._stage("manifest written")
        fsync_folder(folder)
        return manifest

    def _holds(self, target: Path, manifest: Manifest) -> bool:
        try:
            if read_manifest(target).as_json() != manifest.as_json():
                return False
            verify_files(target, manifest)
        except CheckpointError:
            return False
        return True

    def _put(self, temporary: Path, target: Path) -> None:
        """Rename ``temporary`` to ``target``; a predecessor stays readable until that is done."""
        replaced = target.with_name(target.name + _REPLACED)
        if is_folder(target):
            self._remove(replaced)
            target.rename(replaced)
            self._stage("predecessor set aside")
        try:
            temporary.rename(target)
        except OSError:
            with contextlib.suppress(OSError):
                replaced.rename(target)
            raise
        fsync_folder(self.folder)
        self._stage("renamed")
        self._remove(replaced)

    def _point(self, pointer: Pointer, step: int) -> None:
        link = self.folder / pointer
        temporary = self.folder / temporary_name(pointer)
        try:
            self._link(temporary, folder_name(step))
        except (OSError, NotImplementedError):
            write_text(link, folder_name(step) + "\n")  # raises if the disk, not the link, is the trouble
        else:
            self._stage(f"{pointer} linked")
            try:
                temporary.replace(link)
            finally:
                temporary.unlink(missing_ok=True)
            fsync_folder(self.folder)
        self._stage(f"{pointer} set")

    def retain(self, keep: Collection[int]) -> None:
        """Remove all checkpoints but those of the steps in ``keep`` and those that ``last`` and ``best`` mean.

        Raises:
            StorageError: one could not be removed.
        """
        self._remove_steps(set(self.steps()) - {*keep, self.step_of("last"), self.step_of("best")})

    def discard_after(self, step: int) -> list[int]:
        """Remove the checkpoints of later steps than ``step``, and return those steps.

        For a run that goes on from ``step`` because they are broken: they would count as the newest.

        Raises:
            StorageError: one could not be removed.
        """
        later = [other for other in self.steps() if other > step]
        self._remove_steps(later)
        return later

    def clean_temporary(self) -> None:
        """Put right what a killed writer left behind; call it before an attempt, when nobody writes.

        Raises:
            StorageError: the folder cannot be written.
        """
        try:
            remove_leftovers(self.folder)
            for name in names_in(self.folder):
                step = step_in(name.removesuffix(_REPLACED))
                if name.endswith(_REPLACED) and step is not None:
                    if is_folder(self.path_of(step)):
                        self._remove(self.folder / name)
                    else:
                        (self.folder / name).rename(self.path_of(step))
        except OSError as error:
            raise storage_error(error, self.folder) from error

    def _remove_steps(self, steps: Collection[int]) -> None:
        for step in sorted(steps):
            target = self.path_of(step)
            try:
                self._remove(target.with_name(target.name + _REPLACED))
                self._remove(target)
            except OSError as error:
                raise storage_error(error, target) from error

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint's folder, in one moment as far as readers can see."""
        going = self.folder / temporary_name(folder.name)
        try:
            folder.rename(going)
        except FileNotFoundError:
            return
        self._stage("removing")
        # A file that is open elsewhere may linger on a network share; the next attempt cleans up.
        shutil.rmtree(going, ignore_errors=True)

    # Seams for tests: where a process may die, how a file is opened, how a link is made.

    def _stage(self, name: str) -> None:
        pass

    def _open(self, path: Path) -> HashingFile:
        from lockstep.checkpoint.content import HashingFile

        return HashingFile(path)

    def _link(self, link: Path, target: str) -> None:
        link.symlink_to(target, target_is_directory=True)

    # Reading.

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, whole or broken, ascending.

        Raises:
            RunFolderError: the folder cannot be read.
        """
        found = {step_in(name.removesuffix(_REPLACED)) for name in names_in(self.folder)}
        return sorted(step for step in found if step is not None)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies, or would lie."""
        return self.folder / folder_name(step)

    def _find(self, step: int) -> Path:
        target = self.path_of(step)
        for _ in range(_READ_TRIES):
            for candidate in (target, target.with_name(target.name + _REPLACED)):
                if is_folder(candidate):
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
        """The step that ``last`` or ``best`` means; ``None`` for other words, and when there is no such checkpoint."""
        if pointer not in ("last", "best"):
            return None
        link = self.folder / pointer
        try:
            name = (
                str(link.readlink()) if link.is_symlink() else read_bytes(link, max_bytes=4096).decode("ascii").strip()
            )
        except (OSError, RunFolderError, UnicodeDecodeError):
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
        """The checkpoint of ``step``, compared with its hashes first. Runs no code of the files'.

        Raises:
            CheckpointError: it is missing or broken; says which file, and how.
        """
        from lockstep.checkpoint.content import read_model, read_trainer

        def load_from(folder: Path) -> Snapshot:
            manifest = self._verified(folder)
            model = read_model(folder / MODEL, dict(manifest.aliases))
            return Snapshot(manifest.step, model, read_trainer(folder / TRAINER), dict(manifest.extra))

        return self._read(step, load_from)

    def newest_verified(self, report: Callable[[str], None]) -> int | None:
        """The newest step whose checkpoint is whole; ``report`` hears of each broken one on the way.

        ``None`` when there is none.

        Raises:
            NewerFormatError: the newest is not for this version of Lockstep; falling back would throw work away.
        """
        told: set[int] = set()
        while True:
            for step in reversed(self.steps()):
                try:
                    self.verify(step)
                    return step
                except NewerFormatError:
                    raise
                except CheckpointError as error:
                    if step not in self.steps():
                        break  # retired meanwhile, as old ones are: so there are newer ones
                    if step not in told:
                        report(f"the checkpoint of step {step} is broken and passed over: {error.what} ({error.why})")
                    told.add(step)
            else:
                return None

    def _verified(self, folder: Path) -> Manifest:
        manifest = read_manifest(folder)
        if step_in(folder.name.removesuffix(_REPLACED)) != manifest.step:
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
        raise CheckpointError(
            f"the checkpoint of step {step} keeps changing",
            why="its run is saving it again and again",
            fix="try again later",
        )


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """Tells one folder from the next of its name; the number alone may be used again."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns
