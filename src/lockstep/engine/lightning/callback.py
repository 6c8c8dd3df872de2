"""The events of a run from a Trainer that trains a user's module, and the requests that ranks agree on after a step.

Lightning's state goes to Lockstep's checkpoints: hashed, atomic, written beside training, read on any ranks.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from lockstep._compat.lightning import STEPPED
from lockstep.checkpoint.content import saveable
from lockstep.checkpoint.store import Snapshot
from lockstep.engine.lightning.dataloaders import Step, epoch_steps
from lockstep.engine.optim.averages import Averages
from lockstep.engine.optim.step import match_layouts
from lockstep.engine.rank_context import RankContext
from lockstep.engine.run_log import RunLog
from lockstep.engine.state import EndedBy, TrainState
from lockstep.engine.strategies.base import FLAG_INTERVAL, Flags
from lockstep.engine.strategies.partition import blocks_of, checkpoint_activations
from lockstep.engine.task import Task
from lockstep.planning import BatchPlan
from lockstep.telemetry.progress_board import Activity, pulse
from lockstep.telemetry.scalars import as_row, monitored, row_name

#: What stands for the run's own checkpoints where Lightning wants a path.
OWN = "lockstep"
#: The loops are made again from the run's own state; the types of hyper-parameters would need pickle.
_NOT_KEPT = ("loops", "hparams_type", "datamodule_hparams_type")
#: Without them a resumed training would be another one: an error, if they cannot be saved.
_OPTIMIZERS = ("optimizer_states", "lr_schedulers")
#: Where Lightning keeps what ``save_hyperparameters()`` of module and data module took.
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class StoreIO(TorchCheckpointIO):
    """Saves under :data:`OWN` what ``write`` takes, and loads ``snapshot``; other paths are files, as ever.

    Args:
        write: takes weights and the rest of Lightning's state; called on rank 0.
        dropped: takes the entries, with their classes, that only code of the file could read again; called on rank 0.
        restored: the checkpoint to resume from.
        micro_batches: of this epoch that are done, and of one step.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any], dict[str, Any]], None],
        dropped: Callable[[list[str]], None],
        restored: Snapshot | None,
        state: TrainState,
        micro_batches: tuple[int, int],
    ) -> None:
        super().__init__()
        self._write, self._dropped, self._restored, self._state = write, dropped, restored, state
        self._done, self._per_step = micro_batches
        self.trainer: Trainer | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if path != OWN:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        rest = {key: value for key, value in checkpoint.items() if key not in (*_NOT_KEPT, "state_dict")}
        # What module and callbacks add may be any object. The module has its hyper-parameters already: no warning.
        parts = {key: rest.pop(key) for key in (*_HYPER_PARAMETERS, "callbacks") if key in rest}
        needed = {key: rest.pop(key) for key in _OPTIMIZERS if key in rest}
        own, dropped = saveable(rest)
        for key, part in parts.items():
            own[key], within = saveable(part)
            dropped += within if key == "callbacks" else []
        self._dropped(dropped)
        self._write(checkpoint["state_dict"], {**own, **needed})

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if path != OWN:
            return super().load_checkpoint(path, *args, **kwargs)
        assert self._restored is not None and self.trainer is not None
        rest = deepcopy(self._restored.trainer["lightning"])
        loops = {"fit_loop": self._loops(self.trainer, rest["global_step"])}
        return {**rest, "state_dict": dict(self._restored.model), "loops": loops}

    def _loops(self, trainer: Trainer, global_step: int) -> dict[str, Any]:
        """The progress of the Trainer's loops at the run's epoch and position, for this number of ranks."""
        loops = deepcopy(trainer.fit_loop.state_dict())
        epoch, begun = self._state.epoch, self._state.epoch + (self._state.position > 0)
        set_progress(loops["epoch_progress"], ready=begun, started=begun, processed=epoch, completed=epoch)
        steps = self._done // self._per_step
        total = self._state.step * self._per_step
        set_progress(
            loops["epoch_loop.batch_progress"], **dict.fromkeys(("ready", "started", "processed", "completed"), total)
        )
        for counter in loops["epoch_loop.batch_progress"]["current"]:
            loops["epoch_loop.batch_progress"]["current"][counter] = self._done
        loops["epoch_loop.state_dict"][STEPPED] = self._state.step
        automatic = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
        manual = loops["epoch_loop.manual_optimization.optim_step_progress"]
        for progress in (automatic, manual):
            set_progress(progress, ready=global_step, completed=global_step)
            progress["current"] = dict.fromkeys(progress["current"], steps)
        return loops


def set_progress(progress: dict[str, Any], **counters: int) -> None:
    """Of one of a Trainer's loops, as its checkpoints have it."""
    progress["total"].update(counters)
    progress["current"].update(counters)


def save(trainer: Trainer) -> None:
    """Collective: rank 0 saves Lightning's whole state in the run's checkpoints."""
    trainer.save_checkpoint(OWN, weights_only=False)


class RunLogCallback(Checkpoint):
    """Drives the run log from a Trainer: counts steps and samples, saves, and stops all ranks on the same step.

    A ``Checkpoint`` in Lightning's sense: its epoch-end hook comes after the module's own, so rows are complete.
    State is saved at the start of the next batch, when the module's hooks and the schedulers have run.

    Args:
        averaged: the averaged weights of a checkpoint that the run resumes from.

    Attributes:
        saves_best: whether the checkpoint that is being saved is the best so far.
        averages: of the weights; in use while it validates and saves. Made when the module is on its device.
    """

    def __init__(self, rank: RankContext, log: RunLog, averaged: Mapping[str, Any] | None = None) -> None:
        self.saves_best = False
        self.averages: Averages | None = None
        self._averaged = averaged
        self._rank, self._log, self._state = rank, log, log.state
        self._losses: list[tuple[Tensor, int]] = []
        self._returns_loss = False
        self._steps: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._micro = 0
        #: Whether to save at the next batch, and as the best or not.
        self._due: bool | None = None
        self._left_at: float | None = None
        self._waited_s = 0.0
        self._earlier: dict[str, Any] = {}
        self._norm: float | None = None
        self._remarked = False
        #: Whether the latest validation was within an epoch, and so has been judged already.
        self._judged = False
        self._lr = math.nan

    def state_dict(self) -> dict[str, Any]:
        """In checkpoint files of the user's own callbacks: the progress of the training, in the order of the run."""
        state = self._state
        return {"epoch": state.epoch, "position": state.position, "global_batch": self._batch.global_batch}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            match_layouts(optimizer)  # Lightning has restored them
        if self._rank.config.training.activation_checkpointing:
            checkpoint_activations(pl_module, blocks_of(Task(), pl_module))
        self.averages = Averages(self._rank.config.averaging, pl_module, self._rank.plan.total_steps)
        self.averages.restore(self._averaged)
        pulse.at(Activity.FIRST_STEP, self._state.step)
        self._log.unpause()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._steps = epoch_steps(self._batch, self._rank.collectives.rank, self._state.position)
        self._step, self._micro = None, 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save_if_due(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        pulse.at(Activity.STEP)
        trainer.fit_loop.restarting = False  # else plateau schedulers would miss the end of a resumed epoch
        if self._left_at is not None:
            self._waited_s += time.perf_counter() - self._left_at
        self._save_if_due(trainer)
        groups = trainer.optimizers[0].param_groups if trainer.optimizers else []
        self._lr = float(groups[0]["lr"]) if groups else math.nan
        if self._step is None:
            self._step = next(self._steps)
            if self._log.is_logged(self._state.step + 1):
                self._log.time_own_work()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._log.is_logged(self._state.step + 1):
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._step is not None
        start, stop = self._step.mine[self._micro]
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            # The Trainer has divided it for the accumulation.
            self._returns_loss = True
            self._losses.append((loss.detach() * trainer.accumulate_grad_batches, stop - start))
        self._micro += 1
        stepped = self._micro == len(self._step.mine)
        if stepped:
            self._finish_step(trainer, self._step)
            self._step, self._micro = None, 0
        if self._rank.config.validation.every_steps is not None:
            # Lightning validates every N batches or at the ends of epochs; this makes it do both.
            trainer.val_check_batch = 1 if stepped and self._validates() else sys.maxsize
        self._left_at = time.perf_counter()

    def _validates(self) -> bool:
        """Whether a validation follows this step: at the end of every N epochs, and every N steps."""
        every, state = self._rank.config.validation, self._state
        if self._is_epoch_over:
            return (state.epoch + 1) % every.every_epochs == 0
        return every.every_steps is not None and state.step % every.every_steps == 0

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        pulse.at(Activity.EVALUATING)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.at(Activity.COMPUTING_METRICS)  # of the module's own hook, which comes after this one

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.at(Activity.EVALUATING)
        self._log.pause()
        if self.averages is not None:  # else it is the sanity check
            self.averages.swap()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.at(Activity.HOOKS)
        if self.averages is not None:
            self.averages.swap()
        self._log.unpause()
        self._left_at = time.perf_counter()
        if trainer.sanity_checking:
            return
        self._judged = not trainer.is_last_batch
        if trainer.is_last_batch:
            return  # the epoch's row judges it
        metrics = _of_validation(_numbers(trainer.callback_metrics))
        improved = self._judge(metrics)
        self._log.evaluated(metrics, improved)
        if improved:
            self._due = True
        trainer.should_stop = trainer.should_stop or self._log.ended_by is not None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._is_epoch_over and self._log.ended_by is not EndedBy.COMPLETED:
            return  # a stop within an epoch
        loss, speed = self._log.epoch_so_far()
        row = {"train_loss": loss} if self._returns_loss else {}
        row |= _numbers(self._fresh(trainer))
        row |= {"lr": self._lr, "samples_per_s": speed.samples_per_s, "duration_s": speed.seconds}
        improved = not (self._judged and _is_of_validation(self._rank.plan.monitor)) and self._judge(row)
        if self._log.ended_by is EndedBy.COMPLETED:
            trainer.should_stop = True
        self._log.epoch(row, improved, ended=self._is_epoch_over)
        self._due = improved
        self._begin_epoch()
        if trainer.should_stop and self._log.ended_by is None:  # a callback of the user's
            self._log.ended_by = EndedBy.COMPLETED

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log.flush()
        if self._due is None and self._log.ended_by is not EndedBy.COMPLETED:
            self._due = False
        self._save_if_due(trainer)
        pulse.at(Activity.ENDING)

    def _fresh(self, trainer: pl.Trainer) -> dict[str, Any]:
        """What was logged since the last epoch's row: Lightning keeps every value, as the same object."""
        metrics, earlier = dict(trainer.callback_metrics), self._earlier
        self._earlier = metrics
        return {name: value for name, value in metrics.items() if value is not earlier.get(name)}

    # One step.

    @property
    def _batch(self) -> BatchPlan:
        return self._rank.plan.batch

    @property
    def _is_epoch_over(self) -> bool:
        return self._batch.window(self._state.position) is None

    def _finish_step(self, trainer: pl.Trainer, step: Step) -> None:
        state, over = self._state, self._batch.window(step.stop) is None
        state.advance(len(step.mine), step.stop - step.start, state.epoch, step.stop)
        assert self.averages is not None
        self.averages.update(state.step)
        self._log.step(step.stop - step.start, self._waited_s)
        self._waited_s = 0.0
        logs = self._log.is_logged(state.step)
        on_host = trainer.strategy.root_device.type == "cpu"
        if on_host or over or logs or state.step % FLAG_INTERVAL == 0:
            self._agree(trainer, over)
        if logs:
            loss = self._logged_loss(trainer)
            self._log.log_step(self._lr, self._norm, _numbers(trainer.logged_metrics), without_items=loss)

    def _agree(self, trainer: pl.Trainer, epoch_over: bool) -> None:
        """Sum losses and requests over ranks, so that all of them act on the same step."""
        device = trainer.strategy.root_device
        losses = torch.stack([loss.double() * size for loss, size in self._losses]).sum() if self._losses else 0.0
        count = float(sum(size for _, size in self._losses))
        self._losses = []
        sums = torch.tensor([0.0, count, *self._log.requests(self._state.step)], dtype=torch.float64, device=device)
        sums[0] += losses
        if self._rank.collectives.size > 1:
            dist.all_reduce(sums)
        total, count, *requests = sums.tolist()
        self._log.losses.add(total, count)
        flags = Flags(*requests)
        if flags.save and not epoch_over:
            self._due = False
        self._log.agreed(flags)
        if self._log.ended_by is not None:
            trainer.should_stop = True
            if not epoch_over and self._log.ended_by is not EndedBy.COMPLETED:
                trainer.limit_val_batches = 0  # a stop within an epoch does not wait for an evaluation

    def _logged_loss(self, trainer: pl.Trainer) -> float | None:
        """Of a module that returns none, as with manual optimization."""
        if self._returns_loss:
            return math.nan
        names = [f"{name}{step}" for name in ("loss", "train_loss", "train/loss") for step in ("", "_step")]
        return next((float(trainer.logged_metrics[name]) for name in names if name in trainer.logged_metrics), None)

    def _judge(self, row: dict[str, float]) -> bool:
        """Judge by rank 0's value: what a module logs without sync_dist differs between ranks."""
        found = self._rank.collectives.broadcast(monitored(row, self._rank.plan.monitor))
        self._remark(found[0] if found else None, row)
        return found is not None and self._log.judge(_of_validation(row), found[1])

    def _remark(self, name: str | None, row: Mapping[str, float]) -> None:
        """Report once by what the best epoch is judged, where that is not the monitor itself."""
        monitor = self._rank.plan.monitor
        if self._remarked or name in (monitor, row_name(monitor)):
            return
        self._remarked = True
        text = f"There are several validation loaders: the best epoch is judged by {name}."
        if name is None:
            names = ", ".join(row.keys() - {"train_loss", "lr", "samples_per_s", "duration_s"}) or "nothing"
            text = f"No epoch is the best: the module does not log {monitor!r}; it logs {names}."
        self._rank.note("monitor_missing", f"{text} checkpoint.monitor sets another name.")

    def _save_if_due(self, trainer: pl.Trainer) -> None:
        if self._due is not None:
            self.saves_best, self._due = self._due, None
            self._log.saved()
            assert self.averages is not None
            with pulse.during(Activity.SAVING), self.averages.in_use():
                save(trainer)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The scalars among ``metrics``, by the names of rows. The run's own mean of the loss keeps its name."""
    found = {name: float(value) for name, value in metrics.items() if torch.as_tensor(value).numel() == 1}
    return as_row(found, taken=("train_loss",))


def _of_validation(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if _is_of_validation(name)}


def _is_of_validation(name: str) -> bool:
    return row_name(name).startswith("val_")
