"""The workloads as tasks of Lockstep: ``lockstep bench step benchmarks/gpu/tasks.py:Workload --set task.kind=vit``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a task that is named by its file

from gpu.catalogue import spec_of, wide
from lockstep import ArrayDataset, Datasets, Loss, Task, TaskConfig


class Plain(Task):
    """Without hooks, since after them a checkpoint is waited for. ``at_loss`` is called before each loss."""

    class Config(TaskConfig):
        kind: str = "har_cnn"
        quick: bool = False
        batch: int | None = None
        wide: bool = False

    at_loss: Callable[[], None] = staticmethod(lambda: None)

    def datasets(self) -> Datasets:
        if self.config.wide:
            generator = torch.Generator().manual_seed(0)
            inputs = torch.randn(512, 8, generator=generator).repeat(8 if self.config.quick else 8192, 1)
            return Datasets(ArrayDataset(inputs, torch.randint(0, 8, (len(inputs),), generator=generator)))
        spec = spec_of(self.config.kind, quick=self.config.quick, batch=self.config.batch)
        return Datasets(ArrayDataset(*spec.data()))

    def model(self) -> nn.Module:
        if self.config.wide:
            return wide(self.config.quick)
        return spec_of(self.config.kind, quick=self.config.quick).build()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.at_loss()
        return Loss(model(*batch), len(batch[0]) * self._items)

    @property
    def _items(self) -> int:
        return 1 if self.config.wide else spec_of(self.config.kind, quick=self.config.quick).items


class Workload(Plain):
    #: Called every ``every`` steps.
    after_block: Callable[[], None] | None = None
    every = 1

    def hooks(self) -> Any:
        call = self.after_block
        return [] if call is None else [(lambda result, model: call(), self.every)]
