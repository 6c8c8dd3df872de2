"""A task of which one rank stands still, or makes a collective call that the other does not make."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep import Datasets, Loss, Task, TaskConfig


def stands_still() -> None:
    time.sleep(600)


def calls_alone() -> None:
    dist.barrier()


class Mean:
    def __init__(self, task: Waiting) -> None:
        self.task = task

    def update(self, *rows: Any) -> None:
        pass

    def compute(self) -> dict[str, float]:
        self.task.reach("compute", 0)
        return {"mean": 0.0}


class Waiting(Task):
    class Config(TaskConfig):
        at: str = ""
        does: str = stands_still.__name__

    def reach(self, place: str, rank: int) -> None:
        if self.config.at == place and os.environ.get("RANK") == str(rank):
            globals()[self.config.does]()

    def prepare(self) -> None:
        self.reach("prepare", 0)

    def datasets(self) -> Datasets:
        samples = [torch.ones(1)] * 16
        return Datasets(samples, samples)

    def model(self) -> nn.Module:
        self.reach("model", 1)
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Loss:
        return Loss(model(batch).sum(), len(batch))

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor]:
        return (model(batch),)

    def metrics(self) -> Mean:
        return Mean(self)
