"""Copies of a training state in host memory: what training waits for when a checkpoint is due."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError

_Place = tuple[Any, ...]
_Memory = tuple[torch.device, int, torch.dtype, torch.Size, tuple[int, ...]]


class HostBuffers:
    """Host memory that is used again for the next copy of the same state.

    Fresh memory has to be mapped page by page, and page-locked memory is slow to get; a state keeps
    its shapes. So the copy of one call is overwritten by the next: save it, or copy it, before.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Place, Tensor] = {}

    def copy(self, state: Any) -> Any:
        """``state`` with every tensor replaced by a contiguous CPU tensor that nothing else writes to.

        Mappings become dicts, lists and tuples keep their kind, other values are deep-copied. Tensors
        that are the same memory (tied weights) stay so. CUDA tensors go through page-locked memory, all
        of them in flight at once; they are complete on return.

        Raises:
            CheckpointError: a tensor that is not dense (named by its place in ``state``).
        """
        copier = _Copier(self._buffers)
        result = copier.copy(state, ())
        self._buffers = copier.used
        for device in copier.devices:
            torch.cuda.current_stream(device).synchronize()
        return result


def to_host(state: Any, buffers: HostBuffers | None = None) -> Any:
    """A copy of ``state`` in host memory, into ``buffers`` if given; see :meth:`HostBuffers.copy`."""
    return (buffers or HostBuffers()).copy(state)


class _Copier:
    """One walk over a state."""

    def __init__(self, buffers: Mapping[_Place, Tensor]) -> None:
        self._buffers = buffers
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
        buffer.copy_(tensor, non_blocking=cuda)
        if cuda:
            self.devices.add(tensor.device)
        self._seen[memory] = self.used[place] = buffer
        return buffer
