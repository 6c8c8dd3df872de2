"""Ends of a training that all ranks agree on: no improvement, or a signal."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lockstep._compat.lightning import ReducedEarlyStopping
from lockstep.launch.local.signals import StopRequest


class AgreedEarlyStopping(ReducedEarlyStopping):
    """Lightning's early stopping, decided on the mean of the monitored value over all ranks.

    A value that a module logs without ``sync_dist`` differs between ranks; here all ranks count the same
    improvements and stop in the same epoch. The arguments are those of Lightning's ``EarlyStopping``.
    """

    _trainer: Trainer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = None

    def reduced(self, current: Tensor) -> Tensor:
        assert self._trainer is not None, "a trainer sets its callbacks up"
        strategy = self._trainer.strategy
        mean: Tensor = strategy.reduce(current.clone().to(strategy.root_device), reduce_op="mean")
        return mean


class StopOnSignal(Callback):
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
        # Not earlier: Lightning puts its own handlers in place just before.
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

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._request.restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._request.restore()
