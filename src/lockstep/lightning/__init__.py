"""Train a ``LightningModule`` with Lockstep; parts for any ``Trainer``. Lightning is imported when used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.hardware.detect import get_available_gpus
    from lockstep.hardware.resolve import resolve_hardware
    from lockstep.lightning.training import build_trainer, fit

__all__ = ["build_trainer", "fit", "get_available_gpus", "resolve_hardware"]
_MODULES = {
    "build_trainer": "lockstep.lightning.training",
    "fit": "lockstep.lightning.training",
    "get_available_gpus": "lockstep.hardware.detect",
    "resolve_hardware": "lockstep.hardware.resolve",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'lockstep.lightning' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
