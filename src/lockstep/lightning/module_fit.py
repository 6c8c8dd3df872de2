"""A user's ``LightningModule`` on Lightning's Trainer: one attempt of one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar

from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import (
    judge_afresh,
    load_initial_weights,
    load_latest,
    restored_state,
)
from lockstep.engine.run_log import RunLog
from lockstep.engine.state import RunResult
from lockstep.lightning.callbacks import Upload
from lockstep.lightning.ckpt_file import StoreIO
from lockstep.lightning.cluster import agreed_logging, check_loaders, quiet_trainer, rank_arguments
from lockstep.lightning.dataloaders import (
    TrainingLoader,
    check_interval,
    evaluation_loader,
    replaced_loaders,
)
from lockstep.lightning.module_task import ModuleTask
from lockstep.lightning.run_callback import RUN_CHECKPOINTS, RunLogCallback


class ModuleFit:
    """What one attempt trains with."""

    def __init__(self, rank: RankContext, task: ModuleTask) -> None:
        snapshot = load_latest(rank)
        if rank.config.telemetry.profile is not None:
            text = "telemetry.profile is for tasks; a LightningModule is profiled with a profiler of its Trainer"
            rank.note("profile_unused", text, "warning")
        task.renew()
        self._state = restored_state(rank, snapshot)
        self._rank = rank
        self._task = task
        self._snapshot = snapshot
        note = None if snapshot is None else judge_afresh(self._state, snapshot.manifest, rank.plan)
        if note is not None:
            rank.note("judged_afresh", note)
        self._uploads: list[Upload] = []
        self.log = RunLog(rank, self._state, timed=lambda: task.module.parameters())
        self._callback = RunLogCallback(rank, self.log, None if snapshot is None else snapshot.trainer.get("averages"))

    def run(self) -> RunResult:
        """Train until the last step or an agreed stop, and record how the run ended."""
        self.log.start()
        if self.log.ended_by is None:
            self._fit()
        if self._rank.writer is not None:
            self._rank.writer.wait()
        result = self.log.finish(dict(self._state.best_metric or self._callback.evaluated))
        for upload in self._uploads:
            upload.close()
        return result

    def _fit(self) -> None:
        module = self._task.module
        data = self._task.datamodule
        rank = self._rank
        plan = self._rank.plan
        if self._snapshot is None:
            load_initial_weights(module, rank.config.init_from, rank.collectives)
        if plan.sync_batchnorm:
            convert(module)
        with (
            quiet_trainer(),
            replaced_loaders([data, module], self._evaluation_loader, train=self._training_loader, seed=plan.seed),
        ):
            store = StoreIO(plan.batch, self.log, self._snapshot, self._callback.write)
            store.trainer = trainer = pl.Trainer(**self._arguments(store))
            with agreed_logging(trainer):
                trainer.fit(module, datamodule=data, ckpt_path=None if self._snapshot is None else RUN_CHECKPOINTS)

    def _training_loader(self, loader: Any) -> Any:
        rank = self._rank
        batch = rank.plan.batch
        self._check_data(train=loader)
        training = TrainingLoader(loader, rank.world.size, max_batches=batch.samples // batch.batch_size)
        return training.planned(batch, rank.plan.seed, rank.world, self._state)

    def _evaluation_loader(self, loader: Any) -> Any:
        rank = self._rank
        self._check_data(val=loader)
        note_cut = partial(self.log.note_once, "batches_cut")
        return evaluation_loader(loader, rank.world, rank.plan.seed, report=note_cut)

    def _check_data(self, *, train: Any = None, val: Any = None) -> None:
        if self._rank.world.size > 1 and not self._rank.plan.task.opens_files:  # workers must open files themselves
            check_loaders(self._rank.collectives, train=train, val=val)

    def _arguments(self, store: StoreIO) -> dict[str, Any]:
        config = self._rank.config
        plan = self._rank.plan
        arguments = dict(self._task.trainer_arguments)
        batch = plan.batch
        validation = config.validation
        check_interval(arguments, batch)
        callbacks = [self._callback, *arguments.pop("callbacks", [])]
        uploads = [callback for callback in callbacks if isinstance(callback, Upload)]
        for upload in uploads:
            upload.is_closed_by_run = True
        self._uploads = uploads if self._rank.world.is_main else []
        settings: dict[str, Any] = {
            "max_epochs": plan.epochs,
            # A module that optimizes manually may take several optimizer steps a batch, and the Trainer counts them.
            "max_steps": (config.training.max_steps or -1) if self._task.module.automatic_optimization else -1,
            "accumulate_grad_batches": batch.accumulate,
            "gradient_clip_val": config.training.max_grad_norm,
            # With validation.every_steps, the callback sets after each batch whether to validate.
            "check_val_every_n_epoch": 1 if validation.every_steps else validation.every_epochs,
            "num_sanity_val_steps": 0 if self._snapshot else validation.sanity_steps,
            "limit_val_batches": 1 if config.debug.fast_dev_run else config.debug.limit_eval_batches or 1.0,
            "log_every_n_steps": config.telemetry.log_interval,
            "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
            "enable_model_summary": False,
            "detect_anomaly": config.debug.detect_anomaly,
            "default_root_dir": self._rank.run_dir.logs,
        }
        arguments.pop("enable_checkpointing", None)  # RunLogCallback is a Checkpoint callback
        position = self._state.position
        if position and round(position / batch.global_batch) + batch.steps_left(position) != batch.steps_per_epoch:
            # An epoch that is resumed with another global batch has another number of batches than the next one.
            arguments["reload_dataloaders_every_n_epochs"] = 1
        ranks = rank_arguments(plan.placement, self._rank.world, config.distributed)
        plugins = [*ranks.pop("plugins"), store, *arguments.pop("plugins", [])]
        return {**settings, **arguments, **ranks, "callbacks": callbacks, "plugins": plugins}
