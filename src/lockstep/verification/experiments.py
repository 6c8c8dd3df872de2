"""Runs for comparison: the same steps of one task on one device or on all, with options switched off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lockstep.arithmetic import ceil_div
from lockstep.checkpoint.store import CheckpointStore
from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.task import Task
from lockstep.errors import RunError
from lockstep.launch.api import train
from lockstep.planning import Plan
from lockstep.rundir.folder import RunDir
from lockstep.telemetry.loggers import QUIET
from lockstep.verification.trajectory import Gap, Trajectory, gap_between, read_trajectory

#: Checkpoints that are kept beside the one to resume from.
MOST_KEPT = 3


@dataclass(frozen=True)
class Variant:
    """One way to run the steps: on ``one`` device, on ``many``, or on one that takes the ``parts`` of these in turn.

    ``off`` is switched off (``debug.switch_off``), ``trace`` is how each micro-batch is arranged (``debug.trace``), and
    ``repeat`` distinguishes runs that should be equal.
    """

    layout: Literal["one", "many", "parts"] = "one"
    off: tuple[str, ...] = ()
    trace: str = "on"
    precision: str | None = None
    repeat: int = 0

    def describe(self, devices: int) -> str:
        names = {"one": "1 device", "many": f"{devices} devices", "parts": f"1 device, {devices} parts in turn"}
        words = [names[self.layout], *(f"no {name}" for name in self.off)]
        words += [f"samples {self.trace}"] if self.trace != "on" else []
        words += [f"precision {self.precision}"] if self.precision else []
        words += ["again"] if self.repeat else []
        return ", ".join(words)


@dataclass(frozen=True)
class Comparison:
    """One device and several, with the same options switched off in both."""

    off: tuple[str, ...]
    precision: str | None
    one: Trajectory
    many: Trajectory

    @cached_property
    def gap(self) -> Gap:
        return gap_between(self.one, self.many)


@dataclass
class Lab:
    """Runs variants of one training in ``folder`` and keeps their trajectories.

    ``plan`` is that of ``config``, which is complete, on the chosen devices; ``say`` is called with a description of
    each run before it starts; ``notes`` are further lines of the report. Parameters in ``not_compared`` are left out of
    every trajectory.
    """

    task: Task | type[Task] | str
    config: RunConfig
    plan: Plan
    steps: int
    eval_batches: int
    folder: Path
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    not_compared: set[str] = field(default_factory=set)
    _done: dict[Variant, tuple[Path, Trajectory]] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return len(self.plan.placement["devices"])

    def run(self, variant: Variant) -> Trajectory:
        """Train ``variant``, unless it was trained before, and return its trajectory. Raises :class:`LockstepError`."""
        if variant not in self._done:
            path = self.folder / f"run-{len(self._done) + 1:02}"
            self._train(variant.describe(self.devices), self._settings(variant, path))
            self._done[variant] = path, read_trajectory(path)
        return self._done[variant][1].without(self.not_compared)

    def compare(self, off: tuple[str, ...] = (), precision: str | None = None) -> Comparison:
        """Run one device and several, with the options ``off``; see :meth:`run`."""
        single, many = (self.run(Variant(devices, off, precision=precision)) for devices in ("one", "many"))
        return Comparison(off, precision, single, many)

    def resumed(self, variant: Variant) -> tuple[int, Trajectory] | None:
        """Resume the run of ``variant`` on one device from a checkpoint in mid-epoch; it is lost by that.

        Returns how many steps were finished then, and the steps that followed; ``None``: there is no such checkpoint.
        """
        self.run(variant)
        path, _ = self._done[variant]
        store = CheckpointStore(RunDir.open(path).checkpoints)
        steps = [step for step in store.steps() if step < self.steps and store.manifest(step)["position"]]
        if not steps:
            return None
        step = min(steps, key=lambda step: abs(step - self.steps / 2))
        store.set_aside_after(step)
        settings = {"save_dir": str(path), "hardware": self._one_device(), "training": self._batch(Variant("one"))}
        self._train(f"{self.devices} devices until step {step}, resumed on 1 device", settings, resume=True)
        return step, read_trajectory(path).without(self.not_compared)

    def _train(self, description: str, settings: dict[str, Any], *, resume: bool = False) -> None:
        self.say(description)
        task = copy.deepcopy(self.task) if isinstance(self.task, Task) else self.task
        result = train(task, settings, resume=resume)
        if result.exit_code >= 128:
            raise KeyboardInterrupt
        if result.exit_code:
            raise RunError(f"a run for comparison failed ({description})")

    def _one_device(self) -> dict[str, Any]:
        return {"selected_devices": [self.plan.placement["devices"][0]], "strategy": "auto"}

    def _saves(self) -> tuple[int, int]:
        """Choose a step in mid-epoch near half of the steps to save after, and the number of checkpoints to keep."""
        per_epoch = self.plan.steps_per_epoch
        first = min(per_epoch, self.steps // 2) or 1
        ends = {*range(first, self.steps, per_epoch), self.steps}

        def later(step: int) -> int:
            return len({*ends, *range(step, self.steps, step)} - set(range(step + 1)))

        inside = [step for step in range(1, self.steps) if step not in ends] or [max(1, self.steps - 1)]
        near = sorted(inside, key=lambda step: (abs(step - self.steps / 2), step))
        chosen = next((step for step in near if later(step) <= MOST_KEPT), near[-1])
        return chosen, min(later(chosen), MOST_KEPT) + 1

    def _settings(self, variant: Variant, path: Path) -> dict[str, Any]:
        """Change as few of the user's settings as possible; the plan's order and global batch stay."""
        plan = self.plan
        user_settings = self.config.model_dump(mode="json", exclude_unset=True)
        first = max(0, plan.steps_per_epoch - self.steps // 2)
        (every, keep) = self._saves()
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
            # A number that follows from measured times could differ between two runs.
            "data": {"num_workers": plan.loader.num_workers},
            "validation": {
                "every_epochs": 1,
                "every_steps": None,
                "sanity_steps": 0,
                "batch_size": plan.eval_batch_size,
            },
            # Whole: the hashes of two files of weights are compared.
            "checkpoint": {"every_steps": every, "every_s": None, "keep_last": keep, "sharded": "off"},
            # Nothing of these runs leaves their folder, and it is removed.
            "storage": {"mirror": None},
            "telemetry": {**QUIET, "log_interval": 1, "record_samples": False},
            "launch": {"max_restarts": 0, "nodes": None, "rdzv": None},
            "debug": {
                "trace": variant.trace,
                "switch_off": list(variant.off),
                # Half of the steps before an epoch's end: the short last batch and a validation are among them.
                "start_position": first * plan.batch.global_batch,
                "limit_eval_batches": self.eval_batches,
            },
        }
        if variant.layout != "many":
            changes["hardware"] = self._one_device()
        settings = merge(user_settings, changes)
        if variant.precision is not None:
            settings = merge(settings, {"hardware": {"precision": variant.precision, "matmul_precision": "highest"}})
        if isinstance(self.task, Task):
            settings.pop("task", None)  # the object has its settings
        return settings

    def _batch(self, variant: Variant) -> dict[str, Any]:
        """Give one device the samples of all devices, in one micro-batch or part by part."""
        batch = self.plan.batch
        if variant.layout == "many":
            return {}
        share = batch.batch_size if variant.layout == "parts" else ceil_div(batch.global_batch, batch.accumulate)
        return {"global_batch_size": batch.global_batch, "batch_size": share, "accumulate": 1}
