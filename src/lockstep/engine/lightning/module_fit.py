"""A user's ``LightningModule`` on Lightning's Trainer: one attempt of one rank, and the evaluation of a checkpoint."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from lockstep._compat.lightning import STEPPED
from lockstep.checkpoint.content import saveable
from lockstep.checkpoint.store import Snapshot
from lockstep.data.loader import child_signal_kept
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.engine.lightning.callback import OWN, RunLogCallback
from lockstep.engine.lightning.ckpt_file import imported_state, read_file, trainer_loads
from lockstep.engine.lightning.cluster import KeptSignals, quiet_trainer, rank_arguments
from lockstep.engine.lightning.dataloaders import (
    defines,
    evaluation_loader,
    replaced_loaders,
    training_loader,
    used_batches,
)
from lockstep.engine.lightning.module_task import ModuleTask
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import frozen_names, judge_afresh, load_initial_weights, restored_state
from lockstep.engine.run_log import RunLog
from lockstep.engine.state import RunResult
from lockstep.errors import DataError, UnsupportedError
from lockstep.hardware.world import World
from lockstep.telemetry.scalars import as_row

#: The loops are made again from the run's own state; the types of hyper-parameters would need pickle.
_NOT_KEPT = ("loops", "hparams_type", "datamodule_hparams_type", "state_dict")
#: Without them a resumed training would be another one: an error, if they cannot be saved.
_OPTIMIZERS = ("optimizer_states", "lr_schedulers")
#: Where Lightning keeps what ``save_hyperparameters()`` of module and data module took.
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_PROFILERS: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


class ModuleFit:
    """What one attempt trains with."""

    def __init__(self, rank: RankContext, task: ModuleTask, snapshot: Snapshot | None) -> None:
        if rank.plan.strategy.scatters:
            raise UnsupportedError(
                "strategy dp is not available for a LightningModule",
                why="Lightning 2.0 removed it",
                fix="use --strategy auto: it selects ddp on several devices",
            )
        if rank.config.telemetry.profile is not None:
            text = "telemetry.profile is for tasks; a LightningModule is profiled with lightning.profiler"
            rank.note("profile_unused", text, "warning")
        task.renew()
        self._file = task.config.ckpt_path if snapshot is None else None
        if self._file is not None:
            snapshot = read_file(self._file, weights_only=task.config.weights_only is not False)
            self.state = imported_state(snapshot, rank.plan.batch, self._file)
        else:
            self.state = restored_state(rank, snapshot)
        self.rank, self._task, self.snapshot = rank, task, snapshot
        note = None if snapshot is None else judge_afresh(self.state, snapshot.manifest, rank.plan)
        if note is not None:
            rank.note("judged_afresh", note)
        self.log = RunLog(rank, self.state, timed=lambda: task.module.parameters())
        self._callback = RunLogCallback(rank, self.log, None if snapshot is None else snapshot.trainer.get("averages"))

    def run(self) -> RunResult:
        """Train until the last step or an agreed stop, and record how the run ended."""
        self.log.start()
        if self.log.ended_by is None:
            self._fit()
        if self.rank.writer is not None:
            self.rank.writer.wait()
        return self.log.finish(dict(self.state.best_metric))

    def _fit(self) -> None:
        module, data, rank, plan = self._task.module, self._task.datamodule, self.rank, self.rank.plan
        if self.snapshot is None:
            load_initial_weights(module, rank.config.init_from, rank.collectives)
        if plan.sync_batchnorm:
            convert(module, None)
        with (
            trainer_loads(self._file),
            quiet_trainer(),
            child_signal_kept(),
            replaced_loaders(
                [data, module],
                lambda loader: training_loader(loader, plan.batch, plan.seed, rank.world, self.state),
                lambda loader: evaluation_loader(loader, rank.world, plan.seed),
                seed=plan.seed,
            ),
        ):
            self.trainer = pl.Trainer(**self._arguments())
            self.trainer.fit(module, datamodule=data, ckpt_path=None if self.snapshot is None else OWN)

    def _arguments(self) -> dict[str, Any]:
        """Those of the Trainer."""
        config, plan, given = self.rank.config, self.rank.plan, dict(self._task.trainer_arguments)
        batch, validation, precision = plan.batch, config.validation, plan.placement["precision"]
        if precision == "16-mixed" and self.rank.device.type == "cpu":
            precision = "bf16-mixed"  # as Lightning would, with a warning; the plan says so
        callbacks = [self._callback, KeptSignals(), *_as_list(given.pop("callbacks", None))]
        profiler = config.lightning.profiler
        settings: dict[str, Any] = {
            "max_epochs": plan.epochs,
            # A module that optimizes manually may take several optimizer steps a batch, and the Trainer counts them.
            "max_steps": (config.training.max_steps or -1) if self._task.module.automatic_optimization else -1,
            "accumulate_grad_batches": batch.accumulate,
            "gradient_clip_val": config.training.max_grad_norm,
            "precision": "32-true" if precision == "32" else precision,
            # With validation.every_steps, the callback sets after each batch whether to validate.
            "check_val_every_n_epoch": 1 if validation.every_steps else validation.every_epochs,
            "num_sanity_val_steps": 0 if self.snapshot else validation.sanity_steps,
            "limit_val_batches": 1 if config.debug.fast_dev_run else config.debug.limit_eval_batches or 1.0,
            "log_every_n_steps": config.telemetry.log_interval,
            "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
            "enable_model_summary": False,
            "detect_anomaly": config.debug.detect_anomaly,
            "default_root_dir": self.rank.run_dir.logs,
        }
        if profiler is not None:
            settings["profiler"] = _PROFILERS[profiler](dirpath=self.rank.run_dir.logs, filename="profile")
        given.pop("enable_checkpointing", None)  # RunLogCallback is a Checkpoint callback
        position = self.state.position
        if position and round(position / batch.global_batch) + batch.steps_left(position) != batch.steps_per_epoch:
            # An epoch that is resumed with another global batch has another number of batches than the next one.
            given["reload_dataloaders_every_n_epochs"] = 1
        ranks = rank_arguments(plan, self.rank.world, config.distributed)
        plugins = [*ranks.pop("plugins"), StoreIO(self), *_as_list(given.pop("plugins", None))]
        return {**settings, **given, **ranks, "callbacks": callbacks, "plugins": plugins}

    def write(self, weights: dict[str, Any], rest: dict[str, Any]) -> None:
        """Start to write a checkpoint with this state of Lightning's; called on rank 0."""
        assert self._callback.averages is not None
        trainer: dict[str, Any] = {"state": self.log.current_state(), "task": {}, "lightning": rest}
        trainer["averages"] = self._callback.averages.trained()
        frozen = frozen_names(self._task.module)
        self.log.write({"model": weights, "trainer": trainer, "frozen": frozen}, best=self._callback.saves_best)


class StoreIO(TorchCheckpointIO):
    """Saves under :data:`OWN` to the run's checkpoints, and loads that of the run; other paths are files, as ever."""

    def __init__(self, fit: ModuleFit) -> None:
        super().__init__()
        self._fit, self._warned = fit, False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if path != OWN:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        rest = {key: value for key, value in checkpoint.items() if key not in _NOT_KEPT}
        # What module and callbacks add may be any object. The module has its hyper-parameters already: no warning.
        parts = {key: rest.pop(key) for key in (*_HYPER_PARAMETERS, "callbacks") if key in rest}
        needed = {key: rest.pop(key) for key in _OPTIMIZERS if key in rest}
        own, dropped = saveable(rest)
        for key, part in parts.items():
            own[key], within = saveable(part)
            dropped += within if key == "callbacks" else []
        if dropped and not self._warned:
            self._warned = True
            text = "Not in the checkpoints, since only unpickling code could read it again"
            rest_of_text = "A resume calls on_load_checkpoint without it."
            self._fit.rank.note("not_saved", f"{text}: {', '.join(dropped)}. {rest_of_text}", "warning")
        self._fit.write(checkpoint["state_dict"], {**own, **needed})

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if path != OWN:
            return super().load_checkpoint(path, *args, **kwargs)
        snapshot = self._fit.snapshot
        assert snapshot is not None
        rest = deepcopy(snapshot.trainer["lightning"])
        return {**rest, "state_dict": dict(snapshot.model), "loops": {"fit_loop": self._loops(rest["global_step"])}}

    def _loops(self, global_step: int) -> dict[str, Any]:
        """The progress of the Trainer's loops at the run's epoch and position, for this number of ranks."""
        state, batch = self._fit.state, self._fit.rank.plan.batch
        loops = deepcopy(self._fit.trainer.fit_loop.state_dict())
        begun = state.epoch + (state.position > 0)
        set_progress(loops["epoch_progress"], ready=begun, started=begun, processed=state.epoch, completed=state.epoch)
        done, progress = used_batches(state, batch), loops["epoch_loop.batch_progress"]
        total = dict.fromkeys(("ready", "started", "processed", "completed"), state.step * batch.accumulate)
        set_progress(progress, **total)
        progress["current"] = dict.fromkeys(progress["current"], done)
        loops["epoch_loop.state_dict"][STEPPED] = state.step
        automatic = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
        manual = loops["epoch_loop.manual_optimization.optim_step_progress"]
        for progress in (automatic, manual):
            set_progress(progress, ready=global_step, completed=global_step)
            progress["current"] = dict.fromkeys(progress["current"], done // batch.accumulate)
        return loops


def set_progress(progress: dict[str, Any], **counters: int) -> None:
    """Of one of a Trainer's loops, as its checkpoints have it."""
    progress["total"].update(counters)
    progress["current"].update(counters)


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def evaluate_module(
    task: ModuleTask, split: str, device: torch.device, precision: str, seed: int
) -> tuple[dict[str, float], int | None]:
    """What ``task.module`` logs over ``split``, by the names of rows, and how many samples there were.

    Their number is ``None`` where a loader does not say it: of an iterable data set, or several loaders in one.
    """
    module, data = task.module, task.datamodule
    hook = f"{split}_dataloader"
    if split not in ("val", "test") or not any(defines(owner, hook) for owner in (module, data) if owner is not None):
        raise DataError(
            f"this module has no {split} data",
            why=f"neither it nor its data module defines {hook}()",
            fix=f"write {hook}()" + (", or choose --split val" if split == "test" else ""),
        )
    sizes: list[int | None] = []

    def counted(loader: Any) -> Any:
        try:
            sizes.append(len(loader.dataset))
        except (AttributeError, TypeError):
            sizes.append(None)
        return evaluation_loader(loader, World(), seed)

    with quiet_trainer(), replaced_loaders([data, module], lambda loader: loader, counted, seed=seed):
        trainer = pl.Trainer(
            accelerator="cpu" if device.type == "cpu" else "cuda",
            devices=1 if device.type == "cpu" else [device.index],
            precision="32-true" if precision == "32" else precision,  # type: ignore[arg-type]
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        run = trainer.validate if split == "val" else trainer.test
        results = run(module, datamodule=data, verbose=False)
    samples = None if None in sizes else sum(filter(None, sizes))
    return as_row({name: value for result in results for name, value in result.items()}), samples
