"""Checkpoints on disk: each is there whole, with hashes that prove it, or not there.

A checkpoint is built in a temporary folder, its manifest last, all of it made durable, and renamed.
Whatever ends the process at whatever moment, the checkpoints before are untouched. Names::

    step-00000123/            a checkpoint
    step-00000123.replaced/   its predecessor, for the moment between two renames
    step-00000123.broken/     a damaged one that a resume has set aside
    last, best                relative links (text files where links cannot be made)
    .*.tmp-*                  being made, or being removed; never read

In a checkpoint lie ``manifest.json``, ``trainer.pt`` and ``model.safetensors``; or, where each rank has written its
part, ``model-00001-of-00004.safetensors``, ``trainer-00001-of-00004.safetensors`` and so on. Frozen weights of a
megabyte and more are in ``frozen.safetensors``: later checkpoints with the same ones have a hard link to that file.
"""

from __future__ import annotations

import contextlib
import shutil
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lockstep.checkpoint.manifest import (
    FROZEN,
    MANIFEST,
    MODEL,
    TRAINER,
    Digest,
    Manifest,
    folder_name,
    read_manifest,
    refused,
    step_in,
    verify_files,
)
from lockstep.errors import CheckpointError, NewerFormatError, RunFolderError, UnreadableError
from lockstep.rundir.files import (
    fsync_folder,
    is_folder,
    names_in,
    read_bytes,
    remove,
    remove_leftovers,
    storing,
    temporary_name,
    write_json,
    write_text,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.content import HashingFile

__all__ = ["CheckpointStore", "Pointer", "Snapshot"]

Pointer = Literal["last", "best"]
Result = TypeVar("Result")
#: Suffix of a damaged checkpoint that a resume has set aside.
BROKEN = ".broken"
#: Behind the name of a checkpoint that gives way to another one of its step.
REPLACED = ".replaced"
#: Fewer bytes of frozen weights are saved with the others.
FROZEN_BYTES = 1 << 20
#: A reader begins again when the checkpoint is replaced under it, but not for ever.
_READ_TRIES = 10


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after ``step`` optimizer steps.

    ``model`` has CPU tensors by name; tensors that are the same memory stay so. ``trainer``, and what ``model`` has
    from ``get_extra_state()``, are of what ``torch.load(weights_only=True)`` allows. ``manifest`` is JSON, for readers
    without torch. ``frozen`` names tensors of the model that training does not change.

    Of a state that is divided among ranks, each has a snapshot with its rows of the divided tensors: those of the
    model, and in ``rows`` those that ``trainer`` has marks for (:class:`.Pieces`). The first rank's has all the rest.
    """

    step: int
    model: dict[str, Any]
    trainer: dict[str, Any]
    manifest: dict[str, Any]
    rows: dict[str, Tensor] = field(default_factory=dict)
    frozen: Collection[str] = ()


class CheckpointStore:
    """The checkpoints of one run, in ``folder``. One process writes; any number may read meanwhile."""

    #: Whether :meth:`save` is for all ranks, each with its part of the state.
    takes_parts = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # Reading. Errors are CheckpointError: missing or broken, with the file, and how.

    def steps(self) -> list[int]:
        """Return steps of which there is a checkpoint, whole or broken, ascending. Raises :class:`RunFolderError`."""
        steps = {step_in(name.removesuffix(REPLACED)) for name in names_in(self.folder)}
        return sorted(step for step in steps if step is not None)

    def listed(self) -> list[dict[str, Any]]:
        """List the checkpoints, ascending, without opening them: step, folder, whether ``last``, whether ``best``."""
        marks = {mark: self.step_of(mark) for mark in ("last", "best")}
        return [
            {"step": step, "path": str(self.path_of(step)), **{mark: step == at for mark, at in marks.items()}}
            for step in self.steps()
        ]

    def path_of(self, step: int) -> Path:
        """Return the folder of the checkpoint of ``step``, which may be missing."""
        return self.folder / folder_name(step)

    def step_of(self, pointer: str) -> int | None:
        """Return the step that ``last`` or ``best`` means; ``None`` for other words, or without such a checkpoint.

        A copy of the folder that followed links has the whole checkpoint in place of the link.
        """
        if pointer not in ("last", "best"):
            return None
        link = self.folder / pointer
        try:
            if link.is_symlink():
                step = step_in(str(link.readlink()))
            elif is_folder(link):
                step = read_manifest(link).step
            else:
                step = step_in(read_bytes(link, max_bytes=4096).decode("ascii").strip())
        except (OSError, RunFolderError, CheckpointError, UnicodeDecodeError):
            return None
        return step if step in self.steps() else None

    def manifest(self, step: int) -> dict[str, Any]:
        """Return the run's keys in the manifest of a checkpoint (:attr:`Snapshot.manifest`); reads no other file."""
        return dict(self._read(step, read_manifest).extra)

    def verify(self, step: int) -> Manifest:
        """Compare a checkpoint with its hashes; returns its manifest. Needs no torch."""
        return self._read(step, _verified)

    def load(self, step: int) -> Snapshot:
        """Read the checkpoint of ``step`` after a comparison with its hashes. Runs no code of the files."""
        return self._read(step, lambda folder: _snapshot(folder, _verified(folder)))

    def open(self, step: int) -> Snapshot:
        """Open as :meth:`load` does, but shards' tensors are :class:`.Pieces`, and hashes are not compared.

        For ranks of which one has verified the checkpoint, while no process writes.
        """
        return self._read(step, lambda folder: _snapshot(folder, read_manifest(folder), in_pieces=True))

    def newest_verified(self, report: Callable[[str], None]) -> int | None:
        """Find the latest valid checkpoint; ``report`` is called for each damaged one after it.

        Raises:
            NewerFormatError: the newest is not for this version of Lockstep; falling back would throw work away.
            UnreadableError: one cannot be read now, and may be whole.
        """
        reported: set[int] = set()
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
                    if step not in reported:
                        report(f"the checkpoint of step {step} is broken and passed over: {error.what} ({error.why})")
                    reported.add(step)
            else:
                return None

    def _read(self, step: int, use: Callable[[Path], Result]) -> Result:
        """Call ``use`` with a checkpoint's folder, again if the folder is replaced meanwhile."""
        for _ in range(_READ_TRIES):
            folder, before = self._find(step)
            try:
                result = use(folder)
            except CheckpointError:
                if _identity(folder) == before:
                    raise
            else:
                if _identity(folder) == before:
                    return result
        raise UnreadableError(
            f"the checkpoint of step {step} keeps changing",
            why="its run is saving it again and again",
            fix="try again later",
        )

    def _find(self, step: int) -> tuple[Path, tuple[int, ...]]:
        target = self.path_of(step)
        for _ in range(_READ_TRIES):
            for candidate in (target, target.with_name(target.name + REPLACED)):
                if identity := _identity(candidate):
                    return candidate, identity
            if step not in self.steps():  # else it was renamed between the looks
                break
        newest = ", ".join(str(other) for other in self.steps()[-5:])
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {self.folder}",
            why=f"the newest are of the steps {newest}" if newest else "the folder holds none",
            fix="choose one of those, or start a new run" if newest else "start a new run",
        )

    # Saving.

    def save(self, snapshot: Snapshot, best: bool = False) -> Path:
        """Write a checkpoint and let ``last`` (and ``best``) point to it; returns its folder.

        One that is there already, whole and with the same content, is left as it is; otherwise it is
        replaced, with one of the two being there at any moment.

        Raises:
            StorageError: it could not be written; the older ones are as before, nothing is left behind.
            CheckpointError: the state holds something that cannot be saved.
        """
        target = self.path_of(snapshot.step)
        with storing(target):
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

    def _write_weights(
        self, folder: Path, snapshot: Snapshot, model: str, frozen: str
    ) -> tuple[dict[str, Digest], dict[str, str]]:
        """Write the snapshot's weights to files of these names; returns the digests, and the tied tensors."""
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
        if not _holds(target, manifest):
            self._put(folder, target)
        for pointer in ("last", "best") if best else ("last",):
            self._point(pointer, snapshot.step)

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

    def _point(self, pointer: str, step: int) -> None:
        link = self.folder / pointer
        temporary = self.folder / temporary_name(pointer)
        try:
            temporary.symlink_to(folder_name(step), target_is_directory=True)
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

    # Removing and repairing. Errors are StorageError.

    def retain(self, keep: Collection[int]) -> None:
        """Remove all checkpoints but those of the steps in ``keep`` and those that ``last`` and ``best`` mean.

        A checkpoint that was set aside is removed once there is one of its step or a later one.
        """
        steps = self.steps()
        unwanted = sorted(set(steps) - {*keep, self.step_of("last"), self.step_of("best")})
        names = [name for step in unwanted for name in (folder_name(step) + REPLACED, folder_name(step))]
        for name in names_in(self.folder):
            step = step_in(name.removesuffix(BROKEN))
            if name.endswith(BROKEN) and step is not None and step <= max(steps, default=-1):
                names.append(name)
        for name in names:
            with storing(self.folder / name):
                self._remove(self.folder / name)

    def aside_of(self, step: int) -> Path:
        return self.folder / (folder_name(step) + BROKEN)

    def set_aside_after(self, step: int | None) -> list[int]:
        """Rename the checkpoints of later steps than ``step``, or all for ``None``, and return their steps.

        For a run that resumes from ``step`` because they are damaged: they would count as the newest. Who can still
        use a part of them finds it until :meth:`retain` removes it. Call :meth:`clean_temporary` before.
        """
        later = [other for other in self.steps() if step is None or other > step]
        for other in later:
            target = self.path_of(other)
            aside = self.aside_of(other)
            with storing(target):
                self._remove(aside)
                target.rename(aside)
                fsync_folder(self.folder)
        return later

    def clean_temporary(self) -> None:
        """Repair leftovers of a killed writer; call it before an attempt, when no process writes."""
        with storing(self.folder):
            remove_leftovers(self.folder)
            for name in names_in(self.folder):
                step = step_in(name.removesuffix(REPLACED))
                if name.endswith(REPLACED) and step is not None:
                    if is_folder(self.path_of(step)):
                        self._remove(self.folder / name)
                    else:
                        (self.folder / name).rename(self.path_of(step))

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint's folder, in one moment as far as readers can see."""
        going = self.folder / temporary_name(folder.name)
        try:
            folder.rename(going)
        except FileNotFoundError:
            return
        self._stage("removing")
        # A file that is open elsewhere may linger on a network share; the next attempt cleans up.
        with contextlib.suppress(OSError):
            remove(going)  # not every name is a folder: rmtree would wait for the writer of a pipe

    # Seams for tests: where a process may die, and how a file is opened.

    def _stage(self, name: str) -> None:
        pass

    def _open(self, path: Path) -> HashingFile:
        from lockstep.checkpoint.content import HashingFile

        return HashingFile(path)


def _snapshot(folder: Path, manifest: Manifest, *, in_pieces: bool = False) -> Snapshot:
    from lockstep.checkpoint.content import read_content

    return Snapshot(manifest.step, *read_content(folder, manifest, in_pieces), dict(manifest.extra))


def _verified(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    if step_in(folder.name.removesuffix(REPLACED)) != manifest.step:
        raise CheckpointError(
            f"{folder} is damaged", why=f"its manifest is that of step {manifest.step}", fix="rename the folder back"
        )
    verify_files(folder, manifest)
    return manifest


def _holds(target: Path, manifest: Manifest) -> bool:
    try:
        if read_manifest(target).as_json() != manifest.as_json():
            return False
        verify_files(target, manifest)
    except CheckpointError:
        return False
    return True


def _identity(folder: Path) -> tuple[int, ...]:
    """Identify a folder, to detect its replacement by another of its name; empty: there is none.

    Raises:
        UnreadableError: it cannot be read now.
    """
    try:
        status = folder.stat()
    except OSError as error:
        refusal = refused(folder, error)
        if isinstance(refusal, UnreadableError):
            raise refusal from None
        return ()
    return (status.st_dev, status.st_ino, status.st_mtime_ns) if stat.S_ISDIR(status.st_mode) else ()
