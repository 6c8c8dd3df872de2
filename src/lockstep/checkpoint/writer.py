"""Saving in the background: one thread, one save at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from lockstep.checkpoint.host import HostBuffers
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.errors import LockstepError, StorageError
from lockstep.telemetry.progress_board import pulse

OnSaved = Callable[[int, Path, bool], None]


class BackgroundWriter:
    """Saves snapshots in a thread. Training waits for the copy to host memory, and for a save still in flight.

    Everything that callers see happens in the caller's thread, in one of these methods: ``on_saved``
    (step, folder, best) is called there, and a failed save is raised there, once.

    Each save has its own thread, which is not a daemon: a normal end of the process waits
    for it, and has nothing else to wait for.
    """

    def __init__(self, store: CheckpointStore, on_saved: OnSaved | None = None) -> None:
        self.store = store
        self._on_saved = on_saved
        self._buffers = HostBuffers()
        self._save: _Save | None = None

    def to_host(self, state: Any) -> Any:
        """A copy of ``state`` in host memory that is used again: give it to :meth:`submit` before the next call.

        Waits for a save in flight, whose memory it is. See :meth:`HostBuffers.copy`.
        """
        self.wait()
        return self._buffers.copy(state)

    def submit(self, snapshot: Snapshot, best: bool = False, keep: Collection[int] | None = None) -> None:
        """Begin to save ``snapshot``, which must not change until that is done.

        When it is saved, checkpoints other than it and those of ``keep`` are removed; ``None`` keeps all.

        Raises:
            StorageError: the save before failed. This one has not begun.
        """
        self.wait()
        self._save = save = _Save(self.store, snapshot, best, keep)
        save.start()
        pulse.writes_in(save.native_id or 0)

    def poll(self) -> None:
        """Report a save that is done, without waiting. Raises :class:`StorageError` when it failed."""
        if self._save is not None and not self._save.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if any. Raises :class:`StorageError` when it failed."""
        save = self._save
        if save is None:
            return
        save.join()
        pulse.writes_in(0)
        self._save = None
        if save.path is not None and self._on_saved is not None:
            self._on_saved(save.snapshot.step, save.path, save.best)
        if save.error is not None:
            raise surfaced(save.error, save.snapshot.step) from save.error

    def close(self) -> None:
        """Wait for the save in flight and release the host memory. Raises :class:`StorageError`."""
        try:
            self.wait()
        finally:
            self._buffers = HostBuffers()


class _Save(threading.Thread):
    def __init__(self, store: CheckpointStore, snapshot: Snapshot, best: bool, keep: Collection[int] | None) -> None:
        super().__init__(name=f"lockstep-save-{snapshot.step}", daemon=False)
        self._store = store
        self._keep = keep
        self.snapshot = snapshot
        self.best = best
        self.path: Path | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.path = self._store.save(self.snapshot, self.best)
            if self._keep is not None:
                self._store.retain({*self._keep, self.snapshot.step})
        except BaseException as error:  # raised again in the caller's thread
            self.error = error


def surfaced(error: BaseException, step: int) -> LockstepError:
    """The error that users see when the save of ``step`` failed."""
    if isinstance(error, LockstepError):
        return error
    return StorageError(
        f"the checkpoint of step {step} could not be saved",
        why=f"{type(error).__name__}: {error}",
        fix="the older checkpoints are unchanged; `lockstep resume` continues from the latest",
    )
