"""A small LightningModule and Trainer for these tests; the ranks of a test can import it."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler


class Probe(LightningModule):
    """Four batches an epoch; logs the epoch's number wherever a module may log."""

    def __init__(self, *, val_loss: list[float] | None = None, fail_in_epoch: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.val_loss, self.fail_in_epoch = val_loss, fail_in_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fail_in_epoch == self.current_epoch:
            raise ValueError("the probe broke, as it was told to")
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        values = self.val_loss or [1.0]
        self.log("val_loss", values[min(self.current_epoch, len(values) - 1)], sync_dist=False)

    def on_validation_epoch_end(self) -> None:
        self.log("own_val", float(self.current_epoch + 1))

    def on_train_epoch_end(self) -> None:
        self.log("own_train", float(self.current_epoch + 1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(8 * self.trainer.world_size, 2)), batch_size=2)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(2 * self.trainer.world_size, 2)), batch_size=2)


class Breaking(Probe):
    """Fails while there is a file ``broken``, which says where."""

    def __init__(self) -> None:
        super().__init__()
        self._break("init")

    def setup(self, stage: str) -> None:
        self._break("setup")

    def on_train_epoch_start(self) -> None:
        self._break(f"epoch {self.current_epoch}")

    def _break(self, where: str) -> None:
        if Path("broken").exists() and Path("broken").read_text() == where:
            raise ValueError(f"no luck in {where}")


class Numbers(LightningModule):
    """Learns from the numbers 0 to ``samples`` - 1, and writes down which of them it saw, per rank and epoch."""

    def __init__(self, *, samples: int = 21, batch_size: int = 4, name: str = "seen", batchnorm: bool = False) -> None:
        super().__init__()
        self.samples, self.batch_size, self.name = samples, batch_size, name
        self.layer = torch.nn.Sequential(torch.nn.Linear(1, 1), *[torch.nn.BatchNorm1d(1)] * batchnorm)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with Path(f"{self.name}-{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.current_epoch, batch.tolist()]) + "\n")
        return self.layer(batch[:, None].float()).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(self.samples), batch_size=self.batch_size, shuffle=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(4), batch_size=2)  # type: ignore[arg-type]

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(5), batch_size=2)  # type: ignore[arg-type]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return (10 * batch).tolist()


class Weight(Numbers):
    """Predicts its weight."""

    def predict_step(self, batch: Any, batch_idx: int) -> float:
        return float(self.layer[0].weight)


class Kept(Numbers):
    """Its checkpoints have the arguments."""

    def __init__(self, *, samples: int = 21) -> None:
        super().__init__(samples=samples)
        self.save_hyperparameters()


class Tenfold(Kept):
    """Predicts numbers and their tenfold, all five in one batch."""

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(5), batch_size=5)  # type: ignore[arg-type]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"tenfold": 10 * batch, "output": self.layer(batch[:, None].float())[:, 0]}


class Named(Numbers):
    """Its checkpoints name a class."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"encoder": [{"class_path": "evil.Model"}]})


class Unequal(Numbers):
    """Five validation samples, 0 to 4, one by one, logged as they are; its buffers are DDP's to hand out."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", batch.double().mean(), sync_dist=True)
        self.log("val_most", self.layer[1].running_mean.mean(), sync_dist=True, reduce_fx="max")
        self.log("val_least", self.layer[1].running_mean.mean(), sync_dist=True, reduce_fx="min")

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(5))  # type: ignore[arg-type]


class Written(BasePredictionWriter):
    """Writes the predictions of each batch, with the indices of its samples, to a file a rank."""

    def __init__(self) -> None:
        super().__init__("batch")

    def write_on_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, prediction: Any, batch_indices: Any, *_: Any
    ) -> None:
        with Path(f"predicted-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([batch_indices, prediction]) + "\n")


class Weighted(Numbers):
    """Draws its samples by weight."""

    def train_dataloader(self) -> DataLoader[Any]:
        sampler = WeightedRandomSampler([1.0] * self.samples, self.samples)
        return DataLoader(torch.arange(self.samples), batch_size=self.batch_size, sampler=sampler)  # type: ignore[arg-type]


class Batched(Numbers):
    """Puts its batches together itself."""

    def train_dataloader(self) -> DataLoader[Any]:
        batches = BatchSampler(RandomSampler(range(self.samples)), self.batch_size, drop_last=False)
        return DataLoader(torch.arange(self.samples), batch_sampler=batches)  # type: ignore[arg-type]


def make_trainer(folder: Path, callbacks: list[Any], **settings: Any) -> Trainer:
    settings = {"max_epochs": 3, "logger": False, "enable_checkpointing": False} | settings
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **{"devices": 1, **settings},
    )


def be_rank(rank: int) -> dict[str, Any]:
    """Let Lightning take the calling process, whose group exists, as a rank; settings for its Trainer."""
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.simplefilter("default")
    return {"devices": 2, "strategy": "ddp"}
