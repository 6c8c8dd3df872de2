"""Training in a loop that you write, on any number of devices."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from lockstep._compat import has_returned, script_frame
from lockstep.api.session_join import join_session, with_settings_of_launch
from lockstep.api.session_loop import Loop
from lockstep.api.settings import Settings, mapping_of
from lockstep.config import RunConfig, merge, resolve
from lockstep.engine.generators import seed_everything
from lockstep.engine.predict import predicted_rows
from lockstep.engine.runtime import rank_device
from lockstep.engine.session.batches import UpdateRows, check_alike, check_data, count_rows
from lockstep.engine.session.between_ranks import gather_rows, reduce_tensor
from lockstep.engine.session.saving import Stateful
from lockstep.errors import TaskError
from lockstep.launch.session.script import call_on_ranks
from lockstep.launch.session.started import close_open_session, open_sessions
from lockstep.rundir.heartbeat import Activity, pulse

T = TypeVar("T")

#: Settings that a loop replaces.
_DEFAULTS: Mapping[str, Any] = {
    "training": {"max_grad_norm": None, "early_stopping_patience": 0},
    "scheduler": {"name": "constant", "warmup_steps": 0},
}


class Session(Loop):
    """A rank of a run whose loop you write: data order, gradient sums, log, checkpoints and resume are Lockstep's.

    Example::

        session = lockstep.Session(global_batch_size=64, seed=0)
        model, optimizer = session.prepare(model, optimizer)
        for epoch in session.epochs(10):
            for x, y in session.batches(train_set):
                session.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
                session.step(optimizer)
            for logits, y in session.evaluate(val_set, lambda batch: (model(batch[0]), batch[1])):
                accuracy.update(logits, y)
            session.log(accuracy=accuracy.compute())

    ``python script.py`` trains on one device. ``lockstep run script.py --devices gpu:0,gpu:1``, ``torchrun`` and
    ``srun`` start one process for each device. The loop runs in all of them: every rank makes the same calls in the
    same order.

    Args:
        config: further settings, by key (``{"checkpoint.every_s": 600}``), nested as in a YAML file, or as a
            :class:`RunConfig`. Settings of the command line override those of the script.
        resume: resume the unfinished run in ``save_dir``; if there is none, start one.
        settings: common settings by their short names, as of :func:`lockstep.train`. ``max_grad_norm`` is off, and the
            learning rate is your optimizer's.

    Raises:
        UsageError: a setting is wrong, or the devices do not fit the number of processes.
    """

    def __init__(
        self, config: RunConfig | Mapping[str, Any] | None = None, *, resume: bool = False, **settings: Unpack[Settings]
    ) -> None:
        close_open_session(None)
        overrides = with_settings_of_launch(mapping_of(config, settings))
        overrides = merge(overrides, {"task": {"name": Path(sys.argv[0]).name or "session"}})
        whole = resolve(_DEFAULTS, overrides)
        with ExitStack() as ending:
            joined = join_session(whole, resume=resume, ending=ending)
            device = rank_device(joined.placement.devices, joined.world)
            seed_everything(whole.training.seed)
            super().__init__(replace(joined, ending=ending.pop_all()), whole, overrides, device)
        open_sessions.append(self)
        atexit.register(self._at_exit)
        self._ending.callback(atexit.unregister, self._at_exit)
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        self._exit = sys.exit
        sys.exit = self._on_exit
        self._exits: BaseException | None = None
        self._script = script_frame()

    @property
    def rank(self) -> int:
        return self._joined.world.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._joined.world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._joined.run_dir.path

    @property
    def step_count(self) -> int:
        """Finished steps of the run: global batches, earlier attempts included."""
        return self._state.step

    # Models, optimizers and schedulers.

    @overload
    def prepare(self, thing: T, /) -> T: ...

    @overload
    def prepare(self, first: T, second: Any, /, *rest: Any, **named: Any) -> tuple[Any, ...]: ...

    @overload
    def prepare(self, **named: Any) -> Any: ...

    def prepare(self, *things: Any, **named: Any) -> Any:
        """Take the modules, optimizers and schedulers of the loop, and return them in the same order. Collective.

        Modules are moved to the rank's device and get rank 0's weights, and keep their type, methods and parameters; no
        wrapper is around them. Schedulers are stepped by :meth:`step`, and prepared optimizers by nothing else.

        Args:
            things: in checkpoints and logs they are ``model``, ``model_2``, ``optimizer``, …
            named: the same, under names: ``prepare(generator=g, critic=d)``.

        Raises:
            TaskError: something else, such as a ``DataLoader``; or the loop has begun.
        """
        if self._training is not None:
            raise TaskError("prepare() was called after the first batch", fix="call it before the loop")
        for name, thing in [*((None, thing) for thing in things), *named.items()]:
            self._prepared.add(thing, name)
        prepared = (*things, *named.values())
        return prepared[0] if len(prepared) == 1 else prepared

    def checkpoint(self, **things: Stateful) -> None:
        """Keep the state of ``things`` in every checkpoint, too: an average of weights, a scheduler, a replay buffer.

        When the run resumes, they are restored by :meth:`epochs`, or here if it has been called.

        Raises:
            TaskError: one has no ``state_dict`` and ``load_state_dict``. CheckpointError: the checkpoint has none of
                that name, or another form.
        """
        self._resumed.register(things)

    # The loop.

    def epochs(self, number: int | None = None) -> Iterator[int]:
        """Yield the epochs of the run, from 0; a run that is resumed begins with the one that it was in. Collective.

        At the end of each one its row is written and a checkpoint saved.

        Args:
            number: how many; ``None``: ``training.epochs``. ``--set training.epochs=N`` overrides it.

        Raises:
            SystemExit: a completed run is resumed, and nothing is left to train; with status 0.
        """
        epochs_setting = self._overrides.get("training", {}).get("epochs")
        self._epochs = number if epochs_setting is None and number is not None else self._config.training.epochs
        self._begin()
        if self._left is not None:
            self._end_epoch(self._left)
        self._over = self._is_over() if self._joined.is_resume else ""
        if self._over:
            self._leave(self._over)
        return self._walk_epochs(0 if self._over else self._epochs)

    def once(self, make: Callable[..., T], *arguments: Any) -> T:
        """Return what ``make(*arguments)`` returns, made once in this epoch: rollouts, pseudo-labels, hard negatives.

        Checkpoints within the epoch have it, so that a resume does not make it again, with other weights. The order of
        its calls in an epoch must stay.

        Args:
            make: returns the same on every rank: tensors, NumPy arrays, numbers, text, and tuples, lists and dicts of
                them.
        """
        self._check_in_epochs("once")
        return cast(T, self._made.once(make, arguments, self._device))

    def batches(
        self,
        dataset: Any,
        *,
        accumulate: int | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        weights: Any = None,
    ) -> Iterator[Any]:
        """Yield this rank's part of each global batch of ``dataset``, on its device: in one order for any ranks.

        The last, smaller batch is split over the ranks as well. A rank for which nothing is left gets a sample that
        counts nothing, so that all ranks run the body equally often.

        Args:
            dataset: map-style: ``len()`` and ``[i]``. Draws inside ``[i]`` are keyed by (seed, epoch, index). The first
                loop of an epoch may have an iterable one: it is read once on each node, in its order.
            accumulate: micro-batches of a step: the body runs once for each, and :meth:`step` acts on the last one.
                ``None``: ``training.accumulate``, and as many as ``batch_size`` needs. Lanes, in an exact run.
            collate: samples to a batch; ``None``: torch's ``default_collate``.
            weights: how often each sample is drawn, in proportion, in the first loop of an epoch; torch's
                ``WeightedRandomSampler``, too. As of :class:`lockstep.Datasets`.

        Raises:
            TaskError: outside :meth:`epochs`, or of a ``DataLoader``. UnsupportedError: a second stream.
            SystemExit: after a checkpoint, when SIGINT or SIGTERM asked for a stop, or ``max_time_s`` is over.
        """
        dataset = self._by_row(dataset)
        first = self._number == 0 and (self._training is None or dataset is self._task.dataset)
        check_data(dataset, streams=first)
        self._check_in_epochs("batches")
        if self._training is None:
            self._start(dataset, accumulate=accumulate, collate=collate, weights=weights)
        number = self._number
        self._number = self._number + 1
        return self._walk(number, dataset, accumulate, collate, weights)

    def updates(self, number: int) -> Iterator[int]:
        """Yield the updates of an epoch whose loop has its rows, from 0; a resume begins with the next one.

        Off-policy learning, for example::

            for epoch in session.epochs(10):
                for update in session.updates(1000):
                    replay.add(act(policy))
                    for batch in session.part(replay.sample(256)):
                        session.backward(loss(batch), weight=len(batch))
                        session.step(optimizer)

        An update may have no step, or several. Random numbers that are drawn outside the bodies over parts are the same
        on any number of ranks. Checkpoints are saved between updates.

        Args:
            number: how many updates the epoch has.

        Raises:
            TaskError: outside :meth:`epochs`. SystemExit: as of :meth:`batches`.
        """
        self._check_in_epochs("updates")
        loop = self._number
        self._number = self._number + 1
        return self._walk_updates(loop, number)

    def part(self, rows: T) -> Iterator[T]:
        """Yield this rank's part of ``rows``, on its device, for one step, in a loop over :meth:`updates`. Collective.

        As of :meth:`batches`, the body runs once for each micro-batch: ``training.accumulate``, ``batch_size``, lanes.

        Args:
            rows: the global batch, the same on every rank: tensors or arrays with a row for each sample, in tuples,
                lists or dicts. Put rows of several ranks together with :meth:`gather`.

        Raises:
            TaskError: outside :meth:`updates`, or the parts of ``rows`` have different numbers of rows.
        """
        if self._update is None:
            raise TaskError(
                "part() was called outside a loop over session.updates()",
                why="its step belongs to an update, with which a resume begins",
                fix="write `for update in session.updates(1000):` around it, in a loop over session.epochs()",
            )
        size = count_rows(rows)
        if self._training is None:
            self._start(UpdateRows(self._update[1], size), global_batch=size)
        return cast(Iterator[T], self._walk_part(rows, size))

    def backward(
        self,
        total: Tensor,
        count: Tensor | float | None = None,
        *,
        weight: Tensor | float | None = None,
        models: Iterable[nn.Module] | nn.Module | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of ``total``, a *sum* of losses over ``count`` items of this rank's batch.

        A step's gradient is Σ total / Σ count over ranks, micro-batches and the calls since the step before. A second
        term of the same items, such as a penalty, takes ``count=0``. Losses and gradients that you look at before
        :meth:`step` are sums of this rank alone; see :meth:`reduce`.

        Args:
            total: shape ().
            count: how many items (samples, tokens) it sums.
            weight: instead of ``count``, for a loss that is a mean by nature: how many items it is the mean of.
            models: prepared modules, or parts of them, that get gradients; ``None``: all that the loss depends on.

        Raises:
            TaskError: ``total`` is a mean; neither or both of ``count`` and ``weight``; outside :meth:`batches`.
        """
        self._running("backward").backward(
            total, count, weight, models, retain_graph=retain_graph, create_graph=create_graph
        )

    def step(self, optimizer: Optimizer, *, max_norm: float | None = None) -> bool:
        """Sum the gradients over ranks, divide, clip, step the optimizer and its prepared scheduler, clear. Collective.

        A step whose gradient is not finite leaves the weights as they are, on all ranks.

        Args:
            max_norm: clip the gradient to this norm; ``None``: ``training.max_grad_norm``, which is off by default.

        Returns:
            Whether this was the last micro-batch of the step; before it, nothing is done.

        Raises:
            TaskError: without a :meth:`backward` before it, or for an optimizer that was not prepared.
        """
        return self._running("step").step(optimizer, max_norm)

    def reduce(self, optimizer: Optimizer) -> bool:
        """Make ``p.grad`` the gradient of the mean loss over all ranks, without a step. Collective.

        For algorithms that look at the gradient first, such as SAM; clear it with ``optimizer.zero_grad()``, or take
        the step. Returns as :meth:`step`.
        """
        return self._running("reduce").reduce_only(optimizer)

    def again(self) -> Iterator[Any]:
        """Yield the micro-batches of this step once more, in the body of the last one, for algorithms with two passes.

        SAM with ``accumulate``::

            if session.reduce(optimizer):
                climb()  # by p.grad
                optimizer.zero_grad()
                for x, y in session.again():
                    session.backward(loss(x, y), count=len(y))
                return_to_the_weights_before()
                session.step(optimizer)

        Random numbers of samples and of the forward pass are the same. The data are read again.

        Raises:
            TaskError: before the last micro-batch. UnsupportedError: the data are iterable.
        """
        return self._current_feed().again()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the run's precision, for the forward pass; nothing for 32."""
        return self._prepared.autocast()

    @property
    def generator(self) -> torch.Generator:
        """Random numbers on the rank's device that depend on seed, step and micro-batch alone."""
        return self._running("generator").generator

    @property
    def rows(self) -> slice:
        """Where the samples of this rank's batch are among those of all ranks, as :meth:`gather` orders them."""
        return self._running("rows").rows

    def log(self, **values: float | Tensor) -> None:
        """Log numbers: in a loop over batches or updates with the step's row, after it with the epoch's.

        After a loop over batches a name gets the prefix ``val_`` unless it begins with ``train_``, ``val_`` or
        ``test_``, or names a group (``rollout/reward``); after the last epoch ``test_``. The best checkpoint is that of
        the best ``val_loss``, or ``checkpoint.monitor``. The values of rank 0 are logged.
        """
        for name, value in values.items():
            if not (value.numel() == 1 if isinstance(value, Tensor) else hasattr(value, "__float__")):
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                raise TaskError(
                    f"session.log({name}=…) got a {type(value).__name__}{shape}, not a number",
                    fix="log a number, such as the mean of a tensor",
                )
        training = self._training
        in_step = training is not None and (training.window is not None or self._update is not None)
        (training.scalars if training and in_step else self._logged).update(values)

    def evaluate(
        self,
        dataset: Any,
        predict: Callable[[Any], Any],
        *,
        batch_size: int | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of ``predict(batch)`` by batch of ``dataset``: each sample once, in index order. Collective.

        Every rank predicts a part, and gets the rows of all, so that each can compute the same metric. Modules are in
        evaluation mode, and nothing has a gradient.

        Args:
            predict: returns a tensor with a row for each sample, or a tuple of such tensors or of lists.
            batch_size: samples of a batch; ``None``: ``validation.batch_size``, else a micro-batch of one device: the
                global batch divided by ``accumulate``. The batches are the same on any number of ranks.

        Returns:
            An iterator over the rows of a batch, each a tuple, in host memory.
        """
        dataset = self._by_row(dataset)
        check_data(dataset, streams=None)
        training = self._training
        config = self._config
        ranks = self._joined.collectives
        plan = None if training is None else training.rank.plan
        size = batch_size or config.validation.batch_size or self._evaluation_batch_size()
        evaluator = self._prepared.evaluator(ranks, plan, size, seed=config.training.seed, step=self._state.step)
        with contextlib.ExitStack() as around:
            if training is not None:
                training.log.pause()
                around.callback(pulse.at, Activity.HOOKS)
                around.callback(training.log.unpause)
                around.enter_context(training.averages.in_use())
            if ranks.size > 1:
                check_alike(f"{len(dataset)}", self._ranks, "evaluate")
            collate = collate or cast(Any, default_collate)
            yield from predicted_rows(evaluator, self._prepared.container(), dataset, collate, predict)

    # Between ranks.

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenate the rows of all ranks in rank order, [n_r, ...] → [Σ n_r, ...], with a gradient. Collective.

        Ranks may have different numbers of rows. :attr:`rows` is the place of this rank's samples among them. Refused
        in the body of an exact run's loop, where each lane is computed alone.
        """
        self._refuse_exact("gather")
        if self.size == 1:
            return rows
        self._check_alike("gather()", rows, 1)
        counts = self._training is None or not self._training.is_ghost
        return gather_rows(rows, counts=counts)

    @overload
    def all_reduce(self, value: float, operation: Literal["sum", "mean", "min", "max"] = "sum") -> float: ...

    @overload
    def all_reduce(self, value: Tensor, operation: Literal["sum", "mean", "min", "max"] = "sum") -> Tensor: ...

    def all_reduce(self, value: Any, operation: Literal["sum", "mean", "min", "max"] = "sum") -> Any:
        """Reduce a number, or a tensor of one shape, over ranks; ``sum`` and ``mean`` have a gradient."""
        if not isinstance(value, Tensor):
            return getattr(self._ranks, operation)(float(value))[0]
        if self.size == 1:
            return value
        self._check_alike("all_reduce()", value, 0)
        return reduce_tensor(value, operation)

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return ``source``'s value on every rank: anything that can be pickled. Collective."""
        return cast(T, self._ranks.broadcast(value, source))

    def main_first(self, *, per_node: bool = False) -> AbstractContextManager[None]:
        """Run the body on rank 0 (or the first one of each node) before the others: a download, for example."""
        return cast(AbstractContextManager[None], self._ranks.main_first(per_node=per_node))

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 alone."""
        if self.is_main:
            print(*values, **options)

    # Starting and ending.

    @staticmethod
    def launch(
        function: Callable[..., T],
        *arguments: Any,
        config: RunConfig | Mapping[str, Any] | None = None,
        resume: bool = False,
        **settings: Unpack[Settings],
    ) -> T:
        """Call ``function(*arguments)``, which makes a session, on new processes: from a notebook, for example.

        Args:
            function: one of a notebook or a script is sent by value, with the objects that it refers to.
            config: as of a session, and over that of the session that ``function`` makes; so are the other keywords.
            resume: resume the unfinished run in ``save_dir``, if there is one.
            settings: ``devices="gpu:0,gpu:1"`` says how many ranks there are.

        Returns:
            The result of rank 0; ``None`` if :meth:`epochs` has ended it.

        Raises:
            LockstepError: a rank failed; which one and why. KeyboardInterrupt: the run was stopped.
        """
        return cast(T, call_on_ranks(function, arguments, mapping_of(config, settings), resume=resume))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(error)

    def _on_exit(self, status: Any = None, /) -> NoReturn:
        """Handle ``sys.exit()``, whose status is not known when Python ends."""
        if threading.current_thread() is threading.main_thread():
            self._exits = SystemExit(status)
        self._exit(status)

    def _at_exit(self) -> None:
        if self._exits is None and not self._is_done and not has_returned(self._script):
            self._exits = SystemExit("raised before the end of the loop; its status is not known")
        self.close(self._exits)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(BaseException):  # the first error is the one to report
            self.close(error)
        self._hook(kind, error, trace)

    def close(self, error: BaseException | None = None) -> None:
        """End the run: save, and record how it ended, by ``error`` if it failed. Called at the end of the script.

        Collective without ``error``.
        """
        if self not in open_sessions:
            return
        open_sessions.remove(self)
        sys.excepthook = self._hook
        sys.exit = self._exit
        error = None if isinstance(error, SystemExit) and not error.code else error
        try:
            self._finish(error)
        finally:
            # The contexts see the error; nothing else is raised after it.
            with contextlib.nullcontext() if error is None else contextlib.suppress(BaseException):
                self._ending.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
