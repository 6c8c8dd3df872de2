"""A user's module and data module, that know nothing of Lockstep."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate, random_split


class Classifier(pl.LightningModule):
    """Writes down the samples of every step, for tests to see who saw what; slow while there is a file ``slow``."""

    def __init__(
        self,
        seen: str | None = None,
        manual: bool = False,
        batchnorm: bool = False,
        unused: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if batchnorm else nn.Tanh(), nn.Linear(8, 2))
        self.net[0].requires_grad_(not frozen)
        self.idle = nn.Linear(4, 1) if unused else None
        self.automatic_optimization = not manual
        self.example_input_array = torch.zeros(2, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels, numbers = batch
        self._note(numbers)
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def _note(self, numbers: Tensor) -> None:
        if self.hparams.seen:
            time.sleep(0.25 if (Path(self.hparams.seen) / "slow").exists() else 0.0)
            row = {"epoch": self.current_epoch, "step": self.global_step, "samples": numbers.tolist()}
            with (Path(self.hparams.seen) / f"{self.global_rank}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels, numbers = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(inputs), labels), sync_dist=True)
        self.log("val/number", numbers.double().mean(), sync_dist=True)
        self.log("val_count", float(len(labels)), sync_dist=True, reduce_fx="sum")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/number", batch[2].double().mean())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_hook", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 - step / (self.trainer.estimated_stepping_batches + 1)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Pixels(Classifier):
    """Weights that are not row-major in memory, under an optimizer that cares."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(4, 16), nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 2, 2), nn.Flatten()
        self.net = nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class Numbered(pl.LightningDataModule):
    """Samples that carry their number; ``prepare_data`` leaves a mark of who called it."""

    def __init__(
        self, samples: int = 50, val_samples: int = 5, batch_size: int = 8, workers: int = 0, shuffle: bool = True
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        # A split without a generator of its own, as users write it.
        self.train, _ = random_split(_numbered(self.hparams.samples + 3, 1), [self.hparams.samples, 3])
        self.val = _numbered(self.hparams.val_samples, 2)

    def train_dataloader(self) -> Any:
        size, workers = self.hparams.batch_size, self.hparams.workers
        return DataLoader(self.train, batch_size=size, shuffle=self.hparams.shuffle, num_workers=workers)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self) -> Any:
        return DataLoader(_numbered(11, 3), batch_size=self.hparams.batch_size)


class Ragged(Numbered):
    """Training samples that only their own loader can put together."""

    def train_dataloader(self) -> Any:
        samples = [(*sample, [0] * number) for number, sample in enumerate(self.train)]
        return DataLoader(samples, batch_size=self.hparams.batch_size, collate_fn=_even)


def _even(samples: list[Any]) -> Any:
    return default_collate([sample[:3] for sample in samples])


def _numbered(samples: int, seed: int) -> TensorDataset:
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(samples))


def seen(folder: Path) -> dict[int, list[int]]:
    """Samples of every epoch, over all ranks and attempts."""
    epochs: dict[int, list[int]] = {}
    for file in folder.glob("*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            epochs.setdefault(row["epoch"], []).extend(row["samples"])
    return epochs


class Unshown(Classifier):
    """Without an example of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = None
