"""Callbacks for any Lightning ``Trainer``; each works alone.

All but :class:`ConfigurationCheck` act in ``fit`` only: they may stay in the Trainer for ``validate``, ``test`` and
``predict``.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lockstep.config import resolve
from lockstep.errors import ConfigError
from lockstep.rundir.folder import RunDir, new_run_id, utc_now
from lockstep.rundir.heartbeat import Heartbeat
from lockstep.rundir.mirror import Mirror, refuse_inside
from lockstep.rundir.remote import Remote, is_url
from lockstep.telemetry.loggers import as_row, monitored, row_name

__all__ = ["ConfigurationCheck", "JSONMetricLogger", "JSONMetricsLogger", "RunStatus", "Upload"]

#: Callbacks of earlier versions, and their replacements.
_GONE = {
    "AgreedEarlyStopping": "Lightning's EarlyStopping, on a value logged with sync_dist=True",
    "DeviceMonitor": "Lightning's DeviceStatsMonitor; lockstep.lightning.fit records the devices itself",
    "LearningRate": "Lightning's LearningRateMonitor; lockstep.lightning.fit records the rate itself",
    "StopOnSignal": "lockstep.lightning.fit, which stops on a signal with a checkpoint",
}

Row = dict[str, Any]
_log = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    if name in _GONE:
        raise ConfigError(f"lockstep.lightning.callbacks.{name} is gone", fix=f"use {_GONE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class FitCallback(Callback):
    """Base of callbacks that clean up when ``fit`` fails: subclasses define :meth:`fit_failed`."""

    def fit_failed(self, trainer: Trainer, exception: BaseException) -> None:
        """Clean up on every rank after ``exception``. An error in here is logged, so that it does not hide that one."""
        raise NotImplementedError

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        try:
            self.fit_failed(trainer, exception)
        except Exception as error:
            _log.warning(f"{type(self).__name__} could not clean up: {type(error).__name__}: {error}")


class CompleteRows(Callback):
    """Base of callbacks that want one row an epoch: subclasses define :meth:`take_row`, called on rank 0.

    Lightning calls a callback's ``on_train_epoch_end`` before that of the module, and steps the schedulers later.
    So a row is put together when the next epoch starts or training ends.

    A row: ``epoch`` (from 1), ``step`` (optimizer steps so far), every scalar of ``trainer.callback_metrics`` that
    was logged *in this epoch* (``val/loss`` as ``val_loss``), ``lr`` (of the epoch's last optimizer step; the first
    parameter group's) and ``duration_s``. An epoch that a stop request cut short makes no row. Values that a module
    logs without ``sync_dist`` are those of rank 0.
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
        seconds = time.perf_counter() - self._started
        epoch = trainer.current_epoch + 1
        self._ended = {"epoch": epoch, "step": trainer.global_step, "lr": self._lr, "duration_s": seconds}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._complete(trainer)

    def _complete(self, trainer: Trainer) -> None:
        # On every rank: to read the metrics may be to reduce them.
        metrics = dict(trainer.callback_metrics)
        earlier = self._earlier
        ended = self._ended
        self._ended = None
        self._earlier = metrics
        # Lightning never drops a value; one that was not logged again is still the same object.
        fresh = {name: value for name, value in metrics.items() if value is not earlier.get(name)}
        if ended is not None and trainer.is_global_zero:
            self.take_row(trainer, {"epoch": ended["epoch"], **scalars(fresh), **ended})


def scalars(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """The scalars of ``metrics`` as numbers, by the names of rows; without ``x_step`` and ``x_epoch`` beside ``x``."""
    variants = {f"{name}{end}" for name in metrics for end in ("_step", "_epoch")}
    numbers = {name: value for name, value in metrics.items() if value.numel() == 1 and name not in variants}
    return as_row({name: float(value) for name, value in numbers.items()})


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


#: By the name that some configurations have.
JSONMetricLogger = JSONMetricsLogger


class RunStatus(CompleteRows, FitCallback):
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
        self._monitor = monitor
        self._sign = 1.0 if mode == "min" else -1.0
        self._run: RunDir | None = None
        self._best: float | None = None
        self._heartbeat: Heartbeat | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if (self._path / "run.json").exists():
            run = RunDir.open(self._path)
        else:
            config = resolve({"task": {"name": f"{type(pl_module).__module__}:{type(pl_module).__qualname__}"}})
            run = RunDir.create(self._path, config, run_id=new_run_id(self._path), command=sys.argv)
        self._run = run
        record = run.read()
        best = monitored(record.best_metric, self._monitor)
        if trainer.global_step and best is not None:
            self._best = self._sign * best[1]
        run.begin_attempt({}, _placement(trainer), trainer.global_step)
        run.update(status="running", started_at=record.started_at or utc_now(), final_metrics={})
        self._heartbeat = Heartbeat()
        self._heartbeat.start(run.heartbeat_file, trainer.global_step, _total_steps(trainer))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat(trainer.global_step, _total_steps(trainer))

    def take_row(self, trainer: Trainer, row: Row) -> None:
        value = monitored(row, self._monitor)
        if value is None or self._run is None:
            return
        if self._best is None or self._sign * value[1] < self._best:
            self._best = self._sign * value[1]
            monitors = {self._monitor, row_name(self._monitor)}
            best = {name: number for name, number in row.items() if name in monitors or name.startswith("val_")}
            self._run.update(best_epoch=row["epoch"], best_metric=best)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._end("completed", final_metrics=scalars(trainer.callback_metrics))

    def fit_failed(self, trainer: Trainer, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            self._end("stopped")
        else:
            self._end("failed", error="".join(traceback.format_exception(exception)))

    def teardown(self, *_: Any, **__: Any) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _end(self, status: str, **changes: Any) -> None:
        self.teardown()
        if self._run is not None:
            self._run.update(status=status, completed_at=utc_now(), **changes)


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


class ConfigurationCheck(Callback):
    """Prints accelerator, devices, strategy and precision as the trainer resolved them; rank 0, once.

    Args:
        stream: where to; ``None``: standard output.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._printed = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._printed or not trainer.is_global_zero:
            return
        self._printed = True
        ranks = f"{trainer.world_size} ranks" if trainer.world_size > 1 else "1 rank"
        nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
        lines = (
            "Training configuration check:",
            f"- Accelerator: {type(trainer.accelerator).__name__}",
            f"- Devices: {list(trainer.device_ids)} ({trainer.strategy.root_device} on rank 0)",
            f"- Strategy: {type(trainer.strategy).__name__} ({ranks}{nodes})",
            f"- Precision: {trainer.precision}",
        )
        print("\n".join(lines), file=self._stream or sys.stdout, flush=True)


class Upload(FitCallback):
    """Mirrors ``local_dir`` at ``target`` every N epochs and at the end; only rank 0, in a background thread.

    Other ranks do not wait, and end when they are done; rank 0 waits for the last copy. A failure is reported once and
    tried again; it never ends the training. The setting ``storage.mirror`` of a run does the same.

    Args:
        local_dir: for instance the folder of checkpoints and logs; ``None``: the run folder, or ``default_root_dir`` of
            another Trainer.
        target: any path or URL that fsspec knows, such as ``s3://bucket/run``.
        every_n_epochs: how often, besides the end.
        wait_s: how long the end waits for the last copy.

    Raises:
        ConfigError: fsspec does not know the target.
    """

    def __init__(
        self,
        local_dir: Path | str | None = None,
        target: str | None = None,
        *,
        every_n_epochs: int = 1,
        wait_s: float = 600.0,
    ) -> None:
        if target is None:
            raise ConfigError("Upload has no target", fix="give a path or an address, such as s3://bucket/run")
        self._target = target if is_url(target) else f"file://{Path(target).absolute()}"
        self._every = every_n_epochs
        self._wait_s = wait_s
        #: A run of Lockstep sets this, and closes the mirror when its end is recorded.
        self.is_closed_by_run = False
        Remote(self._target)
        self.mirror = None if local_dir is None else self._mirror_of(Path(local_dir))

    def _mirror_of(self, folder: Path) -> Mirror:
        refuse_inside(self._target, folder)
        return Mirror(folder, self._target, interval_s=None, report=_log.warning)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.mirror is None and stage == "fit":
            root = Path(trainer.default_root_dir)
            self.mirror = self._mirror_of(root.parent if (root.parent / "run.json").exists() else root)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # At the start of the next one: an epoch's checkpoint is written after most callbacks have heard of its end.
        due = trainer.current_epoch > 0 and trainer.current_epoch % self._every == 0
        if trainer.is_global_zero and due and self.mirror is not None:
            self.mirror.request()

    def fit_failed(self, trainer: Trainer, exception: BaseException) -> None:
        self._finish(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The last hook: no rank is in a collective call.
        if stage == "fit" and not self.is_closed_by_run:
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            self.close()

    def close(self) -> None:
        """Copy the files that have changed, and wait for it."""
        if self.mirror is not None:
            self.mirror.close(self._wait_s)
