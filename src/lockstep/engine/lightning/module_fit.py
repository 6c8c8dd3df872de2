"""One attempt of one rank that trains a user's ``LightningModule`` on Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar

from lockstep.checkpoint.policy import retained
from lockstep.checkpoint.store import Snapshot
from lockstep.checkpoint.writer import BackgroundWriter
from lockstep.config import RunConfig
from lockstep.data.workers import child_signal_kept
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.engine.lightning.callback import Recorder
from lockstep.engine.lightning.checkpoint_io import OWN, StoreIO, save
from lockstep.engine.lightning.cluster import KeptSignals, profiler, quiet_trainer, rank_arguments
from lockstep.engine.lightning.dataloaders import evaluation_loader, replaced_loaders, training_loader
from lockstep.engine.lightning.module_task import ModuleTask
from lockstep.engine.process.determinism import pins
from lockstep.engine.result import RunResult
from lockstep.engine.resume import check_fits, judge_afresh, load_initial_weights, manifest_of
from lockstep.engine.state import TrainState
from lockstep.errors import UnsupportedError
from lockstep.events import Note, RunEnded, Sink
from lockstep.hardware.world import World
from lockstep.plan import Plan
from lockstep.telemetry.rundir import RunDir


@dataclass
class ModuleFit:
    """What one attempt trains with. Rank 0 alone has real ``sink`` and ``writer``.

    Raises:
        CheckpointError: ``snapshot`` is of other data or of another order.
    """

    task: ModuleTask
    config: RunConfig
    plan: Plan
    run_dir: RunDir
    world: World
    collectives: Collectives
    device: torch.device
    snapshot: Snapshot | None
    attempt: int
    sink: Sink
    writer: BackgroundWriter | None
    stop_signal: Callable[[], int | None]
    heartbeat: Callable[[int, int], None]

    def __post_init__(self) -> None:
        if self.plan.strategy.scatters:
            raise UnsupportedError(
                "strategy dp is not there for a LightningModule",
                why="Lightning 2.0 dropped it",
                fix="use --strategy auto: it takes ddp on several devices",
            )
        if self.config.telemetry.profile is not None:
            text = "telemetry.profile is for tasks; a LightningModule is profiled with lightning.profiler"
            self.sink.emit(Note("profile_unused", text, "warning"))
        self._saving_best = False
        self.task.renew()
        self.state = TrainState(position=self.config.debug.start_position)
        if self.snapshot is not None:
            check_fits(self.snapshot.manifest, self.plan)
            self.state = TrainState.from_state_dict(self.snapshot.trainer["state"])
            note = judge_afresh(self.state, self.snapshot.manifest, self.plan)
            if note is not None:
                self.sink.emit(Note("judged_afresh", note))
        self.recorder = Recorder(
            config=self.config,
            plan=self.plan,
            state=self.state,
            collectives=self.collectives,
            sink=self.sink,
            attempt=self.attempt,
            run_dir=self.run_dir.path,
            stop_requested=lambda: self.stop_signal() is not None,
            heartbeat=self.heartbeat,
            save=self._save,
            poll=self.writer.poll if self.writer else lambda: None,
        )

    @property
    def elapsed_s(self) -> float:
        return self.recorder.elapsed_s

    def run(self) -> RunResult:
        """Train until the plan is fulfilled or a stop is agreed on, and record how it ended."""
        recorder = self.recorder
        self.heartbeat(self.state.step, self.plan.total_steps)  # there may be no step left that would tell
        if not recorder.is_over:
            self._fit()
        if self.writer is not None:
            self.writer.wait()
        state, completed = self.state, recorder.ended_by in {None, "completed"}
        status, final = "completed" if completed else "stopped", dict(state.best_metric)
        self.sink.emit(RunEnded(status, state.step, final, state.best_epoch, state.best_metric, self.elapsed_s))
        done = completed or recorder.ended_by == "time is up"
        code = 0 if done else 128 + (self.stop_signal() or 15)
        return RunResult(status, code, self.run_dir.path, state.step, final, state.best_epoch, dict(state.best_metric))

    def _fit(self) -> None:
        module, data = self.task.module, self.task.datamodule
        if self.snapshot is None:
            load_initial_weights(module, self.config.init_from, self.collectives)
        if self.plan.sync_batchnorm:
            convert(module, None)
        batch = self.plan.batch
        done = round(self.state.position / batch.global_batch) * batch.accumulate
        store = StoreIO(self._write, self.snapshot, self.state, (done, batch.accumulate))
        with (
            quiet_trainer(),
            child_signal_kept(),
            replaced_loaders(
                [data, module],
                lambda loader: training_loader(loader, batch, self.plan.seed, self.world, self.state),
                lambda loader: evaluation_loader(loader, self.world, self.plan.seed),
                seed=self.plan.seed,
            ),
        ):
            trainer = self._trainer(store)
            store.trainer = trainer
            trainer.fit(module, datamodule=data, ckpt_path=None if self.snapshot is None else OWN)

    def _trainer(self, store: StoreIO) -> pl.Trainer:
        config, given = self.config, dict(self.task.trainer_arguments)
        ranks = rank_arguments(self.plan, self.world, config.distributed)
        callbacks = [self.recorder, KeptSignals(), *_as_list(given.pop("callbacks", None))]
        batch, validation = self.plan.batch, config.validation
        position = self.state.position
        ragged = position and round(position / batch.global_batch) + batch.steps_left(position) != batch.steps_per_epoch
        settings = {
            "max_epochs": self.plan.epochs,
            # A module that optimizes manually may take several optimizer steps a batch, and the Trainer counts them.
            "max_steps": (config.training.max_steps or -1) if self.task.module.automatic_optimization else -1,
            "accumulate_grad_batches": batch.accumulate,
            "gradient_clip_val": config.training.max_grad_norm,
            "precision": _precision(self.plan.placement["precision"], self.device),
            # With validation.every_steps, the recorder says after each batch whether to validate.
            "check_val_every_n_epoch": 1 if validation.every_steps else validation.every_epochs,
            "num_sanity_val_steps": 0 if self.snapshot else validation.sanity_steps,
            "limit_val_batches": 1 if config.debug.fast_dev_run else config.debug.limit_eval_batches or 1.0,
            "log_every_n_steps": config.telemetry.log_interval,
            "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
            "enable_model_summary": False,
            "profiler": profiler(config.lightning.profiler, self.run_dir.path),
            "detect_anomaly": config.debug.detect_anomaly,
            "default_root_dir": self.run_dir.logs,
        }
        given.pop("enable_checkpointing", None)  # the run keeps checkpoints, by a callback that is one to the Trainer
        if ragged:
            # An epoch that goes on with another global batch has another number of batches than the next one.
            given["reload_dataloaders_every_n_epochs"] = 1
        plugins = [*ranks.pop("plugins"), store, *_as_list(given.pop("plugins", None))]
        return pl.Trainer(**{**settings, **given}, **ranks, callbacks=callbacks, plugins=plugins)

    def _save(self, trainer: pl.Trainer, best: bool) -> None:
        self._saving_best = best
        save(trainer)

    def _write(self, weights: dict[str, Any], rest: dict[str, Any]) -> None:
        """Rank 0 alone is asked to write."""
        assert self.writer is not None
        self.state.elapsed_s = self.elapsed_s
        trainer = {"state": self.state.state_dict(), "task": {}, "lightning": rest}
        copy = self.writer.to_host({"model": weights, "trainer": trainer})
        keep = retained(
            [*self.writer.store.steps(), self.state.step], self.config.checkpoint.keep_last, self.state.best_step
        )
        manifest = manifest_of(self.config, self.plan, self.state, self.attempt, pins(self.device, self.plan))
        snapshot = Snapshot(self.state.step, copy["model"], copy["trainer"], manifest)
        self.writer.submit(snapshot, best=self._saving_best, keep=keep)


def _precision(kind: str, device: torch.device) -> Any:
    if kind == "16-mixed" and device.type == "cpu":
        return "bf16-mixed"  # as Lightning would, with a warning; the plan says so
    return "32-true" if kind == "32" else kind


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
