"""A session's loop on one rank: prepared models, the position of the loop, begin and end of its run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.config import OptimizerConfig, RunConfig, SchedulerConfig, resolve
from lockstep.engine.attempt import record_failure
from lockstep.engine.predict import predicted_rows
from lockstep.engine.run_log import as_numbers
from lockstep.engine.session.batches import ByRow, DataFeed, check_alike, check_data, length
from lockstep.engine.session.prepared import Beside, PreparedModels
from lockstep.engine.session.saving import Resumed
from lockstep.engine.session.training import SessionTraining, outside_batches
from lockstep.engine.strategies.base import SeededDraws
from lockstep.engine.task import Datasets
from lockstep.errors import TaskError, UnsupportedError
from lockstep.launch.session.attempt import LoopTask, begin_attempt
from lockstep.launch.session.join import Joined, end_script
from lockstep.planning.loader import sized
from lockstep.rundir.heartbeat import Activity, pulse

_SPLITS = ("train_", "val_", "test_")
#: Part of draws before an epoch; the parts of a step count from 0.
_EPOCH = -1
#: Part of draws after a loop over batches.
_AFTER = -2
#: Settings that a loop has no use for, by section.
_UNUSED = {
    "optimizer": OptimizerConfig.model_fields.keys(),
    "scheduler": SchedulerConfig.model_fields.keys(),
    "training": {"on_oom"},
    "validation": {"every_epochs", "every_steps", "sanity_steps"},
}


class Loop:
    """Behind :class:`lockstep.Session`, which says what its methods do.

    ``overrides`` are the settings that differ from the defaults; ``ending`` is closed at the end of the session. What
    trains (``training``) is there once the first loop over batches has begun: from its data the plan is made.
    """

    def __init__(
        self, joined: Joined, config: RunConfig, overrides: Mapping[str, Any], device: torch.device, ending: ExitStack
    ) -> None:
        self.joined = joined
        self.config = config
        self.device = device
        self._overrides = overrides
        self._ending = ending
        self.prepared = PreparedModels(device, joined.placement.precision, several=joined.world.size > 1)
        self.resumed = Resumed(joined)
        self.state = self.resumed.state
        self._made = self.resumed.made
        self.training: SessionTraining | None = None
        #: The data of the plan, as given and as opened.
        self._task: LoopTask
        self._datasets: Datasets
        #: By number in the epoch: the batches of a loop, and the arguments of ``batches()``.
        self._feeds: dict[int, tuple[DataFeed, list[Any]]] = {}
        self._by_row = ByRow()
        self._epochs = 1
        self._number = 0
        self._in_epochs = False
        self.is_done = False
        #: The reason why a resumed run has nothing to train.
        self._over = ""
        self._logged: dict[str, Any] = {}
        #: Of an epoch that a break has ended after its batches.
        self._left: dict[str, float] | None = None

    @property
    def ranks(self) -> Any:
        """For calls between ranks by the loop; they are compared once it trains."""
        return self.joined.collectives if self.training is None else self.training.ranks

    def running(self, call: str) -> SessionTraining:
        """The training. Raises :class:`TaskError`: no loop over batches has begun."""
        if self.training is None:
            raise outside_batches(call)
        return self.training

    def refuse_exact(self, call: str) -> None:
        """Raise :class:`UnsupportedError` in the body of an exact run's loop."""
        inside = self.training is not None and self.training.place >= 0
        if inside and self.config.training.reproducibility == "exact":
            raise UnsupportedError(
                f"{call}() in the body of a loop cannot be exact",
                why="each lane is computed alone, whichever ranks compute the others",
                fix="use reproducibility: fast",
            )

    def check_alike(self, call: str, tensor: Tensor, first: int) -> None:
        """Compare ``call`` over ranks, with the type and the shape of its tensor from the dimension ``first`` on.

        Only in the first steps: later ones make the same calls.
        """
        training = self.training
        if training is None or training.place < 0 or training.checks_losses:
            sizes = ["*"] * first + [str(size) for size in tensor.shape[first:]]
            self.ranks.check(f"{call} of {str(tensor.dtype).removeprefix('torch.')} [{', '.join(sizes)}]")

    def _begin(self) -> None:
        """Restore the saved state of a resumed run. Collective."""
        self.prepared.check()
        self.resumed.begin(self.prepared.container(), is_resume=self.joined.is_resume, init_from=self.config.init_from)

    # Epochs.

    def epochs(self, number: int | None) -> Iterator[int]:
        epochs_setting = self._overrides.get("training", {}).get("epochs")
        self._epochs = number if epochs_setting is None and number is not None else self.config.training.epochs
        self._begin()
        if self._left is not None:
            self._end_epoch(self._left)
        self._over = self._is_over() if self.joined.is_resume else ""
        if self._over:
            self._leave(self._over)
        return self._walk_epochs(0 if self._over else self._epochs)

    def _is_over(self) -> str:
        """Why a resumed run has nothing to train, and what would change that; empty: it has."""
        state = self.state
        settings = self.config.training
        if state.epoch >= self._epochs:
            return f"has trained all {self._epochs} epochs. To train on, raise training.epochs"
        if settings.max_steps is not None and state.step >= settings.max_steps:
            return f"has taken all {settings.max_steps} steps. To train on, raise training.max_steps"
        patience = settings.early_stopping_patience
        if 0 < patience <= state.evaluations_without_gain:
            return f"has stopped early, after {patience} evaluations without gain. To train on, raise that patience"
        return ""

    def _leave(self, over: str) -> None:
        """Of a resumed run that is ``over``: end the script, unless it was stopped after its loop."""
        run = self.joined.run_dir
        ranks = self.joined.collectives
        ends = ranks.broadcast(run.read().status == "completed" if ranks.is_main else None)
        if ranks.is_main:
            rest = "The script ends here" if ends else "What follows the loop runs, without the variables of the loop"
            text = f"Nothing is left to train: the run {over} (lockstep resume RUN --epochs N, or --set). {rest}."
            print(text, flush=True)
        if ends:
            end_script(0)

    def _walk_epochs(self, number: int) -> Iterator[int]:
        self._in_epochs = True
        try:
            while self.state.epoch < number and not self._has_ended():
                self._number = 0
                if self.state.epoch:
                    self._draws(self.state.epoch, _EPOCH)
                self._made.begin_epoch()
                yield self.state.epoch
                self._end_epoch(self._row("val"))
        except GeneratorExit:  # a break, or an error: nothing collective may follow here
            self._left = self._row("val") if self.training and self.training.stage else None
            raise
        finally:
            self._in_epochs = False
        self._stop_if_asked()  # the loop was left in the step that ended the run
        self.is_done = True

    def _draws(self, number: int, part: int) -> None:
        """Seed the draws of the loop outside of the bodies over batches, alike on all ranks."""
        if self.training is None:
            SeededDraws(self.config.training.seed, [self.device])(number, part)
        else:
            self.training.draws(number, part)

    def _has_ended(self) -> bool:
        return self.training is not None and self.training.log.ended_by is not None

    def _stop_if_asked(self) -> None:
        """End the process after a checkpoint, if the ranks have agreed to. Raises :class:`Stopped`."""
        log = self.training.log if self.training else None
        if log is not None and log.ended_by is not None and not log.is_completed:
            end_script(128 + (self.joined.stop.requested or 15) if log.ended_by == "signal" else 0)

    def _end_epoch(self, row: dict[str, float]) -> None:
        training = self.training
        self._left = None
        if training is None:
            self.state.epoch += 1
        if training is None or not training.is_cut:
            self._made.end_epoch()
        if training is not None:
            training.end_epoch(row)

    def once(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self._in_epochs:
            raise TaskError(
                "once() was called outside a loop over session.epochs()",
                why="it is made once in each epoch",
                fix="call it in `for epoch in session.epochs(10):`, before the batches",
            )
        return self._made.once(make, arguments, self.device)

    # Batches.

    def batches(
        self, dataset: Any, accumulate: int | None, collate: Callable[[Any], Any] | None, weights: Any
    ) -> Iterator[Any]:
        dataset = self._by_row(dataset)
        first = self._number == 0 and (self.training is None or dataset is self._task.dataset)
        check_data(dataset, streams=first)
        if not self._in_epochs:
            raise TaskError(
                "batches() was called outside a loop over session.epochs()",
                why="the order of the samples and a resume depend on the epoch",
                fix="write `for epoch in session.epochs(10):` around it; epochs(1) for a loop without epochs",
            )
        if self.training is None:
            self._start(LoopTask(self.prepared.container(), dataset, collate, weights), accumulate)
        number = self._number
        self._number = self._number + 1
        return self._walk(number, dataset, accumulate, collate, weights)

    def _walk(self, number: int, dataset: Any, accumulate: int | None, collate: Any, weights: Any) -> Iterator[Any]:
        training = self.running("batches")
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
        feed = self._feed(training, number, dataset, accumulate, collate, weights)
        try:
            yield from feed.walk(self.state.epoch, self.state.position)
        finally:
            training.window = None
            if not self._has_ended():
                training.stage = number + 1
                self.state.position = 0
            self._draws(self.state.step, _AFTER)
        self._stop_if_asked()

    def again(self) -> Iterator[Any]:
        self.running("again")
        return self._feeds[self._number - 1][0].again()

    def _feed(
        self, training: SessionTraining, number: int, dataset: Any, accumulate: int | None, collate: Any, weights: Any
    ) -> DataFeed:
        """The batches of the loop with this number in its epoch."""
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
        task = LoopTask(self.prepared.container(), dataset, collate)
        datasets = self._datasets if planned else task.datasets()
        feed = DataFeed(training, task, datasets, accumulate, number, planned=planned)
        self._feeds[number] = feed, request
        if training.rank.config.training.max_steps is None:
            more = sum(feed.steps_per_epoch for index, (feed, _) in self._feeds.items() if index > 0)
            training.log.total = training.rank.plan.total_steps + more * training.rank.plan.epochs
        return feed

    def _start(self, task: LoopTask, accumulate: int | None) -> None:
        """Make the plan and begin the attempt: the data are known now. Collective."""
        self._begin()
        joined = self.joined
        optimizer = next(iter(self.prepared.optimizers.values()))
        has_size = "batch_size" in self._overrides.get("training", {})
        # A warm-up is at 0 now.
        rates = (float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)
        lr = next(filter(None, rates), 0.0)
        config = sized(self.config, has_batch_size=has_size, ranks=joined.world.size, accumulate=accumulate, lr=lr)
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
        registered = self.resumed.registered
        for name in self.prepared.unkept_schedules(registered.values()):
            joined.note(
                "scheduler",
                f"a scheduler of {name} is in no checkpoint: a resume would begin its schedule again. Give it to "
                "session.checkpoint(scheduler=...), or to prepare() if it steps after every optimizer step",
            )
        beside = Beside(sys._getframe(3), [task.model(), *registered.values()])  # the caller of session.batches()
        self.training, self._datasets = begin_attempt(
            joined, config, task, self.prepared, self.resumed, beside, self._ending
        )
        self._task = task
        pulse.at(Activity.STEP, self.state.step)
        self.training.log.start()
        self.training.log.unpause()

    # Numbers.

    def log(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if not (value.numel() == 1 if isinstance(value, Tensor) else hasattr(value, "__float__")):
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                raise TaskError(
                    f"session.log({name}=…) got a {type(value).__name__}{shape}, not a number",
                    fix="log a number, such as the mean of a tensor",
                )
        in_window = self.training is not None and self.training.window is not None
        (self.training.scalars if self.training and in_window else self._logged).update(values)

    def _row(self, split: str) -> dict[str, float]:
        values = as_numbers(self._logged)
        self._logged = {}
        return {name if name.startswith(_SPLITS) else f"{split}_{name}": value for name, value in values.items()}

    def evaluate(
        self, dataset: Any, predict: Callable[[Any], Any], batch_size: int | None, collate: Callable[[Any], Any] | None
    ) -> Iterator[tuple[Any, ...]]:
        dataset = self._by_row(dataset)
        check_data(dataset, streams=None)
        training = self.training
        config = self.config
        ranks = self.joined.collectives
        plan = None if training is None else training.rank.plan
        size = batch_size or config.validation.batch_size or self._evaluation_batch_size()
        evaluator = self.prepared.evaluator(ranks, plan, size, seed=config.training.seed, step=self.state.step)
        with contextlib.ExitStack() as around:
            if training is not None:
                training.log.pause()
                around.callback(pulse.at, Activity.HOOKS)
                around.callback(training.log.unpause)
                around.enter_context(training.averages.in_use())
            if ranks.size > 1:
                check_alike(f"{len(dataset)}", self.ranks, "evaluate")
            data = dataset, collate or cast(Any, default_collate)
            yield from predicted_rows(evaluator, self.prepared.container(), data, predict)

    def _evaluation_batch_size(self) -> int:
        """Samples of a batch of an evaluation: those of a micro-batch on one device, on any number of ranks."""
        training = self.config.training
        if training.global_batch_size is None or "batch_size" in self._overrides.get("training", {}):
            return training.batch_size
        parts = max((request[2] or 1 for _, request in self._feeds.values()), default=training.accumulate)
        return -(-training.global_batch_size // parts)

    # The end.

    def finish(self, error: BaseException | None) -> None:
        """Save, and record how the run ended. Collective without ``error``."""
        training = self.training
        if training is None:
            run = self.joined.run_dir
            is_changed = not self.joined.is_resume or ((error or self._over) and run.read().status != "completed")
            if self.joined.world.is_main and is_changed:
                run.update(status="failed" if error else "completed", error=error and str(error))
            return
        try:
            if error is not None:
                record_failure(training.rank.sink, training.log, error)
                return
            if self._left is not None:
                self._end_epoch(self._left)
            training.save()
            training.wait()
            training.log.flush()
            training.log.finish({**training.log.final_evaluation, **self._row("test")})
        finally:
            for feed, _ in self._feeds.values():
                feed.close()
            training.close()
