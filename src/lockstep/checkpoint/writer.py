"""Saving beside training: a copy of the state in host memory, then one thread; and stores that ranks write together."""

from __future__ import annotations

import contextlib
import copy
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from lockstep.checkpoint.content import Place, is_dense, walked
from lockstep.checkpoint.manifest import Digest, shard
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.errors import CheckpointError, CollectiveError, LockstepError, StorageError
from lockstep.rundir.files import fsync_folder, storage_error

T = TypeVar("T")
#: Whether a tensor at a place of the state stays as it is until the copy is complete.
Steady = Callable[[Place, Tensor], bool]
OnSaved = Callable[[int, Path, bool], None]
_FIX = "the older checkpoints are unchanged; `lockstep resume` continues from the latest"


class HostBuffers:
    """Host memory that is used again for the next copy of the same state.

    Fresh memory has to be mapped page by page, and page-locked memory is slow to get. The copy of one call is
    overwritten by the next: save it, or copy it, before.
    """

    def __init__(self) -> None:
        self._buffers: dict[Place, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        #: Happens when the last copy is complete; ``None``: it is.
        self.copied: torch.cuda.Event | None = None

    def copy(self, state: Any, steady: Steady | None = None) -> Any:
        """Return ``state`` with every tensor replaced by a contiguous CPU tensor that nothing else writes to.

        Mappings become dicts, lists and tuples keep their kind, other values are deep-copied. Tensors
        that are the same memory (tied weights) stay so. CUDA tensors go through page-locked memory, all
        of them in flight at once; they are complete on return, or with ``steady`` at the event :attr:`copied`.

        Args:
            steady: copy CUDA tensors on a separate stream, while the caller continues. Those of which this is true are
                read there, and nothing may write to them before the event; others are cloned first.

        Raises:
            CheckpointError: a tensor that is not dense (named by its place in ``state``).
        """
        stream = None
        used = dict[Place, Tensor]()
        devices = set[torch.device]()
        if steady is not None and torch.cuda.is_initialized():
            stream = self._stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
        copies: dict[Any, Tensor] = {}

        def leaf(value: Any, path: Place) -> Any:
            if not isinstance(value, Tensor):
                return copy.deepcopy(value)
            tensor = value.detach()
            if not is_dense(tensor):
                raise CheckpointError(
                    f"cannot save {'/'.join(map(str, path))}",
                    why=f"it is a tensor of layout {tensor.layout} on {tensor.device}",
                    fix="keep dense tensors with values in the state",
                )
            memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and memory in copies:
                return copies[memory]
            buffer = used[path] = copies[memory] = self._buffer(path, tensor)
            if tensor.device.type == "cuda":
                devices.add(tensor.device)
            if stream is None or steady is None or tensor.device != stream.device:
                buffer.copy_(tensor, non_blocking=tensor.device.type == "cuda")
                return buffer
            if not steady(path, tensor):
                tensor = tensor.clone()
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                buffer.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            return buffer

        result = walked(state, leaf)
        self._buffers = used
        self.copied = None
        if stream is not None:
            self.copied = stream.record_event(torch.cuda.Event(blocking=True))  # the thread that waits sleeps
            devices.discard(stream.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return result

    def _buffer(self, path: Place, tensor: Tensor) -> Tensor:
        """Return the memory of the last copy of ``path`` if it fits ``tensor``, else new memory."""
        pinned = tensor.device.type == "cuda"
        previous = self._buffers.get(path)
        fits = previous is not None and (previous.shape, previous.dtype) == (tensor.shape, tensor.dtype)
        if previous is not None and fits and (previous.is_pinned() or not pinned):
            return previous
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)


class _Save(NamedTuple):
    """A save in flight. ``done``: its folder when it is there, and what went wrong."""

    step: int
    best: bool
    thread: threading.Thread
    done: list[Path | BaseException]


class BackgroundWriter:
    """Saves snapshots in a thread. Training waits for the copy to host memory, and for a save still in flight.

    A copy on a separate stream of a GPU is not waited for (:attr:`copied`).

    Everything that callers see happens in the caller's thread, in one of these methods: ``on_saved``
    (step, folder, best) is called there, and a failed save is raised there as :class:`StorageError`, once.
    """

    def __init__(self, store: CheckpointStore, on_saved: OnSaved | None = None) -> None:
        self.store = store
        self._on_saved = on_saved
        self._buffers = HostBuffers()
        self._save: _Save | None = None

    @property
    def copied(self) -> torch.cuda.Event | None:
        """When the last copy to host memory is complete; ``None``: it is."""
        return self._buffers.copied

    def to_host(self, state: Any, steady: Steady | None = None) -> Any:
        """Copy ``state`` to host memory that is used again: give it to :meth:`submit` before the next call.

        Waits for a save in flight, whose memory it is. See :meth:`HostBuffers.copy`.
        """
        self.wait()
        return self._buffers.copy(state, steady)

    def submit(self, snapshot: Snapshot, best: bool = False, keep: Collection[int] | None = None) -> None:
        """Begin to save ``snapshot``, which must not change until that is done.

        When it is saved, checkpoints other than it and those of ``keep`` are removed; ``None`` keeps all. It is not
        begun when the save before failed, which is raised.
        """
        self.wait()
        done = list[Path | BaseException]()
        copied = self.copied

        def write() -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                done.append(self.store.save(snapshot, best))
                if keep is not None:
                    self.store.retain({*keep, snapshot.step})
            except BaseException as error:  # raised again in the caller's thread
                done.append(error)

        # Not a daemon: a normal end of the process waits for it.
        thread = threading.Thread(target=write, name=f"lockstep-save-{snapshot.step}", daemon=False)
        self._save = _Save(snapshot.step, best, thread, done)
        thread.start()

    def poll(self) -> None:
        """Report a save that is done, without waiting."""
        if self._save is not None and not self._save.thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if any."""
        save = self._save
        if save is None:
            return
        if save.thread.is_alive():  # it may not have been started, at a limit of threads
            save.thread.join()
        self._save = None
        for outcome in save.done:
            if isinstance(outcome, BaseException):
                raise _surfaced(outcome, save.step) from outcome
            if self._on_saved is not None:
                self._on_saved(save.step, outcome, save.best)

    def close(self) -> None:
        """Wait for the save in flight and release the host memory."""
        try:
            self.wait()
        finally:
            self._buffers = HostBuffers()


def _surfaced(error: BaseException, step: int) -> LockstepError:
    """Make the error for users of a failed save of ``step``."""
    if isinstance(error, LockstepError):
        return error
    reason = f"{type(error).__name__}: {error}"
    return StorageError(f"the checkpoint of step {step} could not be saved", why=reason, fix=_FIX)


class Ranks(Protocol):
    """The ranks of a run, over a separate process group. Every rank makes the same calls.

    ``broadcast`` gives the first rank's value to all, ``gather`` every rank's value, by rank, to the first.
    """

    rank: int

    def broadcast(self, value: T) -> T: ...

    def gather(self, value: T) -> list[T] | None: ...


#: The files that a rank has written, and the names of tensors that are the same as another.
_Part = tuple[dict[str, Digest], dict[str, str]]


class ShardedStore(CheckpointStore):
    """A store that the ranks of a run write together, each its part of the state; all of them see ``folder``.

    A save runs beside training, so ``ranks`` communicate through a separate process group: messages of two threads in
    one group would be mixed up. The first rank writes the manifest, with the hashes of all, once all parts are durable.

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
            with _agreement(step):
                name = self._ranks.broadcast(
                    self._tried(step, lambda: self._begin(step).name) if self._is_main else name
                )
            building = self.folder / _ok(name)
            part = self._tried(step, lambda: self._write_part(building, snapshot))
            with _agreement(step):
                parts = self._ranks.gather(part)
            done = None if parts is None else self._tried(step, lambda: self._finish(building, snapshot, parts, best))
            with _agreement(step):
                done = self._ranks.broadcast(done)
            assert done is not None, "the first rank has the parts"
            _ok(done)
        finally:
            if self._is_main and isinstance(name, str) and name:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.path_of(step)

    def retain(self, keep: Collection[int]) -> None:
        """Retain as the base does, by the first rank."""
        if self._is_main:
            super().retain(keep)

    def _write_part(self, folder: Path, snapshot: Snapshot) -> _Part:
        number = self._ranks.rank
        shards = self._shards
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
        """Return the result of ``work``, or its error, for all ranks."""
        try:
            return work()
        except OSError as error:
            return storage_error(error, self.path_of(step))
        except Exception as error:
            return _surfaced(error, step)


def _ok(outcome: T | LockstepError) -> T:
    if isinstance(outcome, LockstepError):
        raise outcome
    return outcome


@contextlib.contextmanager
def _agreement(step: int) -> Iterator[None]:
    """Raise :class:`CollectiveError` when the ranks lose each other in the body."""
    try:
        yield
    except RuntimeError as error:  # gloo's: a lost connection, or a time-out
        raise CollectiveError(
            f"the ranks could not agree that the checkpoint of step {step} is written",
            why=str(error).splitlines()[0],
            fix=_FIX,
        ) from error
