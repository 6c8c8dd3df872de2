"""Lightning: a LightningModule that logs its loss, on a Trainer with a CSV logger, and neither bar nor checkpoints."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from pace.by_hand import loader
from pace.pacer import Pacer
from pace.workload import INTERVAL, MAX_NORM, Workload


class Module(lightning.LightningModule):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.model = workload.build()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.workload.optimizer(self.model.parameters())


class Paced(Callback):
    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._pacer: Pacer | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._pacer = Pacer(self._workload, speaks=trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % INTERVAL == 0 and self._pacer is not None:
            self._pacer.tick(trainer.global_step)


def run(workload: Workload) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu" if workload.device == "cpu" else "gpu",
        devices=workload.ranks,
        strategy="ddp" if workload.ranks > 1 else "auto",
        max_epochs=-1,
        max_steps=workload.total_steps,
        gradient_clip_val=MAX_NORM if workload.clip else None,
        log_every_n_steps=INTERVAL,
        callbacks=[Paced(workload)],
        logger=CSVLogger(workload.folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(workload), loader(workload, sharded=False))
