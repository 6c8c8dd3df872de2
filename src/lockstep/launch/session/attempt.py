"""An attempt of a session: it begins when the first loop over batches shows the data, from which the plan is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from lockstep.checkpoint.store import Snapshot
from lockstep.config import RunConfig
from lockstep.data.stream import Stream
from lockstep.engine.rank_context import joined as joined_ranks
from lockstep.engine.resume import check_fits
from lockstep.engine.session.current import leave
from lockstep.engine.session.training import Training
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import begin_stream, end_data, open_datasets
from lockstep.errors import TaskError
from lockstep.events import Fanout, Sink
from lockstep.launch.prepare import plan_for
from lockstep.launch.run_claim import keep_config, resume_point, warn
from lockstep.launch.session.join import Joined
from lockstep.planning import Plan
from lockstep.planning.loader import of_session
from lockstep.telemetry.sinks import RunFolderSink, standard_sinks


class LoopTask(Task):
    """The models and the data of a loop, for the plan."""

    def __init__(self, models: nn.Module, dataset: Any, collate: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self._models, self.dataset = models, dataset
        if collate is not None:
            self.collate = collate  # type: ignore[method-assign, assignment]

    def datasets(self) -> Datasets:
        return Datasets(self.dataset)

    def model(self) -> nn.Module:
        return self._models


def refuse_loader(dataset: Any, call: str) -> None:
    """Raise :class:`TaskError` for a ``DataLoader``."""
    if isinstance(dataset, DataLoader):
        raise TaskError(
            f"{call}() was given a DataLoader",
            why="the session makes the batches, since their order must not depend on the number of ranks",
            fix="pass loader.dataset, with collate=loader.collate_fn if it has its own; the batch size is "
            "Session(global_batch_size=...)",
        )


class Attempt:
    """One attempt: the plan, this rank's context, and what it trains. Collective.

    Args:
        snapshot: what the run resumes; its weights are restored already.
    """

    def __init__(
        self,
        joined: Joined,
        config: RunConfig,
        task: LoopTask,
        build: Any,
        snapshot: Snapshot | None,
    ) -> None:
        self.joined, self.task = joined, task
        #: Of the first loop over batches.
        self.datasets = open_datasets(task, config)
        plan, number = self._begin(config)
        if snapshot is not None:
            check_fits(snapshot.manifest, plan)
        self._inside, self._ending = ExitStack(), ExitStack()
        self.sink = self._sink(config)
        self._ending.callback(self.sink.close)
        try:
            rank = self._inside.enter_context(
                joined_ranks(
                    joined.run,
                    joined.world,
                    config,
                    plan,
                    number,
                    self.sink,
                    lambda: joined.stop.requested,
                    self._ending,
                    keeper=joined.keeps,
                )
            )
            self.training: Training = build(rank)
            if snapshot is not None:
                self.training.restore(snapshot.trainer)
            self._begin_stream(snapshot)
            self.training.checkpoints.check()
        except BaseException as error:
            self.close(error)
            raise

    def _begin_stream(self, snapshot: Snapshot | None) -> None:
        """Hand out the data of the first loop, if they are a stream, from where the run is."""
        training, saved = self.training, None if snapshot is None else snapshot.trainer["session"].get("stream")
        rank, plan = training.rank, training.rank.plan
        where = rank.run_dir.path, rank.attempt, rank.world, training.items
        training.stream = self.datasets.train if isinstance(self.datasets.train, Stream) else None
        begin_stream(self.datasets, *where, plan.batch.global_batch, saved)
        self._ending.callback(end_data, self.datasets)

    def _begin(self, config: RunConfig) -> tuple[Plan, int]:
        """The plan, which rank 0 makes, and the number of the attempt, which is recorded."""
        joined, team = self.joined, self.joined.team

        def plan_it() -> tuple[Plan, int]:
            point = resume_point(joined.run, hold=True, report=warn) if joined.found else None
            plan = plan_for(self.task, config, joined.placement, self.datasets, point).plan
            return of_session(plan), point.step if point else 0

        def record() -> int:
            keep_config(joined.run, config)
            return joined.run.begin_attempt(plan.as_dict(), plan.placement, step)

        planned = team.collectives.broadcast(team.together(plan_it, here=joined.world.is_main))
        assert planned is not None
        plan, step = planned
        plan = plan.model_copy(update={"placement": {**plan.placement, "devices": list(joined.placement.devices)}})
        number = team.together(record, here=joined.keeps)
        return plan, team.collectives.broadcast(number) or 1

    def _sink(self, config: RunConfig) -> Sink:
        run = self.joined.run
        if self.joined.world.is_main:
            return standard_sinks(run, config, sys.stdout)
        return RunFolderSink(run) if self.joined.keeps else Fanout()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the ranks' context; ``error``: of the loop."""
        for stack in (self._inside, self._ending):
            leave(stack, error)
