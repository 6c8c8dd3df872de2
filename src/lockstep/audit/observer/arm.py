"""Install the observer when the script imports torch, and the number of devices when it imports Lightning."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lockstep.audit.observer.record import Recorder

#: Lightning's classes that start ranks, by the module that defines them.
_STARTERS = {
    "lightning.pytorch.trainer.trainer": "Trainer",
    "pytorch_lightning.trainer.trainer": "Trainer",
    "lightning.fabric.fabric": "Fabric",
    "lightning_fabric.fabric": "Fabric",
}


class ImportHooks(MetaPathFinder):
    """Calls ``actions[name]`` once, with the module, right after the import of ``name``."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], object]]) -> None:
        self.actions = actions

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find ``fullname`` as the other finders do, and let its loader call the action."""
        action = self.actions.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if action is not None else None
        if spec is None or spec.loader is None or action is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def arm(folder: str, max_steps: int) -> None:
    """Observe this process, with records in ``folder``, as soon as it imports torch."""
    recorder = Recorder(folder, max_steps)

    def observe(_: ModuleType) -> None:
        from lockstep.audit.observer.calls import observe_calls
        from lockstep.audit.observer.loaders import LoaderObserver
        from lockstep.audit.observer.training import TrainingObserver

        atexit.register(recorder.write, "end")
        observe_calls(recorder)
        LoaderObserver(recorder)
        TrainingObserver(recorder)

    actions: dict[str, Callable[[ModuleType], object]] = {"torch": observe}
    for module, name in _STARTERS.items():
        actions[module] = partial(_set_devices, recorder, name)
    sys.meta_path.insert(0, ImportHooks(actions))


def _set_devices(recorder: Recorder, name: str, module: ModuleType) -> None:
    """Let the class ``name`` use as many devices as there are ranks, whatever number the script names."""
    starter = getattr(module, name)
    create = starter.__init__
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    @functools.wraps(create)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if name == "Trainer":
            recorder.write("lightning")
            if kwargs.get("limit_train_batches") is None:
                # A loader that only ends early would let the Trainer skip the validation at the end of the epoch.
                kwargs["limit_train_batches"] = recorder.max_steps * kwargs.get("accumulate_grad_batches", 1)
        create(self, *args, **{**kwargs, "devices": ranks, "num_nodes": 1})
        if name == "Fabric":
            self.launch()  # as `fabric run` does; another call changes nothing

    starter.__init__ = init
