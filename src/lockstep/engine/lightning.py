"""``engine: lightning``: a task on Lightning's Trainer.

The Trainer has the loops, its callbacks and its profiler; one of its batches is one *window*, and its training
step runs Lockstep's own step on it (manual optimization): the same strategy, update and verbs as the native
loop, so losses and weights are the same. Lightning's sampler replacement, accumulation, clipping, loggers and
checkpoints are off: the plan has decided all that, and the run folder is Lockstep's, so either engine resumes it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from torch import nn
from torch.optim import Optimizer

from lockstep.data.loader import Window, windows
from lockstep.engine.fit import Fit
from lockstep.engine.lightning_ranks import KeptSignals, rank_arguments
from lockstep.engine.loop import StepResult
from lockstep.hardware.world import World
from lockstep.plan import BatchPlan


class _Windows:
    """The windows of what is left of an epoch: sized, and the same however often they are walked."""

    def __init__(self, batch: BatchPlan, rank: int, epoch: int, position: int) -> None:
        self._walk = {"batch": batch, "rank": rank, "epoch": epoch, "position": position, "epochs": epoch + 1}
        self._length = batch.steps_left(position)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Window]:
        return windows(**self._walk, ghosts=False)  # type: ignore[arg-type]


class TaskModule(pl.LightningModule):
    """A run of the native engine as a ``LightningModule``: ``model`` is the task's, a batch is a window.

    Args:
        steps: finishes one optimizer step each time it is advanced.
        finish: what follows a step (logging, evaluation, checkpoints); false when the run is over.
    """

    def __init__(self, fit: Fit, rank: int, steps: Iterator[StepResult], finish: Callable[[StepResult], bool]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model: nn.Module = fit.strategy.module
        self._fit, self._rank, self._steps, self._finish = fit, rank, steps, finish

    def train_dataloader(self) -> Any:
        state = self._fit.state
        return _Windows(self._fit.plan.batch, self._rank, state.epoch, state.position)

    def configure_optimizers(self) -> Optimizer:
        return self._fit.update.optimizer

    def transfer_batch_to_device(self, batch: Window, device: Any, dataloader_idx: int) -> Window:
        return batch

    def on_train_start(self) -> None:
        # The Trainer counts from where the run stands; `trainer.global_step` is the run's step throughout.
        epochs: Any = self.trainer.fit_loop.epoch_progress.current
        epochs.processed = epochs.completed = self._fit.state.epoch
        self._count()

    def training_step(self, batch: Window, batch_idx: int) -> None:
        result = next(self._steps)
        assert result.window.start == batch.start
        self._count()
        if not self._finish(result):
            self.trainer.should_stop = True

    def _count(self) -> None:
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.total.ready = progress.total.completed = self._fit.state.step


def run_in_trainer(fit: Fit, world: World, steps: Iterator[StepResult], finish: Callable[[StepResult], bool]) -> None:
    """Take ``steps`` in a Trainer until the run is over. Called once per rank, in the attempt's process group."""
    config, state = fit.config, fit.state
    if fit.plan.batch.window(state.position) is None:
        state.epoch, state.position = state.epoch + 1, 0
    with quiet_trainer():
        trainer = pl.Trainer(
            **rank_arguments(fit.plan, world, config.distributed, bare=True),
            max_epochs=fit.plan.epochs,
            limit_val_batches=0,
            reload_dataloaders_every_n_epochs=1,
            num_sanity_val_steps=0,  # validation.sanity_steps has done it
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[KeptSignals()],
            profiler=profiler(config.lightning.profiler, fit.run_dir),
            default_root_dir=fit.run_dir / "logs",
            detect_anomaly=config.debug.detect_anomaly,
        )
        trainer.fit(TaskModule(fit, world.rank, steps, finish))


def profiler(kind: str | None, run_dir: Path) -> Profiler | None:
    """The Trainer's profiler; its report goes to ``logs/`` of the run."""
    if kind is None:
        return None
    where: dict[str, Any] = {"dirpath": run_dir / "logs", "filename": "profile"}
    kinds = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
    made: Profiler = kinds[kind](**where)
    return made


@contextmanager
def quiet_trainer() -> Iterator[None]:
    """Lightning's informational lines go unsaid: the plan has told of devices, and rank 0 speaks through the sinks.

    So do warnings about Lightning's own use of what torch has deprecated, and about resuming and SLURM, which are
    Lockstep's business here.
    """
    names = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")
    before = [(logger, logger.level) for logger in map(logging.getLogger, names)]
    for logger, _ in before:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in (
                ".*LeafSpec.*",
                ".*dataloader is.*not resumable.*",
                ".*than the logging interval.*",
                "The `srun` command is available.*",
            ):
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
