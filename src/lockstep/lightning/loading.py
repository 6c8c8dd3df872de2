"""Checkpoints that people name with ``--ckpt_path``: one clear error for one that cannot be loaded."""

from __future__ import annotations

import pickle
import stat
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.launch.health.stacks import Frame

_CONNECTOR = "lightning/pytorch/trainer/connectors/checkpoint_connector.py"
_RESTORING = ("resume", "restore", "_restore", "read_checkpoint_settings")
_CLASS_KEYS = ("class_path", "_class_path")
_CLI = ("lightning/pytorch/cli.py", "lockstep/lightning/cli.py")
_FIX = "name another checkpoint with --ckpt_path, or leave it out to start a new training"


def check_is_file(path: object) -> None:
    """Raises :class:`CheckpointError` for a file whose reading would never end: a named pipe, a device."""
    if not isinstance(path, str | Path):
        return
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return  # an address, one of Lightning's words, or nothing: Lightning says so
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path} is not a checkpoint", why="it is not a regular file", fix=_FIX)


def refuse_other_classes(path: object, config: Any) -> None:
    """A checkpoint's hyperparameters may name classes, which LightningCLI would import: those of ``config`` only.

    Raises:
        CheckpointError: it names another one.
    """
    if not isinstance(path, str | Path) or not Path(path).is_file():
        return
    import torch

    content = torch.load(path, weights_only=True, map_location="cpu")
    named = set(_classes(content.get("hyper_parameters") if isinstance(content, dict) else None))
    others = named - set(_classes(config))
    if others:
        raise CheckpointError(
            f"{path} names a class that the configuration does not name: {sorted(others)[0][:200]}",
            why="its hyperparameters would have it imported, and code of others run",
            fix="if you trust it, name the class as model.class_path, or add --weights_only false",
        )


def _classes(values: Any) -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            if key in _CLASS_KEYS:
                yield str(value)
            yield from _classes(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _classes(value)


@contextmanager
def told_clearly(path: object) -> Iterator[None]:
    """What torch or Lightning raises over the content of a checkpoint becomes a :class:`CheckpointError`.

    An error of the user's own hooks stays what it is, and so does one of the training.
    """
    try:
        yield
    except Exception as error:
        if path is None or not _is_about_loading(error):
            raise
        raise _told(path, error) from error


def _is_about_loading(error: Exception) -> bool:
    frames = [Frame(at.filename, at.lineno or 0, at.name) for at in traceback.extract_tb(error.__traceback__)]
    loads = any(at.file.endswith((_CONNECTOR, *_CLI)) and at.function.startswith(_RESTORING) for at in frames)
    return loads and frames[-1].is_library


def _told(path: object, error: Exception) -> CheckpointError:
    lines = [line for line in str(error).splitlines() if line.strip()]
    fix = _FIX
    if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
        lines = [line for line in lines if "Unsupported" in line or "GLOBAL" in line] or lines
        fix = "if you trust whoever made it, add --weights_only false: it may then run code; else " + _FIX
    why = f"{type(error).__name__}: {lines[0].strip()[:300]}" if lines else type(error).__name__
    return CheckpointError(f"cannot load {path}", why=why, fix=fix)
