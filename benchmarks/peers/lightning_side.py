"""The experiment in Lightning: a LightningModule, the Trainer's own ddp, checkpoints by ModelCheckpoint.

Variants: ``default``; ``use_distributed_sampler=False`` (a Trainer argument); ``StatefulDataLoader`` (torchdata's,
whose state the Trainer keeps in its checkpoints), alone and with torchdata's ``StatefulDistributedSampler``, so that
the Trainer puts in no sampler of its own.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from peers.probe import LR, SEED, VALIDATION_BATCH, Diary, Job, Probe, Stopped, Values, count, subject

STATEFUL = "StatefulDataLoader"


class Module(lightning.LightningModule):
    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.probe = probe
        self.count = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.probe(batch).mean()
        self.log("loss", loss, batch_size=count(batch), sync_dist=True)
        return loss

    def validation_step(self, values: Tensor, batch_idx: int) -> None:
        self.log("mean", values.mean(), batch_size=len(values), sync_dist=True)
        self.count.update(torch.ones(len(values)))
        self.log("count", self.count)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


class Keeper(Callback):
    """Writes the diary after every optimizer step; ends the job where it is to end."""

    def __init__(self, job: Job) -> None:
        self.diary = Diary()
        self._stop_after = None if job.resume else job.stop_after
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._stop_after:  # ModelCheckpoint has saved at the end of the batch before
            raise Stopped

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            loss = float(trainer.callback_metrics["loss"])
            self.diary.note(self._step, trainer.current_epoch, loss, pl_module.probe)


def run(job: Job) -> dict[str, Any]:
    lightning.seed_everything(SEED, verbose=False)
    keeper = Keeper(job)
    callbacks: list[Callback] = [keeper]
    if job.kind == "resume":
        callbacks.append(
            ModelCheckpoint(job.folder, filename="{step}", every_n_train_steps=job.stop_after or 10**6, save_top_k=-1)
        )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=job.ranks,
        strategy="ddp" if job.ranks > 1 else "auto",
        max_epochs=job.epochs,
        accumulate_grad_batches=job.accumulate,
        use_distributed_sampler=job.variant != "use_distributed_sampler=False",
        callbacks=callbacks,
        enable_checkpointing=job.kind == "resume",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    probe, samples = subject(job.kind, job.samples)
    module = Module(probe)
    if job.kind == "validation":
        (metrics,) = trainer.validate(module, DataLoader(Values(), batch_size=VALIDATION_BATCH), verbose=False)
        return {"count": metrics["count"], "mean": metrics["mean"]}
    with contextlib.suppress(Stopped):
        trainer.fit(module, _loader(job, samples), ckpt_path=_checkpoint(job.folder) if job.resume else None)
    return keeper.diary.result(module.probe)


def _loader(job: Job, samples: Any) -> Any:
    if not job.variant.startswith(STATEFUL):
        return DataLoader(samples, batch_size=job.batch, shuffle=job.shuffle)
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    if job.variant == STATEFUL:
        return StatefulDataLoader(samples, batch_size=job.batch, shuffle=job.shuffle)
    sampler = StatefulDistributedSampler(samples, job.ranks, int(os.environ.get("RANK", "0")), job.shuffle, SEED)
    return StatefulDataLoader(samples, batch_size=job.batch, sampler=sampler)


def _checkpoint(folder: str) -> Path:
    (checkpoint,) = Path(folder).glob("*.ckpt")
    return checkpoint
