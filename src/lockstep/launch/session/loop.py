"""A session's loop on one rank: what is prepared, where the loop is, and how its run begins and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import default_collate

from lockstep.config import RunConfig, resolve
from lockstep.engine.attempt import record_failure
from lockstep.engine.optim.precision import autocast
from lockstep.engine.run_log import as_numbers
from lockstep.engine.session.batches import DataFeed, check_data
from lockstep.engine.session.current import Stopped, close_open_session
from lockstep.engine.session.evaluation import evaluated_rows
from lockstep.engine.session.prepared import Prepared
from lockstep.engine.session.resuming import Resumed
from lockstep.engine.session.training import Training
from lockstep.engine.state import TrainState
from lockstep.errors import TaskError, UnsupportedError
from lockstep.launch.session.attempt import Attempt, LoopTask
from lockstep.launch.session.join import Joined
from lockstep.planning.loader import sized

_SPLITS = ("train_", "val_", "test_")


class Loop:
    """Behind :class:`lockstep.Session`, which says what its methods do.

    Args:
        given: the settings that differ from the defaults.

    Attributes:
        run: the attempt, when the first loop over batches has begun.
    """

    def __init__(self, joined: Joined, config: RunConfig, given: Mapping[str, Any], device: torch.device) -> None:
        self.joined, self.config, self.device = joined, config, device
        self._given = given
        self.prepared = Prepared(device, joined.placement.precision)
        self.state = TrainState()
        self.run: Attempt | None = None
        self._resumed = Resumed()
        self._feeds: dict[int, DataFeed] = {}
        #: Data set, ``accumulate`` and ``collate`` of each of them.
        self._given_to: dict[int, list[Any]] = {}
        self._number = 0
        self._in_epochs = False
        #: Whether the loop over epochs has ended.
        self.is_done = False
        self._logged: dict[str, Any] = {}
        self._epochs = 1

    def running(self, call: str) -> Training:
        """What trains. Raises :class:`TaskError`: no loop over batches has begun."""
        if self.run is None:
            raise TaskError(
                f"{call} was used outside a loop over session.batches()",
                fix="use it in the body of `for batch in session.batches(train_set):`",
            )
        return self.run.training

    def refuse_late(self, call: str) -> None:
        """Raise :class:`TaskError` where the loop has begun."""
        if self.run is not None:
            raise TaskError(f"{call}() was called after the first batch", fix="call it before the loop")

    def refuse_exact(self, call: str) -> None:
        """Raise :class:`UnsupportedError` in the body of an exact run's loop."""
        if self.run is not None and self.run.training.place >= 0 and self.config.training.reproducibility == "exact":
            raise UnsupportedError(
                f"{call}() in the body of a loop cannot be exact",
                why="each lane is computed alone, whichever ranks compute the others",
                fix="use reproducibility: fast",
            )

    @property
    def checks(self) -> bool:
        """Whether calls between ranks are compared: all but those of steps that take what the first steps took."""
        run = self.run
        return self.joined.world.size > 1 and (run is None or run.training.place < 0 or run.training.checks_losses)

    # What is kept.

    def register(self, things: Mapping[str, Any]) -> None:
        self._resumed.register(things, self.joined.run.path)

    def _begin(self) -> None:
        """Restore what the run has saved, if it is resumed. Collective."""
        self.prepared.check()
        found, init_from = self.joined.found, self.config.init_from
        self._resumed.begin(self.joined, self.prepared.container(), self.state, found=found, init_from=init_from)

    # Epochs and batches.

    def epochs(self, number: int | None) -> Iterator[int]:
        given = self._given.get("training", {}).get("epochs")
        self._epochs = number if given is None and number is not None else self.config.training.epochs
        self._begin()
        if self.joined.found and self.state.epoch >= self._epochs and self.joined.world.is_main:
            print(
                f"Nothing is left to train: the run has trained all {self._epochs} epochs. To train on, raise "
                "training.epochs (lockstep resume RUN --epochs N).",
                flush=True,
            )
        return self._walk_epochs(self._epochs)

    def _walk_epochs(self, number: int) -> Iterator[int]:
        self._in_epochs = True
        try:
            while self.state.epoch < number and not self._has_ended():
                self._number = 0
                yield self.state.epoch
                self._end_epoch()
        finally:
            self._in_epochs = False
        if self._has_ended() and not self.running("epochs()").log.is_completed:
            self._stop()  # the loop was left in the step that ended the run
        self.is_done = True

    def _has_ended(self) -> bool:
        return self.run is not None and self.run.training.log.ended_by is not None

    def _end_epoch(self) -> None:
        if self.run is None:
            self.state.epoch += 1
            return
        training = self.run.training
        training.checkpoints.save(best=training.end_epoch(self._row("val")))

    def batches(self, dataset: Any, accumulate: int | None, collate: Callable[[Any], Any] | None) -> Iterator[Any]:
        first = self._number == 0 and (self.run is None or dataset is self.run.task.dataset)
        check_data(dataset, "batches", streams=first)
        if not self._in_epochs:
            raise TaskError(
                "batches() was called outside a loop over session.epochs()",
                why="the order of the samples and a resume depend on the epoch",
                fix="write `for epoch in session.epochs(10):` around it; epochs(1) for a loop without epochs",
            )
        if self.run is None:
            self._start(dataset, collate, accumulate)
        number, self._number = self._number, self._number + 1
        return self._walk(number, dataset, accumulate, collate)

    def _walk(self, number: int, dataset: Any, accumulate: int | None, collate: Any) -> Iterator[Any]:
        training = self.running("batches()")
        if number < training.stage:  # an earlier attempt has finished it
            return
        if self._has_ended():
            training.is_cut = True
            return
        if training.window is not None:
            raise TaskError(
                "a loop over batches() began inside the body of another one",
                why="a step belongs to one batch of one loop",
                fix="make one data set whose samples have both parts, or run the loops one after the other",
            )
        feed = self._feed(number, dataset, accumulate, collate)
        training.loops += 1
        try:
            yield from feed.walk(self.state.epoch, self.state.position)
        except GeneratorExit:
            training.left()
            raise
        finally:
            if not self._has_ended():
                training.stage, self.state.position = number + 1, 0
        if self._has_ended() and not training.log.is_completed:
            self._stop()

    def again(self) -> Iterator[Any]:
        self.refuse_exact("again")
        self.running("again()")
        return self._feeds[self._number - 1].again()

    def _feed(self, number: int, dataset: Any, accumulate: int | None, collate: Any) -> DataFeed:
        """The batches of the loop with this number in its epoch."""
        known, (data, *how) = self._feeds.get(number), self._given_to.get(number, [None])
        if known is not None:
            if data is dataset and how == [accumulate, collate]:
                return known
            known.close()
        assert self.run is not None
        training, planned = self.run.training, dataset is self.run.task.dataset
        self._given_to[number] = [dataset, accumulate, collate]
        task = LoopTask(self.prepared.container(), dataset, collate)
        datasets = self.run.datasets if planned else task.datasets()
        self._feeds[number] = feed = DataFeed.of(training, task, datasets, accumulate, planned=planned)
        if training.rank.config.training.max_steps is None:
            more = sum(other.batch.steps_per_epoch for place, other in self._feeds.items() if place > 0)
            training.log.total = training.rank.plan.total_steps + more * training.rank.plan.epochs
        return feed

    def _start(self, dataset: Any, collate: Any, accumulate: int | None) -> None:
        """Make the plan and begin the attempt: the data are known now. Collective."""
        self._begin()
        first = next(iter(self.prepared.optimizers.values()))
        has_size = "batch_size" in self._given.get("training", {})
        lr = next((float(group["lr"]) for group in first.param_groups if group["lr"]), 0.0)
        ranks = self.joined.world.size
        config = sized(self.config, has_batch_size=has_size, ranks=ranks, accumulate=accumulate, lr=lr)
        config = resolve(config.model_dump(mode="json"), {"training": {"epochs": self._epochs}})
        self.run = Attempt(
            self.joined,
            config,
            LoopTask(self.prepared.container(), dataset, collate),
            lambda rank: Training(rank, self.prepared, self._resumed.registered, self.state),
            self._resumed.snapshot,
        )
        self.run.training.log.start()
        self.run.training.log.unpause()

    # Numbers.

    def log(self, values: Mapping[str, Any]) -> None:
        if self.run is not None and self.run.training.window is not None:
            self.run.training.scalars.update(values)
        else:
            self._logged.update(values)

    def _row(self, split: str) -> dict[str, float]:
        values, self._logged = as_numbers(self._logged), {}
        return {name if name.startswith(_SPLITS) else f"{split}_{name}": value for name, value in values.items()}

    def evaluate(
        self, dataset: Any, predict: Callable[[Any], Any], batch_size: int | None, collate: Callable[[Any], Any] | None
    ) -> Iterator[tuple[Any, ...]]:
        check_data(dataset, "evaluate")
        config, run = self.config, self.run
        plan = None if run is None else run.training.rank.plan
        size = batch_size or config.validation.batch_size or config.training.batch_size
        with contextlib.nullcontext() if run is None else run.training.paused():
            yield from evaluated_rows(
                dataset,
                predict,
                self.prepared.container(),
                self.joined.collectives,
                collate=collate or cast(Any, default_collate),
                batch_size=size,
                device=self.device,
                autocast=self.autocast,
                loader=None if plan is None else plan.loader,
                seed=config.training.seed,
                step=self.state.step,
                ghosts=plan is not None and plan.sharded,
            )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return autocast(self.joined.placement.precision, self.device)

    # The end.

    def _stop(self) -> None:
        """End the process after a checkpoint, as the ranks have agreed. Raises :class:`Stopped`."""
        by_signal = self.running("batches()").log.ended_by == "signal"
        close_open_session(None)
        raise Stopped(128 + (self.joined.stop.requested or 15) if by_signal else 0)

    def finish(self, error: BaseException | None) -> None:
        """Save, and record how the run ended. Collective without ``error``."""
        run = self.run
        if run is None:
            if self.joined.keeps and not self.joined.found:
                self.joined.run.update(status="completed" if error is None else "failed", error=error and str(error))
            return
        training = run.training
        try:
            if error is None:
                training.checkpoints.save()
                training.checkpoints.wait()
                training.log.flush()
                training.log.finish({**self.state.best_metric, **self._row("test")})
            else:
                record_failure(run.sink, training.log, error)
        finally:
            for feed in self._feeds.values():
                feed.close()
            training.close()
            run.close(error)
