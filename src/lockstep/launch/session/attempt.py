"""An attempt of a session: it begins when the first loop over batches shows the data, from which the plan is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from lockstep.checkpoint.store import Snapshot
from lockstep.config import RunConfig
from lockstep.engine.rank_context import joined as joined_ranks
from lockstep.engine.resume import check_fits
from lockstep.engine.session.current import leave
from lockstep.engine.session.training import Training
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import begin_stream, end_data, open_datasets
from lockstep.events import Fanout, Sink
from lockstep.launch.nodes.preparation import Planned, plan_together, record_attempt
from lockstep.launch.session.join import Joined
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
        plan, number, _ = plan_together(
            joined.team,
            joined.run,
            Planned(task, config, joined.placement, self.datasets),
            partial(record_attempt, joined.run, config),
            of_session,
            found=joined.found,
            keeps=joined.keeps,
        )
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
            saved = None if snapshot is None else snapshot.trainer["session"].get("stream")
            where = joined.run.path, rank.attempt, rank.world, self.training.items, plan.batch.global_batch
            self.training.stream = begin_stream(self.datasets, *where, saved)
            self._ending.callback(end_data, self.datasets)
            self.training.checkpoints.check()
        except BaseException as error:
            self.close(error)
            raise

    def _sink(self, config: RunConfig) -> Sink:
        run = self.joined.run
        if self.joined.world.is_main:
            return standard_sinks(run, config, sys.stdout)
        return RunFolderSink(run) if self.joined.keeps else Fanout()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the ranks' context; ``error``: of the loop."""
        for stack in (self._inside, self._ending):
            leave(stack, error)
