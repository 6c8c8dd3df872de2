"""Lockstep trains one PyTorch task on any set of devices: same samples, same loss, same schedule.

The public names are imported when they are first used, so that ``import lockstep`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.config import RunConfig as RunConfig
    from lockstep.engine.distributed.collectives import collectives as collectives
    from lockstep.engine.result import RunResult as RunResult
    from lockstep.engine.task import Callback as Callback
    from lockstep.engine.task import Datasets as Datasets
    from lockstep.engine.task import Loss as Loss
    from lockstep.engine.task import Scheduler as Scheduler
    from lockstep.engine.task import Task as Task
    from lockstep.errors import LockstepError as LockstepError
    from lockstep.hardware.detect import detect_devices as detect_devices
    from lockstep.hardware.detect import get_available_gpus as get_available_gpus
    from lockstep.hardware.resolve import resolve_hardware as resolve_hardware
    from lockstep.launch.api import make_plan as make_plan
    from lockstep.launch.api import train as train

__version__ = "0.1.0"

_HOMES = {
    "Callback": "lockstep.engine.task",
    "Datasets": "lockstep.engine.task",
    "LockstepError": "lockstep.errors",
    "Loss": "lockstep.engine.task",
    "RunConfig": "lockstep.config",
    "RunResult": "lockstep.engine.result",
    "Scheduler": "lockstep.engine.task",
    "Task": "lockstep.engine.task",
    "collectives": "lockstep.engine.distributed.collectives",
    "detect_devices": "lockstep.hardware.detect",
    "get_available_gpus": "lockstep.hardware.detect",
    "make_plan": "lockstep.launch.api",
    "resolve_hardware": "lockstep.hardware.resolve",
    "train": "lockstep.launch.api",
}

__all__ = [
    "Callback",
    "Datasets",
    "LockstepError",
    "Loss",
    "RunConfig",
    "RunResult",
    "Scheduler",
    "Task",
    "__version__",
    "collectives",
    "detect_devices",
    "get_available_gpus",
    "make_plan",
    "resolve_hardware",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
