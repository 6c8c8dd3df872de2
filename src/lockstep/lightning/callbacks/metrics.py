"""``metrics.json``: a row an epoch, as Lockstep's own runs have it."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lockstep.lightning.callbacks.rows import CompleteRows, Row
from lockstep.telemetry.rundir import RunDir


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
