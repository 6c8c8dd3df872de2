"""Observe calls of :mod:`torch.distributed`, checkpoints that `torch.save` writes, and processes that are spawned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from lockstep.audit.observer.record import Recorder, callers

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
MAX_VALUES = 4
#: Frames between a collective call and `Accelerator.gather_for_metrics`, which leaves out padding.
_MAX_FRAMES = 12
_COUNTERS = ("epoch", "epochs", "step", "steps", "global_step", "iteration", "iter", "start_epoch")


def observe_calls(recorder: Recorder) -> None:
    """Write a record before each collective call, each `torch.save` and each start of processes."""
    for name, position in CALLS.items():
        recorder.watch(dist, name, before=partial(_note_collective, recorder, name, position))
    recorder.watch(torch, "save", before=partial(_note_save, recorder))
    for name in ("spawn", "start_processes"):
        recorder.watch(torch.multiprocessing, name, before=partial(_refuse_spawn, recorder))


def _note_collective(recorder: Recorder, name: str, position: int | None, *args: Any, **kwargs: Any) -> None:
    if not dist.is_initialized():
        return
    groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
    inputs = [kwargs[key] for key in _INPUTS if key in kwargs]
    inputs += [] if position is None else args[position : position + 1]
    tensor = next((value for value in inputs if isinstance(value, Tensor)), None)
    recorder.write(
        "call",
        name=name,
        in_group=any(group is not dist.group.WORLD for group in groups),
        trims=any(frame.f_code.co_name == "gather_for_metrics" for frame in islice(callers(), _MAX_FRAMES)),
        numel=None if tensor is None else tensor.numel(),
        is_float=None if tensor is None else tensor.is_floating_point(),
        values=tensor.flatten().tolist() if tensor is not None and tensor.numel() <= MAX_VALUES else [],
    )


def _note_save(recorder: Recorder, content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
    name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    path = os.path.realpath(name) if isinstance(name, str | os.PathLike) else None
    recorder.write("save", path=path, parts=sorted(set(parts_of(content))))


def parts_of(content: Any) -> Iterator[str]:
    """Name the parts of a checkpoint: ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``counter``."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if hasattr(value, "state_dict"):
            value = value.state_dict()
        if isinstance(value, Mapping) and value and all(isinstance(item, Tensor) for item in value.values()):
            yield "model"
        elif isinstance(value, Mapping) and "param_groups" in value:
            yield "optimizer"
        elif isinstance(value, Mapping) and "last_epoch" in value:
            yield "scheduler"
        elif isinstance(value, Mapping) and "growth_factor" in value:
            yield "scaler"
        elif isinstance(key, str) and isinstance(value, int) and key.lower() in _COUNTERS:
            yield "counter"


def _refuse_spawn(recorder: Recorder, *args: Any, **kwargs: Any) -> None:
    recorder.write("spawn")
    raise SystemExit("lockstep audit: the script starts its ranks itself")
