"""An attempt of a session: it begins when the first loop over batches shows the data, from which the plan is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch import nn

from lockstep.api.session_join import Joined
from lockstep.config import RunConfig
from lockstep.engine.fingerprint import examined
from lockstep.engine.rank_context import Attempt, join_ranks
from lockstep.engine.resume import check_fits
from lockstep.engine.session.batches import UpdateRows, check_alike, length
from lockstep.engine.session.prepared import Beside, PreparedModels
from lockstep.engine.session.saving import Resumed
from lockstep.engine.session.training import SessionTraining
from lockstep.engine.task import Datasets, Loss, Task
from lockstep.engine.training_data import begin_stream, end_data, open_datasets
from lockstep.events import Fanout, Sink
from lockstep.launch.meeting.preparation import PlanRequest, plan_together
from lockstep.planning.loader import of_session
from lockstep.telemetry.sinks import standard_sinks


class LoopTask(Task):
    """The models and the data of a loop, for the plan."""

    records_arguments = False
    #: Who calls ``set_epoch()`` of training data.
    epoch_caller: ClassVar[str] = "call it in the loop over session.epochs(), before batches()"

    def __init__(
        self, models: nn.Module, dataset: Any, collate: Callable[[Any], Any] | None, weights: Any = None
    ) -> None:
        super().__init__()
        self._models = models
        self.dataset = dataset
        self.samples = length(dataset)
        self.weights = weights
        if collate is not None:
            vars(self)["collate"] = collate  # a class or a module, too

    def datasets(self) -> Datasets:
        return Datasets(self.dataset, weights=self.weights)

    def model(self) -> nn.Module:
        return self._models

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise NotImplementedError("the loop computes its losses")


def begin_attempt(
    joined: Joined,
    config: RunConfig,
    task: LoopTask,
    prepared: PreparedModels,
    resumed: Resumed,
    beside: Beside,
) -> tuple[SessionTraining, Datasets]:
    """Make the plan and join the ranks; returns the training, and the open data of ``task``. Collective.

    The ``resumed`` weights are restored already.
    """
    run = joined.run_dir
    ending = joined.ending
    datasets = open_datasets(task, config)
    compares = joined.world.size > 1 and task.samples is not None
    local_fingerprint = ""
    if compares and not joined.world.is_main:  # rank 0 does it for the plan
        local_fingerprint = examined(datasets.train, skips=task._lockstep_data.on_bad_row == "skip")[0]
    complete = partial(of_session, schedule=prepared.schedule())
    request = PlanRequest(run, task, config, is_resume=joined.is_resume, change=complete)
    start = plan_together(joined.team, request, joined.placement, datasets)
    plan = start.plan
    if compares:
        check_alike(local_fingerprint or plan.task.fingerprint, joined.collectives)
    snapshot = resumed.snapshot
    if snapshot is not None:
        remedy = "; if the loop makes its data in each epoch, as rollouts, make them with session.once(make, ...)"
        makes_data = resumed.made.replaces_data or isinstance(task.dataset, UpdateRows)
        check_fits(snapshot.manifest, plan, makes_data=makes_data, remedy=remedy)
    sink: Sink = standard_sinks(run, config, sys.stdout) if joined.world.is_main else Fanout()
    ending.callback(sink.close)
    attempt = Attempt(
        run_dir=run,
        world=joined.world,
        config=config,
        plan=plan,
        number=start.attempt,
        sink=sink,
        stop_signal=lambda: joined.supervision.stop.requested,
    )
    rank = ending.enter_context(join_ranks(attempt, ending))
    ending.callback(end_data, datasets)
    training = SessionTraining(rank, prepared, resumed, beside)
    stream_state = None
    if snapshot is not None:
        training.restore()
        stream_state = snapshot.trainer["session"].get("stream")
    training.stream = begin_stream(
        datasets, run.path, rank.attempt, rank.world, training.items, plan.batch.global_batch, stream_state
    )
    training.check()
    return training, datasets
