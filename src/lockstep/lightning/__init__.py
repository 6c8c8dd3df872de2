"""Training a ``LightningModule`` with Lockstep, and parts for your own ``Trainer``.

The public names are imported when they are first used: Lightning takes a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.hardware.detect import get_available_gpus as get_available_gpus
    from lockstep.hardware.resolve import resolve_hardware as resolve_hardware
    from lockstep.lightning.training import build_trainer as build_trainer
    from lockstep.lightning.training import fit as fit

_HOMES = {
    "build_trainer": "lockstep.lightning.training",
    "fit": "lockstep.lightning.training",
    "get_available_gpus": "lockstep.hardware.detect",
    "resolve_hardware": "lockstep.hardware.resolve",
}

__all__ = ["build_trainer", "fit", "get_available_gpus", "resolve_hardware"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
