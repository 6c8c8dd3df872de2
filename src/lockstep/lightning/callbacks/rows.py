"""Epochs as complete rows: what Lightning knows of an epoch when everything about it has been logged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.scalars import as_row

Row = dict[str, Any]


class CompleteRows(Callback):
    """Base of callbacks that want one row an epoch: subclasses define :meth:`take_row`, called on rank 0.

    Lightning calls a callback's ``on_train_epoch_end`` before the module's own, and steps the schedulers later
    still. So a row is put together when the next epoch starts or training ends: it then has what the module
    logs in ``on_train_epoch_end`` and ``on_validation_epoch_end``.

    A row: ``epoch`` (from 1), ``step`` (optimizer steps so far), every scalar of ``trainer.callback_metrics`` that
    was logged *in this epoch* (``val/loss`` as ``val_loss``), ``lr`` (of the epoch's last optimizer step; the first
    parameter group's) and ``duration_s``. An epoch that a stop request cut short makes no row. Values that a module
    logs without ``sync_dist`` are rank 0's own.
    """

    def __init__(self) -> None:
        self._lr: float | None = None
        self._started = 0.0
        self._ended: Row | None = None
        self._earlier: dict[str, Tensor] = {}

    def take_row(self, trainer: Trainer, row: Row) -> None:
        """One epoch is complete; only on rank 0."""
        raise NotImplementedError

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # A scheduler that steps with the optimizer has moved on by the end of the batch.
        groups = optimizer.param_groups  # none without configure_optimizers()
        self._lr = float(groups[0]["lr"]) if groups else None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._complete(trainer)
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.should_stop and not trainer.is_last_batch:
            return
        self._ended = {
            "epoch": trainer.current_epoch + 1,
            "step": trainer.global_step,
            "lr": self._lr,
            "duration_s": time.perf_counter() - self._started,
        }

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._complete(trainer)

    def _complete(self, trainer: Trainer) -> None:
        # On every rank: to read the metrics may be to reduce them.
        metrics = dict(trainer.callback_metrics)
        ended, self._ended = self._ended, None
        # Lightning never drops a value; one that was not logged again is still the same object.
        fresh = {name: value for name, value in metrics.items() if value is not self._earlier.get(name)}
        self._earlier = metrics
        if ended is not None and trainer.is_global_zero:
            self.take_row(trainer, {"epoch": ended["epoch"], **scalars(fresh), **ended})


def scalars(metrics: dict[str, Tensor]) -> dict[str, float]:
    """The scalars of ``metrics`` as numbers, by the names of rows; without ``x_step`` and ``x_epoch`` beside ``x``."""
    found = {
        name: float(value)
        for name, value in metrics.items()
        if value.numel() == 1 and not any(name == f"{base}{end}" for base in metrics for end in ("_step", "_epoch"))
    }
    return as_row(found)


class JSONMetricsLogger(CompleteRows):
    """Writes ``FOLDER/metrics.json`` after every epoch: ``{"epochs": [{epoch, train_loss, val_loss, …, lr, …}]}``.

    Only rank 0 writes, atomically. A resumed training keeps the rows of the epochs before.
    """

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        self._run = RunDir(Path(folder))
        self._rows: list[Row] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._run.path.mkdir(parents=True, exist_ok=True)
            self._rows = [row for row in self._run.epochs() if row.get("epoch", 0) <= trainer.current_epoch]

    def take_row(self, trainer: Trainer, row: Row) -> None:
        in_run = {"attempt": self._run.read().attempt} if self._run.run_file.exists() else {}
        self._rows.append({**row, **in_run})
        self._run.write_epochs(self._rows)
