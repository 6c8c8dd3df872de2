"""The learning rate of each optimizer step, in every logger."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer


class LearningRate(Callback):
    """Logs the learning rate that a step was *made* with, every ``log_every_n_steps`` steps.

    The name is ``lr``; with several parameter groups ``lr-<group>``, with several optimizers
    ``lr-<optimizer>`` or ``lr-<optimizer>-<group>`` (numbers from 0). ``values`` has the newest ones.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._logged_step = -1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        places = [getattr(wrapped, "optimizer", wrapped) for wrapped in trainer.optimizers]
        name = "lr" if len(places) == 1 else f"lr-{next(i for i, place in enumerate(places) if place is optimizer)}"
        groups = optimizer.param_groups
        if len(groups) == 1:
            self.values[name] = float(groups[0]["lr"])
        else:
            self.values |= {f"{name}-{place}": float(group["lr"]) for place, group in enumerate(groups)}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step = trainer.global_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning sets it from outside the class
        if step == self._logged_step or step % every or not self.values:
            return
        self._logged_step = step
        for logger in trainer.loggers:
            logger.log_metrics(self.values, step=step)
