"""The engine's loop on a rank, with its parts timed.

Every moment of a step belongs to exactly one part, so the parts add up to the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from lockstep.config import RunConfig
from lockstep.engine.build_parts import build_parts
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import between, finish, moment
from lockstep.engine.parts import Parts, StepResult
from lockstep.engine.rank_context import RankContext
from lockstep.engine.runtime import rank_device, runtime
from lockstep.engine.strategies.reducers import Flags
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import kept_on, loaded, open_data, training_source, walk
from lockstep.lab.bench.trials import Case, TrialRank
from lockstep.launch.meeting.membership import group
from lockstep.planning import Plan

#: Parts of a step. ``other``: work of the host between them.
PARTS = ("data", "forward", "backward", "communication", "optimizer", "other")
_NEXT_STEP = "next step"
T = TypeVar("T")


class Stopwatch:
    """Notes when which part begins.

    On a GPU the notes are events on its stream: work of the host while the GPU is busy costs nothing, and waiting
    counts only while the GPU has no work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []

    def enter(self, part: str) -> None:
        """Count time from now on as ``part``. A CUDA graph that is being recorded is one part when it is replayed."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self._marks.append((part, moment(self._device)))

    def next_step(self) -> None:
        self.enter(_NEXT_STEP)

    def timed(self, call: Callable[..., T], part: str, then: str) -> Callable[..., T]:
        """Wrap ``call``: its time counts as ``part``, the time after it as ``then``."""

        def wrapped(*arguments: Any, **keywords: Any) -> T:
            self.enter(part)
            result = call(*arguments, **keywords)
            self.enter(then)
            return result

        return wrapped

    def timed_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield ``batches``; waiting for one counts as ``data``."""
        self.enter("data")
        for batch in batches:
            self.enter("other")
            yield batch
            self.enter("data")

    def steps(self) -> list[dict[str, float]]:
        """Return the seconds of each part, for every step between two calls of :meth:`next_step`."""
        seconds: list[dict[str, float]] = []
        finish(self._device)
        for (part, start), (_, stop) in pairwise(self._marks):
            if part == _NEXT_STEP:
                seconds.append(dict.fromkeys(PARTS, 0.0))
            if seconds:
                seconds[-1]["other" if part == _NEXT_STEP else part] += between(start, stop)
        return seconds


class Site(NamedTuple):
    """The objects that the cases of one trial share."""

    rank: TrialRank
    task: Task
    datasets: Datasets
    device: torch.device
    collectives: Collectives


@contextlib.contextmanager
def on_site(rank: TrialRank, config: RunConfig, plan: Plan) -> Iterator[Site]:
    """Open the rank's task with its data, device and process group."""
    world = rank.world
    assert rank.make_task is not None, "the trial has a task"
    task = rank.make_task()
    device = rank_device(tuple(plan.placement["devices"]), world)
    with (
        group(world, config, plan.placement, rank.folder.logs) as team,
        runtime(plan, device, detect_anomaly=False, ranks=world.size),
    ):
        yield Site(rank, task, open_data(task, config, team.collectives), device, team.collectives)


@contextlib.contextmanager
def training(
    site: Site, config: RunConfig, plan: Plan, watch: Stopwatch
) -> Iterator[tuple[Parts, Iterator[StepResult]]]:
    """Prepare the engine's loop for ``plan``, with its parts timed; yields the trained parts and the steps."""
    world = site.rank.world
    task = site.task
    # Before the strategy is made: the backward follows the loss.
    task.loss = watch.timed(type(task).loss.__get__(task), "forward", "backward")  # type: ignore[method-assign]
    with runtime(plan, site.device, detect_anomaly=False, ranks=world.size):
        context = RankContext(site.rank.folder, world, config, plan, site.device, site.collectives)
        parts = build_parts(context, task, site.datasets, None)
        source, _ = kept_on(training_source(task, site.datasets, plan), site.device, parts.rank.plan)
        loader = loaded(source, plan, world)
        parts.strategy.module.train()
        with contextlib.closing(loader):
            update = parts.update
            update.apply = watch.timed(update.apply, "optimizer", "other")  # type: ignore[method-assign]
            batches = watch.timed_batches(loader)
            yield parts, (parts.step(window, batches, Flags()) for window in walk(plan, world))


def counted_steps(site: Site, case: Case, watch: Stopwatch, steps: Iterator[StepResult]) -> Iterator[int]:
    """Take the steps of ``case`` and yield the number of each; ``watch`` notes their ends after ``case.warm_up``."""
    for number, _ in zip(range(1, case.plan.total_steps + 1), steps, strict=False):
        site.rank.check()
        yield number
        if number >= case.warm_up:
            watch.next_step()
