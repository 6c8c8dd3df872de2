"""Tensors from one rank of a pipeline to the next, of whatever shapes and kinds they are."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.engine.distributed.staging import wire_device
from lockstep.engine.strategies.stages import Inputs
from lockstep.errors import TaskError

_KINDS = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
#: Sizes that the description of one tensor has room for, after its kind, whether a gradient is wanted, and how many.
_SIZES = 9
_HEADER = 3 + _SIZES


class Line:
    """Tensors to and from a neighbour, in one direction of the pipeline; sizes travel ahead of them. Collective.

    Sends do not wait: the two directions are two groups, so that none waits for the other either.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        self._device, self._wire = device, wire_device(device, self._group)
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, tensors: Inputs, to: int) -> None:
        """Begin to send ``tensors`` to rank ``to``.

        Raises:
            TaskError: one is of a kind, or has dimensions, that cannot be described to the other rank.
        """
        header = torch.zeros(1 + len(tensors) * _HEADER, dtype=torch.int64)
        header[0] = len(tensors)
        for place, tensor in enumerate(tensors):
            if tensor.dtype not in _KINDS or tensor.dim() > _SIZES:
                raise TaskError(
                    f"a stage returned a tensor of {tensor.dtype} with {tensor.dim()} dimension(s)",
                    why=f"between ranks travel common kinds of numbers with up to {_SIZES} dimensions",
                    fix="return another kind of tensor from the stage, or put both sides of the cut into one stage",
                )
            row = [_KINDS.index(tensor.dtype), int(tensor.requires_grad), tensor.dim(), *tensor.shape]
            start = 1 + place * _HEADER
            header[start : start + len(row)] = torch.tensor(row)
        for message in (header[:1], header[1:], *(tensor.detach() for tensor in tensors)):
            packed = message.to(self._wire).contiguous()
            if packed.numel():
                self._sent.append((dist.isend(packed, group_dst=to, group=self._group), packed))

    def receive(self, source: int) -> Inputs:
        """The tensors of the next message, as leaves that gather gradients where those are wanted."""
        number = int(self._one(torch.int64, (1,), source))
        rows = self._one(torch.int64, (number, _HEADER), source).tolist()
        tensors = []
        for kind, wanted, dims, *sizes in rows:
            tensor = self._one(_KINDS[kind], tuple(sizes[:dims]), source).to(self._device)
            tensors.append(tensor.requires_grad_(bool(wanted)))
        return tuple(tensors)

    def _one(self, kind: torch.dtype, shape: tuple[int, ...], source: int) -> Tensor:
        tensor = torch.empty(shape, dtype=kind, device=self._wire)
        if tensor.numel():
            dist.recv(tensor, group_src=source, group=self._group)
        return tensor

    def flush(self) -> None:
        """Wait until all that was sent has gone."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent = []
