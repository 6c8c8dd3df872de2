"""Saving in the background: a copy of the state in host memory, then one thread, one save at a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint.content import Place, is_dense, walked
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.errors import CheckpointError, LockstepError, StorageError
from lockstep.telemetry.progress_board import pulse

#: Whether a tensor at a place of the state stays as it is until the copy is complete.
Steady = Callable[[Place, Tensor], bool]
_Memory = tuple[torch.device, int, torch.dtype, torch.Size, tuple[int, ...]]


class HostBuffers:
    """Host memory that is used again for the next copy of the same state.

    Fresh memory has to be mapped page by page, and page-locked memory is slow to get; a state keeps
    its shapes. So the copy of one call is overwritten by the next: save it, or copy it, before.
    """

    def __init__(self) -> None:
        self._buffers: dict[Place, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        #: Happens when the last copy is complete; ``None``: it is.
        self.copied: torch.cuda.Event | None = None

    def copy(self, state: Any, steady: Steady | None = None) -> Any:
        """``state`` with every tensor replaced by a contiguous CPU tensor that nothing else writes to.

        Mappings become dicts, lists and tuples keep their kind, other values are deep-copied. Tensors
        that are the same memory (tied weights) stay so. CUDA tensors go through page-locked memory, all
        of them in flight at once; they are complete on return, or with ``steady`` at the event :attr:`copied`.

        Args:
            steady: copy CUDA tensors on a separate stream, while the caller continues. Those of which this is true are
                read there, and nothing may write to them before the event; others are cloned first.

        Raises:
            CheckpointError: a tensor that is not dense (named by its place in ``state``).
        """
        stream, used, devices = None, dict[Place, Tensor](), set[torch.device]()
        if steady is not None and torch.cuda.is_initialized():
            stream = self._stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
        seen: dict[_Memory, Tensor] = {}

        def leaf(value: Any, place: Place) -> Any:
            if not isinstance(value, Tensor):
                return copy.deepcopy(value)
            tensor = value.detach()
            if not is_dense(tensor):
                kind = "on the meta device" if tensor.device.type == "meta" else f"of layout {tensor.layout}"
                raise CheckpointError(
                    f"cannot save {'/'.join(map(str, place))}",
                    why=f"it is a tensor {kind}",
                    fix="keep dense tensors with values in the state",
                )
            memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and memory in seen:
                return seen[memory]
            buffer = used[place] = seen[memory] = self._buffer(place, tensor)
            if tensor.device.type == "cuda":
                devices.add(tensor.device)
            if stream is None or steady is None or tensor.device != stream.device:
                buffer.copy_(tensor, non_blocking=tensor.device.type == "cuda")
                return buffer
            if not steady(place, tensor):
                tensor = tensor.clone()
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                buffer.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            return buffer

        result = walked(state, leaf)
        self._buffers, self.copied = used, None
        if stream is not None:
            self.copied = stream.record_event(torch.cuda.Event(blocking=True))  # the thread that waits sleeps
            devices.discard(stream.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return result

    def _buffer(self, place: Place, tensor: Tensor) -> Tensor:
        """The memory of the last copy of ``place``, if it fits ``tensor``; else new."""
        pinned, kept = tensor.device.type == "cuda", self._buffers.get(place)
        fits = kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype)
        if kept is not None and fits and (kept.is_pinned() or not pinned):
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)


OnSaved = Callable[[int, Path, bool], None]


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
    (step, folder, best) is called there, and a failed save is raised there, once.

    Each save has its own thread, which is not a daemon: a normal end of the process waits
    for it, and has nothing else to wait for.
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
        """A copy of ``state`` in host memory that is used again: give it to :meth:`submit` before the next call.

        Waits for a save in flight, whose memory it is. See :meth:`HostBuffers.copy`.
        """
        self.wait()
        return self._buffers.copy(state, steady)

    def submit(self, snapshot: Snapshot, best: bool = False, keep: Collection[int] | None = None) -> None:
        """Begin to save ``snapshot``, which must not change until that is done.

        When it is saved, checkpoints other than it and those of ``keep`` are removed; ``None`` keeps all.

        Raises:
            StorageError: the save before failed. This one has not begun.
        """
        self.wait()
        done, copied = list[Path | BaseException](), self.copied

        def write() -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                done.append(self.store.save(snapshot, best))
                if keep is not None:
                    self.store.retain({*keep, snapshot.step})
            except BaseException as error:  # raised again in the caller's thread
                done.append(error)

        thread = threading.Thread(target=write, name=f"lockstep-save-{snapshot.step}", daemon=False)
        self._save = _Save(snapshot.step, best, thread, done)
        thread.start()
        pulse.writes_in(thread.native_id or 0)

    def poll(self) -> None:
        """Report a save that is done, without waiting. Raises :class:`StorageError` when it failed."""
        if self._save is not None and not self._save.thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if any. Raises :class:`StorageError` when it failed."""
        save = self._save
        if save is None:
            return
        save.thread.join()
        pulse.writes_in(0)
        self._save = None
        for found in save.done:
            if isinstance(found, BaseException):
                raise surfaced(found, save.step) from found
            if self._on_saved is not None:
                self._on_saved(save.step, found, save.best)

    def close(self) -> None:
        """Wait for the save in flight and release the host memory. Raises :class:`StorageError`."""
        try:
            self.wait()
        finally:
            self._buffers = HostBuffers()


def surfaced(error: BaseException, step: int) -> LockstepError:
    """The error that users see when the save of ``step`` failed."""
    if isinstance(error, LockstepError):
        return error
    return StorageError(
        f"the checkpoint of step {step} could not be saved",
        why=f"{type(error).__name__}: {error}",
        fix="the older checkpoints are unchanged; `lockstep resume` continues from the latest",
    )
