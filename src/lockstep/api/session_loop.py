"""A session's loop on one rank: prepared models, the position of the loop, begin and end of its run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor

from lockstep.api.session_attempt import LoopTask, begin_attempt
from lockstep.api.session_join import Joined, end_script
from lockstep.config import OptimizerConfig, RunConfig, SchedulerConfig, resolve
from lockstep.data.requests import Window
from lockstep.engine.attempt import record_failure
from lockstep.engine.run_log import as_numbers
from lockstep.engine.session.batches import ByRow, DataFeed, RowFeed, length
from lockstep.engine.session.prepared import Beside, PreparedModels
from lockstep.engine.session.saving import Resumed
from lockstep.engine.session.training import SessionTraining, outside_batches
from lockstep.engine.strategies.base import SeededDraws
from lockstep.engine.task import Datasets
from lockstep.errors import TaskError, UnsupportedError
from lockstep.planning.loader import sized
from lockstep.rundir.heartbeat import Activity, pulse

_SPLITS = ("train_", "val_", "test_")
#: Part of draws before an epoch; the parts of a step count from 0.
_EPOCH = -1
#: Part of draws after a loop over batches, and before an update.
_AFTER = -2
_UPDATE = -3
#: Settings that a loop has no use for, by section.
_UNUSED = {
    "optimizer": OptimizerConfig.model_fields.keys(),
    "scheduler": SchedulerConfig.model_fields.keys(),
    "training": {"on_oom"},
    "validation": {"every_epochs", "every_steps", "sanity_steps"},
}


class Loop:
    """The base of :class:`lockstep.Session`: where its loop is, its feeds of batches, and the end of its run.

    ``overrides`` are the settings that differ from the defaults. What
    trains (``_training``) is there once the first loop over batches has begun: from its data the plan is made.
    """

    def __init__(self, joined: Joined, config: RunConfig, overrides: Mapping[str, Any], device: torch.device) -> None:
        self._joined = joined
        self._config = config
        self._device = device
        self._overrides = overrides
        self._ending = joined.ending
        self._prepared = PreparedModels(device, joined.placement.precision, several=joined.world.size > 1)
        self._resumed = Resumed(joined)
        self._state = self._resumed.state
        self._made = self._resumed.made
        self._position = self._resumed.position
        self._training: SessionTraining | None = None
        #: The data of the plan, as given and as opened.
        self._task: LoopTask
        self._datasets: Datasets
        #: By number in the epoch: the batches of a loop, and the arguments of ``batches()``.
        self._feeds: dict[int, tuple[DataFeed, list[Any]]] = {}
        #: By number in the epoch: the steps of a loop after the first one.
        self._steps: dict[int, int] = {}
        self._by_row = ByRow()
        #: In a loop over updates: the number of the current one, and how many there are.
        self._update: tuple[int, int] | None = None
        self._row_feed: RowFeed | None = None
        #: Whether the body has run for all of the last part.
        self._has_whole_part = False
        self._epochs = 1
        self._number = 0
        self._in_epochs = False
        self._is_done = False
        #: The reason why a resumed run has nothing to train.
        self._over = ""
        self._logged: dict[str, Any] = {}
        #: Of an epoch that a break has ended after its batches.
        self._left: dict[str, float] | None = None

    @property
    def _ranks(self) -> Any:
        """For calls between ranks by the loop; they are compared once it trains."""
        return self._joined.collectives if self._training is None else self._training.ranks

    def _running(self, call: str) -> SessionTraining:
        """Return the training. Raises :class:`TaskError`: no loop over batches has begun."""
        if self._training is None:
            raise outside_batches(call)
        return self._training

    def _refuse_exact(self, call: str) -> None:
        """Raise :class:`UnsupportedError` in the body of an exact run's loop."""
        in_loop_body = self._training is not None and self._training.place >= 0
        if in_loop_body and self._config.training.reproducibility == "exact":
            raise UnsupportedError(
                f"{call}() in the body of a loop cannot be exact",
                why="each lane is computed alone, whichever ranks compute the others",
                fix="use reproducibility: fast",
            )

    def _check_alike(self, call: str, tensor: Tensor, first: int) -> None:
        """Compare ``call`` over ranks, with the type and the shape of its tensor from the dimension ``first`` on.

        Only in the first steps: later ones make the same calls.
        """
        training = self._training
        if training is None or training.place < 0 or training.checks_losses:
            sizes = ["*"] * first + [str(size) for size in tensor.shape[first:]]
            self._ranks.check(f"{call} of {str(tensor.dtype).removeprefix('torch.')} [{', '.join(sizes)}]")

    def _begin(self) -> None:
        """Restore the saved state of a resumed run. Collective."""
        self._prepared.check()
        self._resumed.begin(
            self._prepared.container(), is_resume=self._joined.is_resume, init_from=self._config.init_from
        )

    # Epochs.

    def _is_over(self) -> str:
        """Return why a resumed run has nothing to train, and what would change that; empty: it has."""
        state = self._state
        settings = self._config.training
        if state.epoch >= self._epochs:
            return f"has trained all {self._epochs} epochs. To train on, raise training.epochs"
        if settings.max_steps is not None and state.step >= settings.max_steps:
            return f"has taken all {settings.max_steps} steps. To train on, raise training.max_steps"
        patience = settings.early_stopping_patience
        if 0 < patience <= state.evaluations_without_gain:
            return f"has stopped early, after {patience} evaluations without gain. To train on, raise that patience"
        return ""

    def _leave(self, over: str) -> None:
        """Leave the script if the resumed run is ``over``, unless it was stopped after its loop."""
        run = self._joined.run_dir
        ranks = self._joined.collectives
        ends = ranks.broadcast(run.read().status == "completed" if ranks.is_main else None)
        if ranks.is_main:
            rest = "The script ends here" if ends else "What follows the loop runs, without the variables of the loop"
            advice = "lockstep resume RUN --epochs N, --max-steps N or --set"
            text = f"Nothing is left to train: the run {over} ({advice}). {rest}."
            print(text, flush=True)
        if ends:
            end_script(0)

    def _walk_epochs(self, number: int) -> Iterator[int]:
        self._in_epochs = True
        try:
            while self._state.epoch < number and not self._has_ended():
                self._number = 0
                if self._state.epoch:
                    self._draws(self._state.epoch, _EPOCH)
                self._made.begin_epoch()
                yield self._state.epoch
                self._end_epoch(self._row("val"))
        except GeneratorExit:  # a break, or an error: nothing collective may follow here
            self._left = self._row("val") if self._training and self._position.loops else None
            raise
        finally:
            self._in_epochs = False
        self._stop_if_asked()  # the loop was left in the step that ended the run
        self._is_done = True

    def _draws(self, number: int, part: int) -> None:
        """Seed the draws of the loop outside of the bodies over batches, alike on all ranks."""
        if self._training is None:
            SeededDraws(self._config.training.seed, [self._device])(number, part)
        else:
            self._training.draws(number, part)

    def _has_ended(self) -> bool:
        return self._training is not None and self._training.log.ended_by is not None

    def _stop_if_asked(self) -> None:
        """End the process after a checkpoint, if the ranks have agreed to. Raises :class:`Stopped`."""
        log = self._training.log if self._training else None
        if log is not None and log.ended_by not in (None, "completed"):
            end_script(128 + (self._joined.supervision.stop.requested or 15) if log.ended_by == "signal" else 0)

    def _end_epoch(self, row: dict[str, float]) -> None:
        training = self._training
        self._left = None
        if training is None:
            self._state.epoch += 1
            self._state.position = 0
            self._position.move_to(0)
        if training is None or not training.is_cut:
            self._made.end_epoch()
        if training is not None:
            training.end_epoch(row)

    # Batches.

    @contextlib.contextmanager
    def _in_loop(self, call: str, number: int) -> Iterator[bool]:
        """Surround the loop over ``call`` with this ``number`` in its epoch; yield whether something of it is left."""
        training = self._training
        if self._update is not None or (training is not None and training.window is not None):
            raise TaskError(
                f"a loop over {call}() began inside the body of another one",
                why="a step belongs to one batch of one loop",
                fix="make one data set whose samples have both parts, or run the loops one after the other",
            )
        is_done = number < self._position.loops
        if is_done or self._has_ended():
            if training is not None and not is_done:
                training.is_cut = True
            yield False
            return
        try:
            yield True
        finally:
            self._update = None
            training = self._training
            if training is not None:
                training.window = None
                if not self._has_ended():
                    self._position.move_to(number + 1)
                    self._state.position = 0
            self._draws(self._state.step, _AFTER)

    def _walk(self, number: int, dataset: Any, accumulate: int | None, collate: Any, weights: Any) -> Iterator[Any]:
        with self._in_loop("batches", number) as is_left:
            if is_left:
                feed = self._feed(self._running("batches"), number, dataset, accumulate, collate, weights)
                yield from feed.walk(self._state.epoch, self._state.position)
        self._stop_if_asked()

    def _feed(
        self, training: SessionTraining, number: int, dataset: Any, accumulate: int | None, collate: Any, weights: Any
    ) -> DataFeed:
        """Return the batches of the loop with this number in its epoch."""
        samples = length(dataset)
        planned = dataset is self._task.dataset and samples == self._task.samples
        if weights is not (self._task.weights if planned else None):
            raise UnsupportedError(
                "batches() was given other weights than in the first loop, or for other data",
                why="the plan of the run has been made with those",
                fix="give the same object in every epoch; weights that change are a function of the epoch, from 0",
            )
        request = [id(dataset), samples, accumulate, collate]
        if number in self._feeds:
            feed, previous_request = self._feeds[number]
            if previous_request == request:
                return feed
            feed.close()
        task = LoopTask(self._prepared.container(), dataset, collate)
        datasets = self._datasets if planned else task.datasets()
        feed = DataFeed(training, task, datasets, accumulate, number, planned=planned)
        self._feeds[number] = feed, request
        self._count_steps(number, feed.steps_per_epoch)
        return feed

    def _count_steps(self, number: int, steps: int) -> None:
        """Add the steps of a loop to the run's total, which has those of the first loop of an epoch."""
        training = self._training
        self._steps |= {number: steps} if number else {}
        if training is not None and training.rank.config.training.max_steps is None:
            plan = training.rank.plan
            training.log.total = plan.total_steps + sum(self._steps.values()) * plan.epochs

    def _current_feed(self) -> DataFeed | RowFeed:
        """Return the feed of the current batch. Raises :class:`TaskError`: there is none."""
        self._running("again")
        feed = self._feeds[self._number - 1][0] if self._update is None else self._row_feed
        if feed is None:
            raise outside_batches("again")
        return feed

    def _check_in_epochs(self, call: str) -> None:
        """Raise :class:`TaskError` outside a loop over epochs."""
        if not self._in_epochs:
            raise TaskError(
                f"{call}() was called outside a loop over session.epochs()",
                why="the order of the samples and a resume depend on the epoch",
                fix="write `for epoch in session.epochs(10):` around it; epochs(1) for a loop without epochs",
            )

    # Updates.

    def _walk_updates(self, number: int, updates: int) -> Iterator[int]:
        """Yield the updates of the loop with this ``number`` in its epoch."""
        self._count_steps(number, updates)
        with self._in_loop("updates", number) as is_left:
            for update in range(self._position.updates, updates) if is_left else ():
                self._update = update, updates
                self._draws(update, _UPDATE)
                is_done = False
                try:
                    yield update
                    is_done = True
                finally:
                    self._end_update(update + 1, is_done=is_done)
                if self._has_ended():
                    break
        self._stop_if_asked()

    def _end_update(self, update: int, *, is_done: bool) -> None:
        """Count the update, after its step, if it has one. ``is_done``: the loop asks for the next one."""
        training = self._training
        assert self._update is not None
        if training is None or not (is_done or (training.window is not None and training.has_stepped)):
            return
        over = update == self._update[1]
        position = update * training.rank.plan.batch.global_batch
        self._position.updates = update
        self._state.position = position
        if self._open_part(training) is not None:
            training.end_window(0.0, position=position, epoch_over=over, is_done=is_done)
        training.is_cut = self._has_ended() and not over

    def _walk_part(self, rows: Any, size: int) -> Iterator[Any]:
        training = self._running("part")
        if training.place >= 0:
            raise TaskError(
                "part() was called in the body of another part()",
                why="a step belongs to one batch",
                fix="take the parts one after the other, or one part of both batches",
            )
        if self._open_part(training) is not None:
            position = self._state.position
            training.end_window(0.0, position=position, epoch_over=False, is_update=False)
        if self._has_ended():  # by training.max_steps
            return
        if self._row_feed is None:
            self._row_feed = RowFeed(training)
        self._has_whole_part = False
        yield from self._row_feed.walk(rows, size)
        self._has_whole_part = True
        self._draws(self._state.step, _AFTER)

    def _open_part(self, training: SessionTraining) -> Window | None:
        """Return the window of the last part, if it is to be counted; one that was left before its step is dropped."""
        if not (self._has_whole_part or training.has_stepped):
            training.window = None
        return training.window

    def _start(
        self,
        dataset: Any,
        *,
        accumulate: int | None = None,
        collate: Callable[[Any], Any] | None = None,
        weights: Any = None,
        global_batch: int | None = None,
    ) -> None:
        """Make the plan and begin the attempt: the data are known now. Collective.

        ``global_batch``: of the plan; ``None``: as configured.
        """
        task = LoopTask(self._prepared.container(), dataset, collate, weights)
        self._begin()
        joined = self._joined
        optimizer = next(iter(self._prepared.optimizers.values()))
        has_size = "batch_size" in self._overrides.get("training", {})
        # A warm-up is at 0 now.
        rates = (float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)
        lr = next(filter(None, rates), 0.0)
        config = self._config
        if global_batch is not None:
            config = resolve(config.model_dump(mode="json"), {"training": {"global_batch_size": global_batch}})
        config = sized(config, has_batch_size=has_size, ranks=joined.world.size, accumulate=accumulate, lr=lr)
        config = resolve(config.model_dump(mode="json"), {"training": {"epochs": self._epochs}})
        unused = [
            f"{part}.{key}" for part, keys in _UNUSED.items() for key in keys & self._overrides.get(part, {}).keys()
        ]
        if unused:
            joined.note(
                "unused",
                f"{', '.join(sorted(unused))} have no effect on a session: optimizers, their schedules, the times of "
                "evaluations and micro-batches are those of the loop",
            )
        if self._made.is_drawn_again:
            joined.note(
                "drawn_again",
                "This run was stopped within an epoch, and the loop draws random numbers before the epoch's batches: "
                "values made of them and of the weights, such as rollouts, differ from those before. "
                "session.once(make, ...) keeps them in checkpoints.",
            )
        registered = self._resumed.registered
        for name in self._prepared.unkept_schedules(registered.values()):
            joined.note(
                "scheduler",
                f"a scheduler of {name} is in no checkpoint: a resume would begin its schedule again. Give it to "
                "session.checkpoint(scheduler=...), or to prepare() if it steps after every optimizer step",
            )
        beside = Beside(sys._getframe(2), [task.model(), *registered.values()])  # the caller of session.batches()
        self._training, self._datasets = begin_attempt(joined, config, task, self._prepared, self._resumed, beside)
        self._task = task
        pulse.at(Activity.STEP, self._state.step)
        self._training.log.start()
        self._training.log.unpause()

    # Numbers.

    def _row(self, split: str) -> dict[str, float]:
        values = as_numbers(self._logged)
        self._logged = {}
        keeps_name = {name: name.startswith(_SPLITS) or "/" in name for name in values}
        return {name if keeps_name[name] else f"{split}_{name}": value for name, value in values.items()}

    def _evaluation_batch_size(self) -> int:
        """Return samples of a batch of an evaluation: those of a micro-batch on one device, on any number of ranks."""
        training = self._config.training
        if training.global_batch_size is None or "batch_size" in self._overrides.get("training", {}):
            return training.batch_size
        parts = max((request[2] or 1 for _, request in self._feeds.values()), default=training.accumulate)
        return ceil(training.global_batch_size / parts)

    # The end.

    def _finish(self, error: BaseException | None) -> None:
        """Save, and record how the run ended. Collective without ``error``."""
        if error is not None:
            self._joined.supervision.on_error(error)
        training = self._training
        if training is None:
            run = self._joined.run_dir
            is_changed = not self._joined.is_resume or ((error or self._over) and run.read().status != "completed")
            if self._joined.world.is_main and is_changed:
                run.update(status="failed" if error else "completed", error=error and str(error))
            return
        try:
            if error is not None:
                record_failure(training.rank.sink, training.log, error)
                return
            if self._left is not None:
                self._end_epoch(self._left)
            if training.log.ended_by is None:  # the script has ended: these steps are all
                training.log.total = self._state.step
            training.save()
            training.wait()
            training.log.flush()
            training.log.finish({**training.log.final_evaluation, **self._row("test")})
        finally:
            for feed, _ in self._feeds.values():
                feed.close()
            training.close()
