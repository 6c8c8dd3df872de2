"""Saving in the background: a copy of the state in host memory, then one thread, one save at a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.errors import CheckpointError, LockstepError, StorageError
from lockstep.telemetry.progress_board import pulse

_Place = tuple[Any, ...]
#: Whether a tensor at a place of the state stays as it is until the copy is complete.
Steady = Callable[[_Place, Tensor], bool]
_Memory = tuple[torch.device, int, torch.dtype, torch.Size, tuple[int, ...]]


class HostBuffers:
    """Host memory that is used again for the next copy of the same state.

    Fresh memory has to be mapped page by page, and page-locked memory is slow to get; a state keeps
    its shapes. So the copy of one call is overwritten by the next: save it, or copy it, before.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Place, Tensor] = {}
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
        if steady is not None and torch.cuda.is_initialized():
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        copier = _Copier(self._buffers, steady, None if steady is None else self._stream)
        result = copier.copy(state, ())
        self._buffers, self.copied = copier.used, None
        if copier.stream is not None:
            self.copied = copier.stream.record_event()
        for device in copier.devices - ({copier.stream.device} if copier.stream is not None else set()):
            torch.cuda.current_stream(device).synchronize()
        return result


class _Copier:
    """One walk over a state."""

    def __init__(
        self, buffers: Mapping[_Place, Tensor], steady: Steady | None, stream: torch.cuda.Stream | None
    ) -> None:
        self._buffers, self._steady, self.stream = buffers, steady, stream
        self._seen: dict[_Memory, Tensor] = {}
        self.used: dict[_Place, Tensor] = {}
        self.devices: set[torch.device] = set()

    def copy(self, value: Any, place: _Place) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), place)
        if isinstance(value, Mapping):
            return {key: self.copy(item, (*place, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.copy(item, (*place, index)) for index, item in enumerate(value))
        return copy.deepcopy(value)

    def _tensor(self, tensor: Tensor, place: _Place) -> Tensor:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            kind = "on the meta device" if tensor.device.type == "meta" else f"of layout {tensor.layout}"
            raise CheckpointError(
                f"cannot save {'/'.join(map(str, place))}",
                why=f"it is a tensor {kind}",
                fix="keep dense tensors with values in the state",
            )
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in self._seen:
            return self._seen[memory]
        cuda = tensor.device.type == "cuda"
        buffer = self._buffers.get(place)
        if (
            buffer is None
            or buffer.shape != tensor.shape
            or buffer.dtype != tensor.dtype
            or (cuda and not buffer.is_pinned())
        ):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=cuda)
        if cuda:
            self.devices.add(tensor.device)
        if cuda and self.stream is not None and self._steady is not None and tensor.device == self.stream.device:
            if not self._steady(place, tensor):
                tensor = tensor.clone()
                self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self.stream):
                buffer.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.stream)
        else:
            buffer.copy_(tensor, non_blocking=cuda)
        self._seen[memory] = self.used[place] = buffer
        return buffer


OnSaved = Callable[[int, Path, bool], None]


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
        self._save = save = _Save(self.store, snapshot, best, keep, self.copied)
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
    def __init__(
        self,
        store: CheckpointStore,
        snapshot: Snapshot,
        best: bool,
        keep: Collection[int] | None,
        copied: torch.cuda.Event | None,
    ) -> None:
        super().__init__(name=f"lockstep-save-{snapshot.step}", daemon=False)
        self._store = store
        self._keep, self._copied = keep, copied
        self.snapshot = snapshot
        self.best = best
        self.path: Path | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            if self._copied is not None:
                self._copied.synchronize()
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
