"""The task that is measured: its settings, its data, and the plans of trials with some settings changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lockstep.bench.measure import Case
from lockstep.bench.trials import TIMEOUT_S
from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import open_data
from lockstep.errors import UnsupportedError
from lockstep.hardware.world import World, read_world
from lockstep.launch.prepare import Prepared, native_settings, place, plan_for, settle

#: What every trial does without: it trains nothing that anybody keeps.
_QUIET: dict[str, Any] = {
    "init_from": None,
    "training": {"max_time_s": None, "early_stopping_patience": 0, "tail": "drop"},
    "telemetry": {
        "progress": "silent",
        "tensorboard": "off",
        "profile": None,
        "upload_to": None,
        "system_metrics": False,
        "forecast": None,
    },
    "debug": {"fast_dev_run": False, "overfit_batches": None},
    "launch": {"max_restarts": 0, "nodes": None},
}


@dataclass
class Subject:
    """A task and the settings given for it, as for :func:`lockstep.train`."""

    task: Task | type[Task] | str
    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        if read_world(os.environ).from_outside:
            raise UnsupportedError(
                "bench starts its own ranks",
                why="torchrun or srun has started ranks already",
                fix="run it without them",
            )

    @cached_property
    def base(self) -> Prepared:
        """The plan with the settings as given.

        Raises:
            LockstepError: settings that contradict each other, the data or the devices.
        """
        built, config = self._settle({})
        return plan_for(built, config, place(config, World()), open_data(built, config), None)

    @property
    def name(self) -> str:
        return self.base.config.task.name

    @property
    def datasets(self) -> Datasets:
        return self.base.datasets

    def prepared(self, changes: Mapping[str, Any]) -> Prepared:
        """The plan of a trial with ``changes``. Raises :class:`~lockstep.errors.UsageError`."""
        built, config = self._settle(merge(_QUIET, changes))
        config = config.model_copy(
            update={
                "distributed": config.distributed.model_copy(
                    update={"timeout_s": min(TIMEOUT_S, config.distributed.timeout_s)}
                )
            }
        )
        return plan_for(built, config, place(config, World()), self.datasets, None)

    def case(self, label: Mapping[str, Any], changes: Mapping[str, Any], *, steps: int, warm_up: int) -> Case:
        """A case of ``steps`` measured steps. Raises :class:`~lockstep.errors.UsageError`."""
        total = steps + warm_up
        length = {"training": {"epochs": total, "max_steps": total}}
        trial = self.prepared(merge(changes, length))
        return Case(label, trial.config, trial.plan, warm_up)

    def _settle(self, changes: Mapping[str, Any]) -> tuple[Task, RunConfig]:
        self.given = native_settings(self.task, self.given)
        return settle(self.task, merge(self.given, changes))
