"""``run.json`` and ``heartbeat.json``: what state a training is in, for people and for `lockstep runs`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lockstep.config import resolve
from lockstep.lightning.callbacks.rows import CompleteRows, Row, scalars
from lockstep.lightning.callbacks.stopping import StopOnSignal
from lockstep.telemetry.heartbeat import Heartbeat
from lockstep.telemetry.rundir import RunDir, new_run_id, utc_now
from lockstep.telemetry.scalars import monitored, row_name


class RunStatus(CompleteRows):
    """Keeps the run folder ``FOLDER``: status, best epoch, final metrics, error, and a heartbeat every second.

    The folder is made if it is missing or empty. Only rank 0 writes. With it, ``lockstep runs``, ``lockstep show``
    and everything else that reads run folders know this training.

    Args:
        monitor: what *best* means: a name that the module logs.
        mode: whether less or more of it is better.
    """

    def __init__(self, folder: Path | str, *, monitor: str = "val_loss", mode: Literal["min", "max"] = "min") -> None:
        super().__init__()
        self._path = Path(folder)
        self._monitor, self._sign = monitor, 1.0 if mode == "min" else -1.0
        self._run: RunDir | None = None
        self._best: float | None = None
        self._heartbeat: Heartbeat | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        run = self._run = _open_or_create(self._path, type(pl_module))
        record = run.read()
        best = self._value(record.best_metric)
        if trainer.global_step and best is not None:
            self._best = self._sign * best
        run.begin_attempt({}, _placement(trainer), trainer.global_step)
        run.update(status="running", started_at=record.started_at or utc_now(), final_metrics={})
        self._heartbeat = Heartbeat()
        self._heartbeat.start(run.heartbeat_file, trainer.global_step, _total_steps(trainer))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat(trainer.global_step, _total_steps(trainer))

    def take_row(self, trainer: Trainer, row: Row) -> None:
        value = self._value(row)
        if value is None or self._run is None:
            return
        if self._best is None or self._sign * value < self._best:
            self._best = self._sign * value
            own = {self._monitor, row_name(self._monitor)}
            best = {name: number for name, number in row.items() if name in own or name.startswith("val_")}
            self._run.update(best_epoch=row["epoch"], best_metric=best)

    def _value(self, row: Mapping[str, float]) -> float | None:
        found = monitored(row, self._monitor)
        return found[1] if found else None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        stopped = any(isinstance(c, StopOnSignal) and c.stopped_by for c in trainer.callbacks)  # type: ignore[attr-defined]
        metrics = scalars(dict(trainer.callback_metrics))
        self._end("stopped" if stopped else "completed", final_metrics=metrics)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            self._end("stopped")
        else:
            self._end("failed", error="".join(traceback.format_exception(exception)))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_heartbeat()

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _end(self, status: str, **changes: Any) -> None:
        self._stop_heartbeat()
        if self._run is not None:
            self._run.update(status=status, completed_at=utc_now(), **changes)


def _open_or_create(path: Path, kind: type) -> RunDir:
    if (path / "run.json").exists():
        return RunDir.open(path)
    config = resolve({"task": {"name": f"{kind.__module__}:{kind.__qualname__}"}})
    return RunDir.create(path, config, run_id=new_run_id(path), command=sys.argv)


def _placement(trainer: Trainer) -> dict[str, Any]:
    on_cpu = isinstance(trainer.accelerator, CPUAccelerator)
    return {
        "accelerator": "cpu" if on_cpu else trainer.strategy.root_device.type,
        "devices": ["cpu" if on_cpu else f"gpu:{index}" for index in trainer.device_ids],
        "strategy": getattr(trainer.strategy, "strategy_name", type(trainer.strategy).__name__),
        "world_size": trainer.world_size,
        "nodes": trainer.num_nodes,
        "precision": str(trainer.precision),
    }


def _total_steps(trainer: Trainer) -> int | None:
    """Optimizer steps of the whole training, where Lightning knows."""
    try:
        total = trainer.estimated_stepping_batches
    except Exception:  # raised by Lightning for data of unknown length
        return None
    return int(total) if total not in (float("inf"), -1) else None
