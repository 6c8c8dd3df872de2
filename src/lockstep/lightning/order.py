"""Lockstep's order of training samples in a ``Trainer`` that has no run of Lockstep's: ``lockstep lightning fit``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lockstep.engine.distributed.sync_batchnorm import has_batchnorm
from lockstep.engine.lightning.callback import set_progress
from lockstep.engine.lightning.dataloaders import orders, training_loader
from lockstep.engine.state import TrainState
from lockstep.errors import CheckpointError
from lockstep.hardware.world import World
from lockstep.planning.batch import BatchPlan, resolve_batch


class TrainingOrder(Callback):
    """Knows how far into the epoch training is, and keeps it in the Trainer's checkpoints.

    Put it before callbacks that save. A batch of the loader that :meth:`loader` returns is a micro-batch; a step
    takes ``accumulate_grad_batches`` of them, on every rank.

    Args:
        seed: of the order.
    """

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._seed = world, seed
        self._state = TrainState()
        self._batch: BatchPlan | None = None
        self._saved_batch: int | None = None
        self._accumulate: int | None = None
        self._micro = 0

    def loader(self, loader: Any, trainer: Trainer, module: LightningModule) -> Any:
        """``loader`` in Lockstep's order, from where the checkpoint stands; on one device it may keep its own.

        Raises:
            UnsupportedError, DataError: a loader whose samples Lockstep cannot put in order.
            CheckpointError: it was saved in mid-epoch with another global batch.
        """
        if not orders(loader, self._world.size):
            return loader
        # The Trainer may ask for its loader again, and has what fits by then.
        self._accumulate = self._accumulate or trainer.accumulate_grad_batches
        self._batch, decisions = resolve_batch(
            samples=len(loader.sampler),
            ranks=self._world.size,
            devices_per_rank=1,
            batch_size=loader.batch_size,
            accumulate=self._accumulate,
            global_batch_size=None,
            tail="drop" if loader.drop_last else "spread",
            lanes=None,
            has_batchnorm=has_batchnorm(module),
            sync_batchnorm=False,
            even=True,
        )
        if self._batch.accumulate != trainer.accumulate_grad_batches:
            rank_zero_warn(f"accumulate_grad_batches is {decisions['accumulate'].reason}")
            trainer.accumulate_grad_batches = self._batch.accumulate
        if self._batch.window(self._state.position) is None:
            self._state.epoch, self._state.position = self._state.epoch + 1, 0
        if self._state.position and self._saved_batch != self._batch.global_batch:
            raise CheckpointError(
                f"the checkpoint was saved in mid-epoch at a global batch of {self._saved_batch}, "
                f"and it is {self._batch.global_batch} now",
                why="LightningCLI's batch is per device, and the Trainer counts the batches of an epoch",
                fix="resume on as many devices as before until the epoch is over; or train with "
                "`lockstep train file.py:Module`, which resumes on any number",
            )
        return training_loader(loader, self._batch, self._seed, self._world, self._state)

    def state_dict(self) -> dict[str, Any]:
        if self._batch is None:
            return {}
        return {
            "epoch": self._state.epoch,
            "position": self._state.position,
            "global_batch": self._batch.global_batch,
            "seed": self._seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seed = int(state_dict["seed"])
        self._saved_batch = int(state_dict["global_batch"])
        self._state.epoch, self._state.position = int(state_dict["epoch"]), int(state_dict["position"])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A stop in mid-epoch resumes in that epoch; Lightning counts an epoch that ``max_steps`` ended as done."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state and state["position"]:
            epoch, progress = int(state["epoch"]), checkpoint["loops"]["fit_loop"]["epoch_progress"]
            set_progress(progress, ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._micro = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._micro += 1
        if self._batch is not None and self._micro == self._batch.accumulate:  # else the loader keeps its own order
            window = self._batch.window(self._state.position)
            assert window is not None, "a batch belongs to a step"
            self._state.position, self._micro = window[1], 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_last_batch:  # and not a stop in mid-epoch
            self._state.epoch, self._state.position, self._micro = trainer.current_epoch + 1, 0, 0
