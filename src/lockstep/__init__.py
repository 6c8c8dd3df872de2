"""Lockstep trains one PyTorch task on any set of devices: same samples, same loss, same schedule.

The public names are imported when they are first used, so that ``import lockstep`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.api.run import Run
    from lockstep.api.session import Session
    from lockstep.api.train import fit, make_plan, plan, train, verify
    from lockstep.config import RunConfig
    from lockstep.data.arrays import ArrayDataset
    from lockstep.data.mixture import Mixture
    from lockstep.data.order import Order
    from lockstep.data.packing import Packed
    from lockstep.engine.distributed.collectives import collectives
    from lockstep.engine.task import Callback, Datasets, Loss, Scheduler, Task, TaskConfig
    from lockstep.errors import LockstepError
    from lockstep.events import Sound
    from lockstep.hardware import detect_devices, get_available_gpus, resolve_hardware
    from lockstep.lab.sweep.api import sweep
    from lockstep.strategies import StrategySpec, register_strategy

__version__ = "0.2.0"

#: The public names of each module.
_EXPORTS = {
    "lockstep.api.run": ["Run"],
    "lockstep.api.session": ["Session"],
    "lockstep.api.train": ["fit", "make_plan", "plan", "train", "verify"],
    "lockstep.config": ["RunConfig"],
    "lockstep.data.arrays": ["ArrayDataset"],
    "lockstep.data.mixture": ["Mixture"],
    "lockstep.data.order": ["Order"],
    "lockstep.data.packing": ["Packed"],
    "lockstep.engine.distributed.collectives": ["collectives"],
    "lockstep.engine.task": ["Callback", "Datasets", "Loss", "Scheduler", "Task", "TaskConfig"],
    "lockstep.errors": ["LockstepError"],
    "lockstep.events": ["Sound"],
    "lockstep.hardware": ["detect_devices", "get_available_gpus", "resolve_hardware"],
    "lockstep.lab.sweep.api": ["sweep"],
    "lockstep.strategies": ["StrategySpec", "register_strategy"],
}
_HOMES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "ArrayDataset",
    "Callback",
    "Datasets",
    "LockstepError",
    "Loss",
    "Mixture",
    "Order",
    "Packed",
    "Run",
    "RunConfig",
    "Scheduler",
    "Session",
    "Sound",
    "StrategySpec",
    "Task",
    "TaskConfig",
    "__version__",
    "collectives",
    "detect_devices",
    "fit",
    "get_available_gpus",
    "make_plan",
    "plan",
    "register_strategy",
    "resolve_hardware",
    "sweep",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
