"""Observe calls of :mod:`torch.distributed`, checkpoints that `torch.save` writes, and processes that are spawned."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from lockstep.audit.observer.record import Observation, Recorder

CALLS = (
    *("all_reduce", "reduce", "broadcast", "gather", "scatter", "barrier"),
    *("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_gather_object", "gather_object", "broadcast_object_list"),
)
#: Largest tensor whose values are recorded.
MAX_VALUES = 4
#: Parts of a checkpoint, by a key of their state dictionaries.
_STATES = {"param_groups": "optimizer", "last_epoch": "scheduler", "growth_factor": "scaler"}
_COUNTERS = ("epoch", "epochs", "step", "steps", "global_step", "iteration", "iter", "start_epoch")


def observe_calls(recorder: Recorder) -> None:
    """Write a record before each collective call, each `torch.save` and each start of processes."""
    for name in CALLS:
        recorder.watch(dist, name, partial(_note_collective, recorder, name))
    recorder.watch(torch, "save", partial(_note_save, recorder))
    for name in ("spawn", "start_processes"):
        recorder.watch(torch.multiprocessing, name, partial(_refuse_spawn, recorder))


def _note_collective(recorder: Recorder, name: str, *args: Any, **kwargs: Any) -> Observation:
    if dist.is_initialized():
        values = (*args, *kwargs.values())
        groups = [value for value in values if isinstance(value, dist.ProcessGroup)]
        # Calls that have a tensor for the result have that of the rank behind it.
        tensor = next((value for value in reversed(values) if isinstance(value, Tensor)), None)
        callers = [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._getframe())]
        recorder.write(
            "call",
            name=name,
            in_group=any(group is not dist.group.WORLD for group in groups),
            trims="gather_for_metrics" in callers,  # leaves out padding
            numel=None if tensor is None else tensor.numel(),
            is_float=None if tensor is None else tensor.is_floating_point(),
            values=tensor.flatten().tolist() if tensor is not None and tensor.numel() <= MAX_VALUES else [],
        )
    yield


def _note_save(recorder: Recorder, content: Any, file: Any, *args: Any, **kwargs: Any) -> Observation:
    name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    path = os.path.realpath(name) if isinstance(name, str | os.PathLike) else None
    recorder.write("save", path=path, parts=sorted(set(parts_of(content))))
    yield


def parts_of(content: Any) -> Iterator[str]:
    """Name the parts of a checkpoint: ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``counter``."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if isinstance(value, Mapping) and value and all(isinstance(item, Tensor) for item in value.values()):
            yield "model"
        elif isinstance(value, Mapping):
            yield from (part for name, part in _STATES.items() if name in value)
        elif isinstance(key, str) and isinstance(value, int) and key.lower() in _COUNTERS:
            yield "counter"


def _refuse_spawn(recorder: Recorder, *args: Any, **kwargs: Any) -> NoReturn:
    recorder.write("spawn")
    raise SystemExit("lockstep audit: the script starts its ranks itself")
