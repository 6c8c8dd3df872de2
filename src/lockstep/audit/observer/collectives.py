"""Observe the collective calls of :mod:`torch.distributed` that the script and its frameworks make."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.audit.observer.record import Patches, Recorder, guarded, script_line

#: Collective calls, and the position of the tensor or object that a rank contributes.
CALLS = {
    "all_reduce": 0,
    "reduce": 0,
    "broadcast": 0,
    "gather": 0,
    "scatter": 0,
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "all_gather_object": 1,
    "gather_object": 0,
    "broadcast_object_list": 0,
    "barrier": None,
}
_INPUTS = ("tensor", "input_tensor", "input", "obj")
#: Largest tensor whose values are recorded.
MOST_VALUES = 4


class CollectiveObserver:
    """Writes a record before each call of all ranks; calls of smaller groups are counted only."""

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self.recorder = recorder
        self._depth = 0
        for name, position in CALLS.items():
            if hasattr(dist, name):
                patches.replace(dist, name, partial(self._watched, name, position))

    def _watched(self, name: str, position: int | None, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return original(*args, **kwargs)
            guarded(self._note, self.recorder)(name, position, args, kwargs)
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _note(self, name: str, position: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not dist.is_initialized():
            return
        record: dict[str, Any] = {"t": "call", "kind": name, "site": script_line()}
        groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
        if any(group is not dist.group.WORLD for group in groups):
            record["group"] = True
        if position is not None:
            inputs = [*(kwargs[key] for key in _INPUTS if key in kwargs), *args[position : position + 1]]
            content = next(iter(inputs), None)
            if isinstance(content, Tensor):
                record |= {"numel": content.numel(), "rows": content.shape[0] if content.dim() else 1}
                record |= {"dtype": str(content.dtype).removeprefix("torch.")}
                if content.numel() <= MOST_VALUES:
                    record["values"] = content.detach().flatten().tolist()
        if _is_called_by("gather_for_metrics"):
            record["trims"] = True
        self.recorder.write(record)


def _is_called_by(name: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return False
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False
