"""The measured task, and its trials: a function on new ranks, whose rows survive any failure.

A rank that runs out of memory, is killed or fails ends its trial, not the benchmark: the launcher ends the other
ranks, and rows reported before count.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.task import Task
from lockstep.engine.training_data import open_data
from lockstep.errors import RankFailed, UnsupportedError
from lockstep.hardware.world import World, read_world
from lockstep.launch.failure.report import read_failure
from lockstep.launch.local import worker
from lockstep.launch.local.on_ranks import RankLimits, run_on_ranks
from lockstep.launch.prepare import RunInputs, native_settings, placement_of, plan_for, settle
from lockstep.planning import Plan
from lockstep.rundir.files import JsonLines, read_jsonl
from lockstep.rundir.folder import RunDir
from lockstep.tasks.registry import pack_task
from lockstep.telemetry.loggers import QUIET

#: Maximum time that a rank takes to end after a stop.
STOP_GRACE_S = 5.0
#: Maximum time that a collective waits for a rank of a trial.
TIMEOUT_S = 120.0
#: Rows that rank 0 has reported, in the folder of a trial.
_ROWS_FILE = "rows.jsonl"


@dataclass(frozen=True)
class TrialRank(worker.Rank):
    """One rank of a trial. ``make_task``: makes the task that is measured."""

    make_task: Callable[[], Task] | None = None

    def report(self, row: Mapping[str, Any]) -> None:
        """Save ``row`` on disk, on rank 0."""
        if self.world.is_main:
            JsonLines(self.folder.path / _ROWS_FILE).append(row)

    def check(self) -> None:
        """Raise :class:`KeyboardInterrupt` after a stop request."""
        if self.stop.requested is not None:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Case:
    """One measurement. ``label``: the first columns of its row."""

    label: Mapping[str, Any]
    config: RunConfig
    plan: Plan
    warm_up: int


@dataclass(frozen=True)
class Outcome:
    """The reported rows and the end of a trial. ``error``: its first line."""

    rows: list[dict[str, Any]]
    ended: Literal["done", "out of memory", "failed", "stopped"] = "done"
    error: str = ""


@dataclass
class Trials:
    """Starts trials below ``folder``, one after another; none after one that was stopped."""

    folder: Path
    count: int = 0
    stopped: bool = False

    def run_case(self, function: Callable[..., None], case: Case, *arguments: Any, task: Task) -> Outcome:
        """Call ``function(rank, case, *arguments)`` on the ranks of ``case``; see :meth:`run`."""
        ranks = case.plan.world_size
        threads = case.plan.threads
        return self.run(function, case, *arguments, ranks=ranks, config=case.config, task=task, threads=threads)

    def run(
        self,
        function: Callable[..., None],
        *arguments: Any,
        ranks: int,
        config: RunConfig,
        task: Task | None = None,
        threads: int = 1,
    ) -> Outcome:
        """Call ``function(rank, *arguments)``, one that can be imported, on ``ranks`` new processes.

        Raises:
            UsageError: a rank refuses its settings. KeyboardInterrupt: a trial before it was stopped.
        """
        if self.stopped:
            raise KeyboardInterrupt
        self.count += 1
        folder = RunDir(self.folder / f"trial-{self.count:03}")
        make_task = None if task is None else pack_task(task, config)
        rows = partial(read_jsonl, folder.path / _ROWS_FILE)
        limits = RankLimits(threads=threads, stop_grace_s=STOP_GRACE_S)
        try:
            run_on_ranks(_on_rank, make_task, function, *arguments, folder=folder, ranks=ranks, limits=limits)
        except KeyboardInterrupt:
            self.stopped = True
            return Outcome(rows(), "stopped")
        except RankFailed as error:
            report = read_failure(folder)
            lacks_memory = report is not None and report.cause is not None and report.cause.is_memory
            return Outcome(rows(), "out of memory" if lacks_memory else "failed", error.what.splitlines()[0])
        return Outcome(rows())


def _on_rank(
    rank: worker.Rank, make_task: Callable[[], Task] | None, function: Callable[..., None], *arguments: Any
) -> None:
    function(TrialRank(rank.folder, rank.world, rank.stop, make_task), *arguments)


@contextlib.contextmanager
def new_trials() -> Iterator[Trials]:
    """Open trials in a temporary folder, which is removed. Raises :class:`KeyboardInterrupt` after a stopped one."""
    with TemporaryDirectory(prefix="lockstep-bench-") as folder:
        trials = Trials(Path(folder))
        yield trials
        if trials.stopped:
            raise KeyboardInterrupt


#: Features that a trial does not use, since its weights are not saved.
_QUIET: dict[str, Any] = {
    "init_from": None,
    "training": {"max_time_s": None, "early_stopping_patience": 0, "tail": "drop"},
    "telemetry": QUIET,
    "storage": {"mirror": None},
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
            reason = "this process is a rank of torchrun or srun"
            raise UnsupportedError(
                "a benchmark starts the ranks itself", why=reason, fix="run it without torchrun or srun"
            )

    @cached_property
    def base(self) -> RunInputs:
        """The inputs of a run with the settings as given."""
        built, config = self._settle({})
        return plan_for(built, config, placement_of(config, World()), open_data(built, config), None)

    @property
    def name(self) -> str:
        return self.base.config.task.name

    def prepared(self, changes: Mapping[str, Any]) -> RunInputs:
        """Make the plan of a trial with ``changes``. Raises :class:`~lockstep.errors.UsageError`."""
        built, config = self._settle(merge(_QUIET, changes))
        config = config.with_values(distributed={"timeout_s": min(TIMEOUT_S, config.distributed.timeout_s)})
        return plan_for(built, config, placement_of(config, World()), self.base.datasets, None)

    def case(self, label: Mapping[str, Any], changes: Mapping[str, Any], *, steps: int, warm_up: int) -> Case:
        """Make a case of ``steps`` measured steps. Raises :class:`~lockstep.errors.UsageError`."""
        total = steps + warm_up
        trial = self.prepared(merge(changes, {"training": {"epochs": total, "max_steps": total}}))
        return Case(label, trial.config, trial.plan, warm_up)

    def _settle(self, changes: Mapping[str, Any]) -> tuple[Task, RunConfig]:
        self.given = native_settings(self.task, self.given)
        return settle(self.task, merge(self.given, changes))
