"""Checkpoints of a state that is divided among ranks: each writes its part, and the first one puts them together.

A save runs in a thread of every rank while training continues, so the ranks communicate through a separate process
group: messages of two threads in one group would be mixed up. Nothing is taken for a checkpoint before all
parts are durable: only then the first rank writes the manifest, with the hashes of all ranks, and renames
the folder (:mod:`.store`).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from lockstep.checkpoint.manifest import Digest, shard
from lockstep.checkpoint.reader import Snapshot
from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.writer import surfaced
from lockstep.errors import CollectiveError, LockstepError
from lockstep.telemetry.files import fsync_folder, storage_error

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of a run, over a process group of these calls' own. Every rank makes the same calls."""

    rank: int

    def broadcast(self, value: T) -> T:
        """The first rank's value, on every rank."""
        ...

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, by rank, on the first one."""
        ...


#: What a rank has written: its files, and the names of tensors that are the same as another.
_Part = tuple[dict[str, Digest], dict[str, str]]


class ShardedStore(CheckpointStore):
    """A store that the ranks of a run write together; all of them see ``folder``.

    Args:
        shards: in how many parts the state is divided. The first N ranks write; any others, which hold the
            same parts again, only take part in the calls.
    """

    takes_parts = True

    def __init__(self, folder: Path, ranks: Ranks, shards: int) -> None:
        super().__init__(folder)
        self._ranks = ranks
        self._shards = shards
        self._is_main = ranks.rank == 0

    def save(self, snapshot: Snapshot, best: bool = False) -> Path:
        """Write a checkpoint of the snapshots that the ranks have of one step. Collective; otherwise as the base's.

        Raises:
            StorageError, CheckpointError: on every rank, when one could not write its part.
            CollectiveError: a rank is gone, or does not come.
        """
        step = snapshot.step
        name: str | LockstepError = ""
        try:
            with _together(step):
                name = self._ranks.broadcast(
                    self._tried(step, lambda: self._begin(step).name) if self._is_main else name
                )
            building = self.folder / _ok(name)
            part = self._tried(step, lambda: self._write_part(building, snapshot))
            with _together(step):
                parts = self._ranks.gather(part)
            done = None if parts is None else self._tried(step, lambda: self._finish(building, snapshot, parts, best))
            with _together(step):
                done = self._ranks.broadcast(done)
            assert done is not None, "the first rank has the parts"
            _ok(done)
        finally:
            if self._is_main and isinstance(name, str) and name:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.path_of(step)

    def retain(self, keep: Collection[int]) -> None:
        """As the base's, by the first rank."""
        if self._is_main:
            super().retain(keep)

    def _write_part(self, folder: Path, snapshot: Snapshot) -> _Part:
        number, shards = self._ranks.rank, self._shards
        if number >= shards:
            return {}, {}
        model, frozen, trainer = (shard(kind, number, shards) for kind in ("model", "frozen", "trainer"))
        files, aliases = self._write_weights(folder, snapshot, model, frozen)
        self._stage("model written")
        _, files[trainer] = self._write_tensors(folder / trainer, snapshot.rows)
        fsync_folder(folder)
        self._stage("part written")
        return files, aliases

    def _finish(self, folder: Path, snapshot: Snapshot, parts: list[_Part | LockstepError], best: bool) -> str:
        written = [_ok(part) for part in parts]
        files = {name: digest for of_rank, _ in written for name, digest in of_rank.items()}
        # A rank without rows of two tied weights does not see that they are one; the first rank has some of each.
        self._publish(folder, snapshot, files, written[0][1], best)
        return folder.name

    def _tried(self, step: int, work: Callable[[], T]) -> T | LockstepError:
        """The result of ``work``, or why there is none: for all ranks to hear."""
        try:
            return work()
        except OSError as error:
            return storage_error(error, self.path_of(step))
        except Exception as error:
            return surfaced(error, step)


def _ok(found: T | LockstepError) -> T:
    if isinstance(found, LockstepError):
        raise found
    return found


@contextlib.contextmanager
def _together(step: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo's: a lost connection, or a time-out
        raise CollectiveError(
            f"the ranks could not agree that the checkpoint of step {step} is written",
            why=str(error).splitlines()[0],
            fix="the older checkpoints are unchanged; `lockstep resume` continues from the latest",
        ) from error
