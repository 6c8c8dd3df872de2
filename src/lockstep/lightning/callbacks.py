"""Callbacks for any Lightning ``Trainer``; each works alone.

All but :class:`ConfigurationCheck` act in ``fit`` only: they may stay in the Trainer for ``validate``, ``test`` and
``predict``.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from lockstep._compat.lightning import ReducedEarlyStopping
from lockstep.config import resolve
from lockstep.errors import ConfigError
from lockstep.hardware.monitor import INTERVAL_S
from lockstep.launch.process.signals import StopRequest
from lockstep.rundir.folder import RunDir, new_run_id, utc_now
from lockstep.rundir.heartbeat import Heartbeat
from lockstep.rundir.mirror import Mirror, refuse_inside
from lockstep.rundir.remote import Remote, is_url
from lockstep.telemetry.loggers import as_row, monitored, row_name
from lockstep.telemetry.sinks import monitored as device_monitor

__all__ = [
    "AgreedEarlyStopping",
    "ConfigurationCheck",
    "DeviceMonitor",
    "JSONMetricLogger",
    "JSONMetricsLogger",
    "LearningRate",
    "RunStatus",
    "StopOnSignal",
    "Upload",
]

Row = dict[str, Any]
_log = logging.getLogger(__name__)


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
        stopped = any(isinstance(c, StopOnSignal) and c.stopped_by for c in trainer.callbacks)  # type: ignore[attr-defined]
        self._end("stopped" if stopped else "completed", final_metrics=scalars(trainer.callback_metrics))

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


class AgreedEarlyStopping(ReducedEarlyStopping):
    """Lightning's early stopping, decided on the mean of the monitored value over all ranks.

    A value that a module logs without ``sync_dist`` differs between ranks; here all ranks count the same
    improvements and stop in the same epoch. The arguments are those of Lightning's ``EarlyStopping``.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._strategy = trainer.strategy

    def reduced(self, current: Tensor) -> Tensor:
        mean: Tensor = self._strategy.reduce(current.clone().to(self._strategy.root_device), reduce_op="mean")
        return mean


class StopOnSignal(FitCallback):
    """SIGINT or SIGTERM on any rank ends training on all ranks after the same batch, with a checkpoint.

    A second SIGINT raises :class:`KeyboardInterrupt`. Outside the main thread, where Python has no signals,
    :meth:`request` asks for the stop.

    Args:
        checkpoint_dir: where ``stopped.ckpt`` is written (``trainer.fit(ckpt_path=…)`` resumes from it);
            ``None``: no checkpoint.
        every_n_steps: how often the ranks compare their requests; a larger number means fewer small all-reduces and a
            later stop.

    Attributes:
        stopped_by: the number of the signal that ended the training, on every rank; else ``None``.
    """

    def __init__(self, checkpoint_dir: Path | str | None = None, *, every_n_steps: int = 10) -> None:
        self.stopped_by: int | None = None
        self._checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._every = every_n_steps
        self._request = StopRequest()

    def request(self, signum: int = signal.SIGTERM) -> None:
        """Ask for a stop as if the signal had arrived. May be called from any thread."""
        self._request.request(signum)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not earlier: Lightning installs its handlers just before.
        self._request.install()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Between two steps only: a checkpoint has no half of an accumulation.
        steps, rest = divmod(batch_idx + 1, trainer.accumulate_grad_batches)
        if self.stopped_by is not None or ((rest or steps % self._every) and not trainer.is_last_batch):
            return
        for signum in (signal.SIGINT, signal.SIGTERM):
            if trainer.strategy.reduce_boolean_decision(self._request.requested == signum, all=False):
                self.stopped_by = int(signum)
                trainer.should_stop = True
                if self._checkpoint_dir is not None:
                    trainer.save_checkpoint(self._checkpoint_dir / "stopped.ckpt")
                return

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._request.restore()

    fit_failed = on_train_end


class DeviceMonitor(FitCallback):
    """Appends a line to ``FOLDER/system-<node>.jsonl`` every ``interval_s`` seconds; one writer a node.

    The lines are those of every run (:mod:`lockstep.hardware.monitor`), about the GPUs of this node's ranks.
    """

    def __init__(self, folder: Path | str, *, interval_s: float = INTERVAL_S) -> None:
        self._folder = Path(folder)
        self._interval_s = interval_s
        self._open = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.local_rank:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        gpus = trainer.device_ids if isinstance(trainer.accelerator, CUDAAccelerator) else []
        devices = [f"gpu:{index}" for index in gpus]
        monitor = device_monitor(self._folder, devices, node=trainer.node_rank, interval_s=self._interval_s)
        self._open.enter_context(monitor)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._open.close()

    fit_failed = on_train_end


class LearningRate(Callback):
    """Logs the learning rate that a step was *made* with, every ``log_every_n_steps`` steps.

    The name is ``lr``; with several parameter groups ``lr-<group>``, with several optimizers
    ``lr-<optimizer>`` or ``lr-<optimizer>-<group>`` (numbers from 0). ``values`` has the newest ones.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._logged_step = -1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        optimizers = [getattr(wrapped, "optimizer", wrapped) for wrapped in trainer.optimizers]
        number = next(position for position, each in enumerate(optimizers) if each is optimizer)
        name = "lr" if len(optimizers) == 1 else f"lr-{number}"
        groups = optimizer.param_groups
        for position, group in enumerate(groups):
            self.values[f"{name}-{position}" if len(groups) > 1 else name] = float(group["lr"])

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step = trainer.global_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning sets it from outside the class
        if step == self._logged_step or step % every or not self.values:
            return
        self._logged_step = step
        for logger in trainer.loggers:
            logger.log_metrics(self.values, step=step)


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
