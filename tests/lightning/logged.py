"""A module whose values depend on the batches of its evaluation, and on what each rank logs."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric


class Batches(Metric):
    """The number of batches and the sum of their sizes squared, from a list state without a reduction."""

    sizes: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sizes", default=[], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        self.sizes.append(torch.tensor(float(len(values))))

    def compute(self) -> Tensor:
        return torch.stack(self.sizes).square().sum() + 100 * len(self.sizes)


class Logged(pl.LightningModule):
    """Evaluates the numbers 0 to 6 in batches of three."""

    def __init__(self, *, drop_last: bool = False, gathers: bool = False, mixes: str = "", differs: str = "") -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.mean, self.batches, self.some = MeanMetric(), Batches(), MeanMetric()
        self.drop_last, self.gathers, self.mixes = drop_last, gathers, mixes
        #: The split of which rank 1 has other samples.
        self.differs = differs if os.environ.get("RANK") == "1" else ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.mixes == "names":
            self.log(f"train_{self.global_rank}", 1.0, sync_dist=True)
        for name in range(1 + self.global_rank if self.mixes == "number" else 0):
            self.log(f"train_{name}", 1.0, sync_dist=True)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        [numbers] = batch
        if self.gathers:
            self.all_gather(numbers.mean())
        self.mean.update(numbers.max())
        self.batches.update(numbers)
        self.log("val_loss", self.mean)
        self.log("val_batches", self.batches)
        self.log("val_number", numbers.mean(), on_step=True, on_epoch=True, sync_dist=True)
        names = ["first", "second"] if batch_idx == 0 else ["second", "first"]
        for name in names:
            self.log(f"val_{name}", numbers.mean() + (name == "first"), sync_dist=True)
        if 6 in numbers:
            self.some.update(numbers.min())
            self.log("val_some", self.some)
            self.log("val_six", 6.0, sync_dist=True)
            self.log("val_most", numbers.max(), sync_dist=True, reduce_fx="max")

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        names = ["x", "y"] if self.global_rank == 0 else ["y", "x"]
        for name in names:
            self.log(f"val_{name}", float(ord(name)), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.full((4, 1), float(self.differs == "train"))), batch_size=2)

    def val_dataloader(self) -> DataLoader[Any]:
        numbers = TensorDataset(torch.arange(7.0 + (self.differs == "val")).view(-1, 1))
        return DataLoader(numbers, batch_size=3, drop_last=self.drop_last)
