"""Tasks whose loader workers cannot hand over their batches."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from lockstep import Datasets, Loss, Task, TaskConfig


class Samples:
    """``kind``: ``many`` tensors a sample, an ``unpicklable`` one, or ``stuck`` in a worker."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            print("loading", flush=True)
            time.sleep(600 if self.kind == "stuck" else 0)
        return [torch.ones(1) for _ in range(200 if self.kind == "many" else 1)]


class Loading(Task):
    class Config(TaskConfig):
        kind: str = "one"

    def datasets(self) -> Datasets:
        if self.config.kind == "many":
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return Datasets(Samples(self.config.kind))

    def collate(self, samples: list[Any]) -> Any:
        batch = [torch.stack(column) for column in zip(*samples, strict=True)]
        return (batch, lambda: None) if self.config.kind == "unpicklable" and get_worker_info() else (batch, None)

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: tuple[list[Tensor], None]) -> Loss:
        return Loss(model(batch[0][0]).sum(), len(batch[0][0]))


class Streaming(Loading):
    def datasets(self) -> Datasets:
        return Datasets(Stream())


class Stream:
    def __iter__(self) -> Any:
        return iter([[torch.ones(1)] for _ in range(16)])
