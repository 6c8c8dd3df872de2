"""Callbacks for any Lightning ``Trainer``; each works alone.

All but :class:`ConfigurationCheck` act in ``fit`` only: they may stay in the Trainer for ``validate``, ``test`` and
``predict``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lockstep.errors import ConfigError
from lockstep.rundir.folder import RunDir
from lockstep.rundir.mirror import Mirror, refuse_inside
from lockstep.rundir.remote import Remote, is_url
from lockstep.telemetry.loggers import as_row

__all__ = ["ConfigurationCheck", "JSONMetricLogger", "JSONMetricsLogger", "Upload"]

_log = logging.getLogger(__name__)


def logged_since(earlier: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``metrics`` that were logged since they were ``earlier``.

    Lightning keeps every value; one that was not logged again is still the same object.
    """
    return {name: value for name, value in metrics.items() if value is not earlier.get(name)}


class JSONMetricsLogger(Callback):
    """Writes ``FOLDER/metrics.json`` after every epoch: ``{"epochs": [{epoch, train_loss, val_loss, …, lr, …}]}``.

    Only rank 0 writes, atomically. A resumed training keeps the rows of the epochs before.

    A row: ``epoch`` (from 1), ``step`` (optimizer steps so far), every scalar of ``trainer.callback_metrics`` that
    was logged in this epoch (``val/loss`` as ``val_loss``), ``lr`` (of the epoch's last optimizer step; the first
    parameter group's) and ``duration_s``. An epoch that a stop request cut short makes no row. Values that a module
    logs without ``sync_dist`` are those of rank 0.
    """

    def __init__(self, folder: Path | str) -> None:
        self._run = RunDir(Path(folder))
        self._rows: list[dict[str, Any]] = []
        self._lr: float | None = None
        self._started = 0.0
        #: The row of the epoch that has ended, without its metrics: the module's hook may log more of them.
        self._ended: dict[str, Any] | None = None
        self._earlier: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._run.path.mkdir(parents=True, exist_ok=True)
            self._rows = [row for row in self._run.epochs() if row.get("epoch", 0) <= trainer.current_epoch]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # A scheduler that steps with the optimizer has moved on by the end of the batch.
        groups = optimizer.param_groups  # none without configure_optimizers()
        self._lr = float(groups[0]["lr"]) if groups else None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_row(trainer)
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.should_stop and not trainer.is_last_batch:
            return
        seconds = time.perf_counter() - self._started
        epoch = trainer.current_epoch + 1
        self._ended = {"epoch": epoch, "step": trainer.global_step, "lr": self._lr, "duration_s": seconds}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_row(trainer)

    def _write_row(self, trainer: Trainer) -> None:
        metrics = dict(trainer.callback_metrics)  # on every rank: to read them may be to reduce them
        fresh = logged_since(self._earlier, metrics)
        ended = self._ended
        self._earlier = metrics
        self._ended = None
        if ended is not None and trainer.is_global_zero:
            variants = {f"{name}{end}" for name in fresh for end in ("_step", "_epoch")}
            numbers = {name: float(v) for name, v in fresh.items() if v.numel() == 1 and name not in variants}
            self._rows.append({"epoch": ended["epoch"], **as_row(numbers), **ended})
            self._run.write_epochs(self._rows)


#: By the name that some configurations have.
JSONMetricLogger = JSONMetricsLogger


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


class Upload(Callback):
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

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == TrainerFn.FITTING and trainer.is_global_zero:
            self.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The last hook: no rank is in a collective call.
        if stage == "fit" and trainer.is_global_zero and not self.is_closed_by_run:
            self.close()

    def close(self) -> None:
        """Copy the files that have changed, and wait for it."""
        if self.mirror is not None:
            self.mirror.close(self._wait_s)
