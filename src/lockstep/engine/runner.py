"""Questions of the core about a task; its class decides who answers them.

A class of tasks names its runner in ``_lockstep_runner``; :class:`TaskRunner` is the one of :class:`.Task`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from lockstep.checkpoint.store import Snapshot
from lockstep.config import RunConfig, one_micro_batch
from lockstep.engine.build import Fitting, build_training
from lockstep.engine.fingerprint import check_same_data
from lockstep.engine.inspection import inspect_task
from lockstep.engine.measure import measure, opened
from lockstep.engine.model_inputs import Inputs, watched_inputs
from lockstep.engine.predict import Row, predictions, refuse_without_predictions
from lockstep.engine.rank_context import RankContext
from lockstep.engine.reopened import Evaluation, Reopened
from lockstep.engine.resume import load_latest
from lockstep.engine.task import Datasets, Task, undefined
from lockstep.engine.training_data import end_data, open_data, open_datasets
from lockstep.engine.trial_optimizer import check_configured_optimizer
from lockstep.planning import Plan, TaskFacts


class TaskRunner:
    """Runs a task with Lockstep's loop; a subclass runs the tasks of another class with another loop."""

    #: Whether a strategy may divide the model among ranks.
    can_divide: ClassVar[bool] = True
    #: The split that ``lockstep predict`` takes unless another is named.
    predicted_split: ClassVar[str] = "test"

    def __init__(self, task: Task) -> None:
        self.task = task

    @classmethod
    def make(cls, kind: type[Task], arguments: Mapping[str, Any]) -> Task:
        """Make a task of class ``kind`` from the arguments that its settings give."""
        return kind(**arguments)

    def complete(self, overrides: Mapping[str, Any], config: RunConfig) -> RunConfig:
        """Complete ``config``, of which ``overrides`` were set; raise if it cannot train the task."""
        return one_micro_batch(overrides, config)

    def native_settings(self, overrides: Mapping[str, Any], config: RunConfig) -> Mapping[str, Any]:
        """Return ``overrides`` with the settings that train the task with Lockstep's loop; ``config`` is complete."""
        return overrides

    def inspect(self, datasets: Datasets, config: RunConfig) -> TaskFacts:
        """Return the facts for the plan; raise if the configured optimizer cannot be made."""
        if type(self.task).loss is Task.loss:
            raise undefined(type(self.task), "loss")
        facts = inspect_task(self.task, datasets, config.task.name)
        if facts.optimizer_lr is None:
            check_configured_optimizer(self.task, config)
        return facts

    def sized(self, config: RunConfig, *, global_batch_size: int | None, devices: int) -> RunConfig:
        """Return ``config`` with the sizes of batches that the task sets; ``global_batch_size``: if it is fixed."""
        return config

    def revised(self, plan: Plan, config: RunConfig) -> Plan:
        """Return ``plan`` with the decisions that the task makes; raise if it cannot follow the plan."""
        return plan

    def fitting(self, rank: RankContext, datasets: Datasets | None, ending: ExitStack) -> Fitting:
        """Build what trains on a rank, from the latest checkpoint or from the start. Collective.

        Args:
            datasets: already opened ones.
            ending: closed when the attempt ends.
        """
        config = rank.config
        datasets = datasets or open_data(self.task, config, rank.collectives)
        if rank.world.size > 1:
            check_same_data(datasets, rank.collectives)
            if rank.plan.task.opens_files:  # loader workers must open them themselves
                datasets = open_datasets(self.task, config)
        ending.callback(end_data, datasets)
        # No name for the snapshot here: it would keep its memory, or its files, until the end.
        return build_training(rank, self.task, datasets, load_latest(rank, in_pieces=rank.reads_shards))

    def check_evaluation(self, devices: Sequence[str]) -> None:
        """Raise :class:`UnsupportedError` where the task cannot be evaluated on several devices."""

    def evaluate(self, reopened: Reopened) -> dict[str, Any]:
        """Return ``samples`` and ``metrics`` of a checkpoint, the same on all ranks. Collective."""
        return measure(reopened)

    def check_prediction(self, request: Evaluation) -> None:
        """Raise :class:`LockstepError` where the task has no predictions for ``request``."""
        refuse_without_predictions(self.task)

    def predictions(self, reopened: Reopened) -> Iterator[list[list[Row]]]:
        """Yield rows in index order, as many batches as there are ranks at a time, on rank 0. Collective."""
        subject = opened(reopened, self.task.prediction_data)
        return predictions(
            subject.evaluator,
            self.task,
            subject.model,
            subject.dataset,
            with_loss=reopened.evaluation.with_loss,
        )

    def model_inputs(self, model: nn.Module, config: RunConfig, *, required: bool) -> Inputs | None:
        """Return arguments of the ``forward()`` of a restored model; ``None``: not known, and not ``required``."""
        return watched_inputs(self.task, model, config)

    def export(self, model: nn.Module, snapshot: Snapshot, folder: Path) -> None:
        """Write the files beside weights and program of ``model``, which ``snapshot`` has, to ``folder``."""
        self.task.export(model, folder)


def runner_of(task: Task) -> TaskRunner:
    """Return the runner of ``task``."""
    return runner_class(type(task))(task)


def runner_class(kind: type[Task]) -> type[TaskRunner]:
    """Return the runner of tasks of class ``kind``."""
    runner: type[TaskRunner] = load_object(kind._lockstep_runner)
    return runner


def load_object(path: str) -> Any:
    """Import the object ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
