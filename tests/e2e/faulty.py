"""Tasks that go wrong in one way, on one rank, at one step of the first start of the ranks."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from lockstep import ArrayDataset, Datasets, Loss
from tests.toys import SampleBySample, Toy, arrays


class Stuck(SampleBySample):
    """Reads from a disk that answers rank 1 for some time."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        if self.reads > 80 and os.environ["RANK"] == "1" and is_first_start():
            time.sleep(600)  # of the disk
        return super().__getitem__(index)


class Faulty(Toy):
    class Config(Toy.Config):
        fault: str = "none"
        at: int = 4
        slow: bool = False
        evaluating: bool = False
        save_s: float = 0.0

    def datasets(self) -> Datasets:
        if self.config.fault != "data":
            return super().datasets()
        return Datasets(Stuck(*arrays(self.config.samples, 1)), ArrayDataset(*arrays(53, 2)))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        result = super().loss(model, batch)
        if self.config.slow:
            time.sleep((6.0 if self.calls == 1 else 0.0) if model.training else 1.5)
        strikes = model.training is not self.config.evaluating and self.calls == self.config.at
        if self.config.fault != "none" and strikes and is_first_start():
            globals()[self.config.fault]()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Of a task whose state is large, and the disk slow."""
        time.sleep(self.config.save_s)
        return {}

    def hooks(self) -> Any:
        def lonely(result: Any, model: nn.Module) -> None:
            if self.config.fault == "hook" and result.step == self.config.at and dist.get_rank() == 0:
                dist.barrier()

        return [(lonely, 1)]


def is_first_start() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def hook() -> None:
    """The hook does it."""


def saving() -> None:
    """The save does it."""


def data() -> None:
    """The data set does it."""


def sleep() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def barrier() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def gpu_memory() -> None:
    if dist.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def memory() -> None:
    """This process may have a little more memory than it has, and wants much more."""
    if not dist.is_initialized() or dist.get_rank() == 1:
        here = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (here + (256 << 20), resource.RLIM_INFINITY))
        torch.empty(1 << 30, dtype=torch.uint8)
