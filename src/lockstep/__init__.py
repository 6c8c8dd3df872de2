"""Lockstep trains one PyTorch task on any set of devices: same samples, same loss, same schedule.

The public names are imported when they are first used, so that ``import lockstep`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.api.run import Run as Run
    from lockstep.api.run import Run as RunResult
    from lockstep.api.session import Session as Session
    from lockstep.api.train import fit as fit
    from lockstep.api.train import plan as make_plan
    from lockstep.api.train import plan as plan
    from lockstep.api.train import train as train
    from lockstep.api.train import verify as verify
    from lockstep.config import RunConfig as RunConfig
    from lockstep.data.arrays import ArrayDataset as ArrayDataset
    from lockstep.data.mixture import Mixture as Mixture
    from lockstep.data.order import Order as Order
    from lockstep.data.packing import Packed as Packed
    from lockstep.engine.distributed.collectives import collectives as collectives
    from lockstep.engine.task import Callback as Callback
    from lockstep.engine.task import Datasets as Datasets
    from lockstep.engine.task import Loss as Loss
    from lockstep.engine.task import Scheduler as Scheduler
    from lockstep.engine.task import Task as Task
    from lockstep.engine.task import TaskConfig as TaskConfig
    from lockstep.errors import LockstepError as LockstepError
    from lockstep.events import Sound as Sound
    from lockstep.hardware.detect import detect_devices as detect_devices
    from lockstep.hardware.detect import get_available_gpus as get_available_gpus
    from lockstep.hardware.resolve import resolve_hardware as resolve_hardware
    from lockstep.strategies import StrategySpec as StrategySpec
    from lockstep.strategies import register_strategy as register_strategy

__version__ = "0.2.0"

#: Where each public name is. ``RunResult`` and ``make_plan`` are the names that 0.1 had.
_HOMES = {
    "ArrayDataset": "lockstep.data.arrays",
    "Callback": "lockstep.engine.task",
    "Datasets": "lockstep.engine.task",
    "LockstepError": "lockstep.errors",
    "Loss": "lockstep.engine.task",
    "Mixture": "lockstep.data.mixture",
    "Order": "lockstep.data.order",
    "Packed": "lockstep.data.packing",
    "Run": "lockstep.api.run",
    "RunConfig": "lockstep.config",
    "RunResult": "lockstep.api.run:Run",
    "Scheduler": "lockstep.engine.task",
    "Session": "lockstep.api.session",
    "Sound": "lockstep.events",
    "StrategySpec": "lockstep.strategies",
    "Task": "lockstep.engine.task",
    "TaskConfig": "lockstep.engine.task",
    "collectives": "lockstep.engine.distributed.collectives",
    "detect_devices": "lockstep.hardware.detect",
    "fit": "lockstep.api.train",
    "get_available_gpus": "lockstep.hardware.detect",
    "make_plan": "lockstep.api.train:plan",
    "plan": "lockstep.api.train",
    "register_strategy": "lockstep.strategies",
    "resolve_hardware": "lockstep.hardware.resolve",
    "train": "lockstep.api.train",
    "verify": "lockstep.api.train",
}

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
    "RunResult",
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
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
