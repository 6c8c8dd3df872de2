"""Observe files that the script writes: their paths, and the content of checkpoints."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lockstep.audit.observer.record import Patches, Recorder, guarded, script_line

#: Library frames between `open` and the script, for a file to count as the script's.
MOST_FRAMES = 4


class FileObserver:
    """Writes a record for each `torch.save` and each file that the script opens for writing."""

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self.recorder = recorder
        self._saving = False
        patches.replace(torch, "save", self._saved)
        patches.replace(builtins, "open", self._opened)
        patches.replace(io, "open", self._opened)

    def _saved(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(self._note_save, self.recorder)(obj, f)
            self._saving = True
            try:
                return original(obj, f, *args, **kwargs)
            finally:
                self._saving = False

        return save

    def _opened(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not self._saving and isinstance(mode, str) and mode[:1] in ("w", "x"):
                guarded(self._note_open, self.recorder)(file)
            return original(file, mode, *args, **kwargs)

        return open

    def _note_open(self, file: Any) -> None:
        site = script_line(MOST_FRAMES)
        if site is not None and isinstance(file, str | os.PathLike) and not os.fspath(file).startswith("/dev/"):
            self.recorder.write({"t": "write", "path": os.path.realpath(file), "site": site})

    def _note_save(self, content: Any, file: Any) -> None:
        name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        path = os.path.realpath(name) if isinstance(name, str | os.PathLike) else None
        record = {"t": "save", "path": path, "site": script_line(), "frames": script_line(MOST_FRAMES) is not None}
        self.recorder.write({**record, "parts": sorted(set(parts_of(content)))})


def parts_of(content: Any) -> Iterator[str]:
    """Name the parts of a checkpoint: ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``counter``."""
    if not isinstance(content, Mapping):
        return
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            value = value[0]  # Lightning's lists of optimizers and schedulers
        if hasattr(value, "state_dict") and not isinstance(value, Mapping):
            value = value.state_dict()
        if isinstance(value, torch.Tensor):
            yield "weights"
        elif isinstance(value, Mapping) and value and all(isinstance(item, torch.Tensor) for item in value.values()):
            yield "model"
        elif isinstance(value, Mapping) and "param_groups" in value:
            yield "optimizer"
        elif isinstance(value, Mapping) and "last_epoch" in value:
            yield "scheduler"
        elif isinstance(value, Mapping) and "growth_factor" in value:
            yield "scaler"
        elif isinstance(key, str) and isinstance(value, int) and key.lower().strip("_") in _COUNTERS:
            yield "counter"


_COUNTERS = ("epoch", "epochs", "step", "steps", "global_step", "iteration", "iter", "start_epoch")
