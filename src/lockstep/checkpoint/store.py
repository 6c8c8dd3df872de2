"""Checkpoints on disk: each is there whole, with hashes that prove it, or not there.

A checkpoint is built in a temporary folder, its manifest last, all of it made durable, and renamed.
Whatever ends the process at whatever moment, the checkpoints before are untouched. Names::

    step-00000123/            a checkpoint
    step-00000123.replaced/   its predecessor, for the moment between two renames
    step-00000123.broken/     a damaged one that a resume has set aside
    last, best                relative links (text files where links cannot be made)
    .*.tmp-*                  being made, or being removed; never read

In a checkpoint lie ``manifest.json``, ``trainer.pt`` and ``model.safetensors``; or, where each rank has written its
part (:mod:`.sharded`), ``model-00001-of-00004.safetensors``, ``trainer-00001-of-00004.safetensors`` and so on. Frozen
weights of a megabyte and more are in ``frozen.safetensors``: they are written once, and later checkpoints whose frozen
weights have the same hash have a hard link to that file.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.checkpoint.manifest import (
    FROZEN,
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
from lockstep.checkpoint.reader import BROKEN, REPLACED, CheckpointReader, Snapshot
from lockstep.errors import CheckpointError
from lockstep.telemetry.files import (
    fsync_folder,
    is_folder,
    names_in,
    remove_leftovers,
    storage_error,
    temporary_name,
    write_json,
    write_text,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.content import HashingFile

__all__ = ["CheckpointStore", "Pointer", "Snapshot"]

Pointer = Literal["last", "best"]
#: Fewer bytes of frozen weights are saved with the others.
FROZEN_BYTES = 1 << 20


@contextlib.contextmanager
def _stored(place: Path) -> Iterator[None]:
    """What the system refuses in the block is a :class:`StorageError` that names ``place``."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, place) from error


class CheckpointStore(CheckpointReader):
    """The checkpoints of one run, in ``folder``. One process writes; any number may read meanwhile."""

    #: Whether :meth:`save` is for all ranks, each with its part of the state.
    takes_parts = False

    def save(self, snapshot: Snapshot, best: bool = False) -> Path:
        """Write a checkpoint and let ``last`` (and ``best``) point to it; returns its folder.

        One that is there already, whole and with the same content, is left as it is; otherwise it is
        replaced, with one of the two being there at any moment.

        Raises:
            StorageError: it could not be written; the older ones are as before, nothing is left behind.
            CheckpointError: the state holds something that cannot be saved.
        """
        target = self.path_of(snapshot.step)
        with _stored(target):
            temporary = self._begin(snapshot.step)
            try:
                files, aliases = self._write_weights(temporary, snapshot, MODEL, FROZEN)
                self._stage("model written")
                self._publish(temporary, snapshot, files, aliases, best)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return target

    def _begin(self, step: int) -> Path:
        """Make the folder to write to. Its name is a new one, so that no network file system knows it as missing."""
        temporary = self.folder / temporary_name(folder_name(step))
        self.folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone stays gone
        temporary.mkdir()
        self._stage("begun")
        return temporary

    def adopt(self, folder: Path, pointers: Collection[Pointer]) -> Path:
        """Take over a copy of another store's checkpoint from ``folder``, inside this store's; returns where it is now.

        Raises:
            CheckpointError: it is not whole; nothing has changed.
            StorageError: it could not be moved.
        """
        manifest = read_manifest(folder)
        verify_files(folder, manifest)
        target = self.path_of(manifest.step)
        with _stored(target):
            fsync_folder(folder)
            self._put(folder, target)
            for pointer in pointers:
                self._point(pointer, manifest.step)
        return target

    def _write_weights(
        self, folder: Path, snapshot: Snapshot, model: str, frozen: str
    ) -> tuple[dict[str, Digest], dict[str, str]]:
        """Write the snapshot's weights to files of these names; returns what was written, and the tied tensors."""
        from lockstep.checkpoint.content import by_file

        constant = {name: snapshot.model[name] for name in snapshot.frozen if name in snapshot.model}
        if sum(tensor.nbytes for tensor in constant.values()) < FROZEN_BYTES:
            constant = {}
        changing = {name: tensor for name, tensor in by_file(snapshot.model)[0].items() if name not in constant}
        aliases, digest = self._write_tensors(folder / model, changing)
        files = {model: digest}
        if constant:
            tied, files[frozen] = self._written_once(folder / frozen, constant)
            aliases |= tied
        return files, aliases

    def _written_once(self, path: Path, tensors: dict[str, Tensor]) -> tuple[dict[str, str], Digest]:
        """Make ``path`` a link to the file of another checkpoint with the same content, else write it."""
        from lockstep.checkpoint.content import Hashing, write_model

        earlier: dict[Digest | None, Path] = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                folder = self.path_of(step)
                earlier[read_manifest(folder).files.get(path.name)] = folder / path.name
        if earlier.keys() - {None}:
            hashed = Hashing()
            aliases = write_model(hashed, tensors)
            with contextlib.suppress(KeyError, OSError, NotImplementedError):
                path.hardlink_to(earlier[hashed.digest])
                return aliases, hashed.digest
        return self._write_tensors(path, tensors)

    def _write_tensors(self, path: Path, tensors: dict[str, Tensor]) -> tuple[dict[str, str], Digest]:
        from lockstep.checkpoint.content import write_model

        with contextlib.closing(self._open(path)) as file:
            return write_model(file, tensors), file.sync()

    def _publish(
        self, folder: Path, snapshot: Snapshot, files: dict[str, Digest], aliases: dict[str, str], best: bool
    ) -> None:
        """Complete the checkpoint in ``folder``, where ``files`` are, and put it in its place."""
        from lockstep.checkpoint.content import by_file, check_trainer, write_trainer

        state = {**snapshot.trainer, **by_file(snapshot.model)[1]}
        with contextlib.closing(self._open(folder / TRAINER)) as file:
            write_trainer(file, state)
            trainer = file.sync()
        self._stage("trainer written")
        check_trainer(folder / TRAINER, state)
        manifest = Manifest(snapshot.step, {**files, TRAINER: trainer}, aliases, snapshot.manifest)
        write_json(folder / MANIFEST, manifest.as_json())
        self._stage("manifest written")
        fsync_folder(folder)
        target = self.path_of(snapshot.step)
        if not self._holds(target, manifest):
            self._put(folder, target)
        self._point("last", snapshot.step)
        if best:
            self._point("best", snapshot.step)

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
        replaced = target.with_name(target.name + REPLACED)
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
            self._free(link)
            write_text(link, folder_name(step) + "\n")  # raises if the disk, not the link, is the trouble
        else:
            self._stage(f"{pointer} linked")
            try:
                self._free(link)
                temporary.replace(link)
            finally:
                temporary.unlink(missing_ok=True)
            fsync_folder(self.folder)
        self._stage(f"{pointer} set")

    def _free(self, link: Path) -> None:
        """Remove a pointer that is a folder, as a copy that followed links has made it: no link can replace that."""
        if is_folder(link) and not link.is_symlink():
            self._remove(link)

    def retain(self, keep: Collection[int]) -> None:
        """Remove all checkpoints but those of the steps in ``keep`` and those that ``last`` and ``best`` mean.

        What was set aside goes as soon as there is a checkpoint of its step or a later one: training has passed it.

        Raises:
            StorageError: one could not be removed.
        """
        there = self.steps()
        for step in sorted(set(there) - {*keep, self.step_of("last"), self.step_of("best")}):
            self._remove_all((folder_name(step) + REPLACED, folder_name(step)))
        aside = {name: step_in(name.removesuffix(BROKEN)) for name in names_in(self.folder) if name.endswith(BROKEN)}
        passed = max(there, default=-1)
        self._remove_all(name for name, step in aside.items() if step is not None and step <= passed)

    def aside_of(self, step: int) -> Path:
        """Where :meth:`set_aside_after` puts the checkpoint of ``step``."""
        return self.folder / (folder_name(step) + BROKEN)

    def set_aside_after(self, step: int | None) -> list[int]:
        """Rename the checkpoints of later steps than ``step``, or all for ``None``, and return their steps.

        For a run that resumes from ``step`` because they are damaged: they would count as the newest. Who can still
        use a part of them finds it until :meth:`retain` removes it. Call :meth:`clean_temporary` before.

        Raises:
            StorageError: one could not be renamed.
        """
        later = [other for other in self.steps() if step is None or other > step]
        for other in later:
            target, aside = self.path_of(other), self.aside_of(other)
            with _stored(target):
                self._remove(aside)
                target.rename(aside)
                fsync_folder(self.folder)
        return later

    def clean_temporary(self) -> None:
        """Repair what a killed writer left behind; call it before an attempt, when no process writes.

        Raises:
            StorageError: the folder cannot be written.
        """
        with _stored(self.folder):
            remove_leftovers(self.folder)
            for name in names_in(self.folder):
                step = step_in(name.removesuffix(REPLACED))
                if name.endswith(REPLACED) and step is not None:
                    if is_folder(self.path_of(step)):
                        self._remove(self.folder / name)
                    else:
                        (self.folder / name).rename(self.path_of(step))

    def _remove_all(self, names: Iterable[str]) -> None:
        for name in names:
            with _stored(self.folder / name):
                self._remove(self.folder / name)

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
