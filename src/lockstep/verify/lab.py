"""Runs for comparison: the same steps of one task on one device or on all, with something switched off."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.task import Task
from lockstep.errors import RunError
from lockstep.launch.run import train
from lockstep.plan import Plan
from lockstep.verify.trajectory import Trajectory, read_trajectory


@dataclass(frozen=True)
class Variant:
    """One way to run the steps.

    Args:
        where: on ``one`` device, on ``many`` (as chosen), or on one that takes the ``parts`` of the many in turn.
        off: what is switched off (``debug.switch_off``).
        trace: how each micro-batch is arranged (``debug.trace``).
        precision: another precision than the configured one.
        repeat: tells apart runs that ought to be equal.
    """

    where: Literal["one", "many", "parts"] = "one"
    off: tuple[str, ...] = ()
    trace: str = "on"
    precision: str | None = None
    repeat: int = 0

    def describe(self, devices: int) -> str:
        where = {"one": "1 device", "many": f"{devices} devices", "parts": f"1 device, {devices} parts in turn"}
        words = [where[self.where], *(f"no {name}" for name in self.off)]
        words += [f"samples {self.trace}"] if self.trace != "on" else []
        words += [f"precision {self.precision}"] if self.precision else []
        words += ["again"] if self.repeat else []
        return ", ".join(words)


@dataclass
class Lab:
    """Runs variants of one training and keeps their trajectories.

    Args:
        config: complete; ``plan`` is its plan on the chosen devices.
        folder: where the runs go.
        say: told of every run before it starts.
    """

    task: Task | type[Task] | str
    config: RunConfig
    plan: Plan
    steps: int
    eval_batches: int
    folder: Path
    say: Callable[[str], None]
    _done: dict[Variant, Trajectory] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return len(self.plan.placement["devices"])

    def run(self, variant: Variant) -> Trajectory:
        """The trajectory of ``variant``; each is run once.

        Raises:
            LockstepError: the run failed. KeyboardInterrupt: it was stopped.
        """
        if variant not in self._done:
            self.say(variant.describe(self.devices))
            path = self.folder / f"run-{len(self._done) + 1:02}"
            task = copy.deepcopy(self.task) if isinstance(self.task, Task) else self.task
            result = train(task, self._settings(variant, path))
            if result.exit_code >= 128:
                raise KeyboardInterrupt
            if result.exit_code:
                raise RunError(f"a run for comparison failed ({variant.describe(self.devices)})")
            self._done[variant] = read_trajectory(path)
        return self._done[variant]

    def _settings(self, variant: Variant, path: Path) -> dict[str, Any]:
        """The user's settings with as few changes as possible; the plan's order and global batch stay."""
        plan, given = self.plan, self.config.model_dump(mode="json", exclude_unset=True)
        first = max(0, plan.steps_per_epoch - self.steps // 2)
        changes: dict[str, Any] = {
            "save_dir": str(path),
            "training": {
                "epochs": plan.epochs + self.steps,
                "max_steps": self.steps,
                "max_time_s": None,
                "early_stopping_patience": 0,
                "threads": plan.threads,
                **self._batch(variant),
            },
            "optimizer": {"base_batch_size": self.config.optimizer.base_batch_size or self.config.training.batch_size},
            "validation": {
                "every_epochs": 1,
                "every_steps": None,
                "sanity_steps": 0,
                "batch_size": plan.eval_batch_size,
            },
            # Whole: the hashes of two files of weights are compared.
            "checkpoint": {"every_steps": None, "every_s": None, "keep_last": 1, "sharded": "off"},
            # Nothing of these runs leaves their folder, and it is removed.
            "telemetry": {
                "log_interval": 1,
                "tensorboard": "off",
                "progress": "silent",
                "csv": False,
                "wandb": False,
                "mlflow": False,
                "upload_to": None,
                "monitor": False,
                "profile": None,
                "forecast": None,
                "record_samples": False,
            },
            "launch": {"max_restarts": 0, "nodes": None, "rdzv": None},
            "debug": {
                "trace": variant.trace,
                "switch_off": list(variant.off),
                # Half of the steps before an epoch's end: the short last batch and a validation are among them.
                "start_position": first * plan.batch.global_batch,
                "limit_eval_batches": self.eval_batches,
            },
        }
        if variant.where != "many":
            changes["hardware"] = {"selected_devices": [plan.placement["devices"][0]], "strategy": "auto"}
        settings = merge(given, changes)
        if variant.precision is not None:
            settings = merge(settings, {"hardware": {"precision": variant.precision}})
        if isinstance(self.task, Task):
            settings.pop("task", None)  # the object has its settings
        return settings

    def _batch(self, variant: Variant) -> Mapping[str, Any]:
        """One device takes what the many take side by side in one micro-batch, or part by part."""
        batch = self.plan.batch
        if variant.where == "many":
            return {}
        share = batch.batch_size if variant.where == "parts" else -(-batch.global_batch // batch.accumulate)
        return {"global_batch_size": batch.global_batch, "batch_size": share, "accumulate": 1}
