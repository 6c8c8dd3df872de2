"""The calls of a session's loop: windows and micro-batches, backward calls, steps, epochs, log and checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.requests import BatchRequest, Window, readable
from lockstep.engine.distributed.buffers import Buffers
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.engine.loss import checked_sum
from lockstep.engine.rank_context import RankContext
from lockstep.engine.run_log import LossMeter, RunLog, as_numbers
from lockstep.engine.session.origins import LossOrigins, Part
from lockstep.engine.session.prepared import Beside, PreparedModels, tensors_of
from lockstep.engine.session.saving import Resumed
from lockstep.engine.session.stepper import (
    SessionOptimizer,
    SharedPrecision,
    backward,
    build_steppers,
)
from lockstep.engine.strategies.base import Passes
from lockstep.engine.strategies.exact import LaneSums
from lockstep.engine.strategies.reducers import Flags, Reduced
from lockstep.engine.training import Training
from lockstep.errors import TaskError, UnsupportedError

#: Windows of an attempt in which losses are checked to be sums, and followed to batches and weights.
CHECKED_WINDOWS = 2
#: The same, at most, where an optimizer has not stepped so far.
MAX_FOLLOWED_WINDOWS = 64


def outside_batches(call: str) -> TaskError:
    return TaskError(
        f"session.{call} was used outside a loop over session.batches()",
        why="the session divides gradients by the counts of a step's batches",
        fix="use it in the body of `for batch in session.batches(train_set):`",
    )


class SessionTraining(Training):
    """The prepared models and optimizers of one rank, where its loop is, and the checkpoints of both.

    Attributes:
        ranks: for calls between ranks that the loop makes.
        position: of the loop in its epoch.
        place: of the current micro-batch in its window; -1 outside.
        has_stepped: whether an optimizer was stepped in this window.
        is_cut: whether the run has ended within its epoch, which a resume continues.
        stream: the data of the first loop, if they are a :class:`.Stream`.
        reshuffles: whether the loops of an epoch have different orders.
        skips: whether samples that cannot be read are left out.
        scalars: logged by the loop since the last row.
    """

    def __init__(self, rank: RankContext, prepared: PreparedModels, resumed: Resumed, beside: Beside) -> None:
        self.ranks = rank.compared
        self.prepared = prepared
        self._resumed = resumed
        self.position = resumed.position
        self._beside = beside
        module = prepared.container()
        plan = rank.plan
        exact = rank.plan.reproducibility == "exact"
        if plan.sync_batchnorm:
            convert(module)
        self._shards = prepared.divided(rank)
        self.precision = SharedPrecision(plan.placement["precision"], rank.device, plan.pre_scale)
        self._sharing = prepared.sharing()
        self.steppers = build_steppers(rank, prepared, self.precision, self._shards)
        # How many steps a loop takes is known when it is over; ``total`` serves for progress.
        max_steps = rank.config.training.max_steps
        timed = tuple if self._shards else module.parameters
        log = RunLog(rank, resumed.state, timed, ends_at_total=max_steps is not None)
        log.total = max_steps or log.total  # the plan knows of an epoch's first loop only
        mode: Any = "exact" if exact else "ranks" if rank.collectives.size > 1 else "alone"
        prefix = f"{next(iter(prepared.models))}." if len(prepared.models) == 1 else ""
        self._buffers = Buffers(module, rank.device, mode, ("before session.prepare()", prefix))
        passes = Passes(module, self._buffers, plan.seed, [rank.device])
        super().__init__(rank, log, passes, [stepper.update for stepper in self.steppers.values()])
        #: By optimizer; the log has that of the first one.
        self._losses = {name: LossMeter(rank.device) for name in self.steppers}
        self._losses[next(iter(self.steppers))] = self.log.losses
        #: Sums the buffers of an exact run's lanes, if there are some that change.
        self._lanes: LaneSums | None = None
        if exact and self._buffers.tensors("mean", "max", "once"):
            self._lanes = LaneSums((), self._buffers, rank.device, rank.world)
        self.draws = passes.draws
        self._generator = torch.Generator(rank.device)
        self._part = 0
        self._is_seeded = False
        self._around = contextlib.ExitStack()
        self.stream: Any = None
        self.window: Window | None = None
        self.place = -1
        self._calls = 0
        self._checked = 0
        self.has_stepped = False
        self.is_cut = False
        self.is_ghost = False
        self.reshuffles = True
        self.skips = rank.config.data.on_bad_row == "skip"
        self._flags: Flags | None = None
        keeps_rows = rank.collectives.size == 1 and plan.batch.lanes is None
        self._origins = LossOrigins(self._shards.check_call if self._shards else None, keeps_rows=keeps_rows)
        self._bodies = 0
        self._has_repeated = False
        self._left_in: str | None = None
        self._stepped: set[str] = set()
        self._is_compiled = prepared.is_compiled
        self.scalars: dict[str, Any] = {}

    def close(self) -> None:
        self.has_stepped = False  # a loop that is left from now on counts nothing
        for stepper in self.steppers.values():
            stepper.close()

    # Windows and micro-batches.

    def begin_window(self, window: Window, split: Callable[[int], Any]) -> None:
        """Begin a window; ``split``: the spans of each rank's micro-batches in it."""
        if self._sharing and (self._shards or self.rank.plan.reproducibility == "exact" or len(window.requests) > 1):
            raise UnsupportedError(
                f"{' and '.join(self._sharing)} share parameters",
                why="the gradients of their steps are in the same place, and of fsdp, of exact runs and of several "
                "micro-batches they must be kept apart",
                fix="use ddp, reproducibility: fast and accumulate=1, or optimizers without common parameters",
            )
        self.window = window
        self._split = split
        self._flags = None
        self.has_stepped = False
        self._has_repeated = False
        for stepper in self.steppers.values():
            stepper.begin_window()
        self._buffers.begin()
        if self._lanes is not None:
            self._lanes.begin()

    def micro_batches(
        self, requests: Sequence[BatchRequest], batches: Iterator[Any], *, again: bool = False
    ) -> Iterator[Any]:
        """Yield the batch of each of ``requests``, for one run of the body; ``again``: in the last one's body."""
        for number, request in enumerate(requests):
            # In place of a batch without readable samples comes one that counts nothing.
            request, batch = readable(request, next(batches))
            self._part = request.part if self.rank.plan.batch.lanes else self.rank.world.rank + (number << 16)
            self.place = number
            self._calls = 0
            self.is_ghost = request.ghost
            self._is_seeded = False
            try:
                arrived = self.passes.begin(batch, self.state.step, self._part)
                if request.ghost:
                    self._around.enter_context(self.passes.uncounted())
                    if self._shards:
                        self._around.enter_context(self._shards.silent())
                self._follow(arrived)
                yield arrived
            except GeneratorExit:
                if self.has_parts and not self.has_stepped and (number or self._calls):
                    self._left_in = f"micro-batch {number + 1} of {len(requests)} of step {self.state.step + 1}"
                raise
            finally:
                self._around.close()
                if not self.is_last:
                    for stepper in self.steppers.values():
                        stepper.end_micro_batch(request)
                if self._lanes is not None and again == self._has_repeated:
                    self._lanes.end(request)
                if not again:
                    self.place = -1
                    self.is_ghost = False

    def again(self, read: Callable[[BatchRequest], Any]) -> Iterator[Any]:
        """Yield the micro-batches of this window once more, by ``read``. Raises :class:`TaskError`."""
        window = self._inside("again")
        if not self.is_last:
            raise TaskError(
                "again() was called before the last micro-batch of a step",
                fix="call it where session.reduce(optimizer) has returned True",
            )
        self._around.close()  # the body of the last one has made its passes
        for stepper in self.steppers.values():
            stepper.begin_pass()
        if self._lanes is not None:
            if not self._has_repeated:
                self._lanes.end(window.requests[-1])
            self._lanes.take(self._lanes.total())
            self._lanes.begin()
        self._has_repeated = True
        try:
            yield from self.micro_batches(window.requests, map(read, window.requests), again=True)
        finally:
            self.place = len(window.requests) - 1

    def _follow(self, batch: Any) -> None:
        """Follow values through the body to its loss: in the first steps, and in those after 2, 4, 8, ... others."""
        window = self.window
        count = self._checked
        assert window is not None
        unknown = self._stepped != self.steppers.keys() and count < MAX_FOLLOWED_WINDOWS
        may_have_changed = count.bit_count() == 1  # a body may do something else from an epoch or a step on
        if not (self.checks_losses or (self.has_parts and (unknown or may_have_changed))) or self._is_compiled:
            return
        registered = self._resumed.registered.values()
        modules = [thing for thing in registered if isinstance(thing, nn.Module)]
        averages = chain(self._beside.tensors(), *map(tensors_of, modules))
        number = self._bodies + self.place
        self._origins.begin_body(
            batch,
            self.prepared.loop_tensors(averages, self._buffers.ruled(), registered),
            Part(number, first=self._bodies, is_part=self.has_parts, is_last=self.is_last),
        )
        self._around.enter_context(self._origins)

    @property
    def generator(self) -> torch.Generator:
        self._inside("generator")
        if not self._is_seeded:
            self._is_seeded = True
            self._generator.manual_seed(self.draws.key(self.state.step, self._part, 0, "session"))
        return self._generator

    @property
    def is_last(self) -> bool:
        """Whether this is the last micro-batch of its window."""
        return self.window is not None and self.place == len(self.window.requests) - 1

    @property
    def has_parts(self) -> bool:
        """Whether the body runs for parts of the step's batch: micro-batches or lanes."""
        return self.window is not None and (self.rank.plan.batch.lanes is not None or len(self.window.requests) > 1)

    @property
    def checks_losses(self) -> bool:
        """Whether losses are looked at closely: in the first steps of an attempt."""
        return self._checked < CHECKED_WINDOWS

    @property
    def compares_rows(self) -> bool:
        """Whether ranks compare rows that are given to them: in the first steps, then after 2, 4, 8, ... others."""
        return self.checks_losses or self._checked.bit_count() == 1

    @property
    def rows(self) -> slice:
        window = self._inside("rows")
        if self.skips:
            raise UnsupportedError(
                "session.rows is not known with data.on_bad_row=skip",
                why="samples that cannot be read are left out on the ranks that have them",
                fix="gather what identifies the rows too, such as their labels, or use data.on_bad_row=stop",
            )
        spans = [share[self.place] if self.place < len(share) else (0, 0) for share in self._split(window.size)]
        sizes = [stop - start for start, stop in spans]
        start = sum(sizes[: self.rank.world.rank])
        return slice(start, start + sizes[self.rank.world.rank])

    def _inside(self, call: str) -> Window:
        if self.window is None or self.place < 0:
            raise outside_batches(call)
        return self.window

    def end_window(
        self, waited_s: float, *, position: int, epoch_over: bool, is_update: bool = True, is_done: bool = True
    ) -> None:
        """Count the window, log, and save if that is due; set ``log.ended_by`` if ranks agreed to stop.

        Args:
            position: in the epoch, afterwards.
            is_update: else the run is neither saved nor stopped here.
            is_done: the body was not left. It may have been left by an error, before it updated an average: such a
                window is not saved here.
        """
        window = self.window
        assert window is not None
        state = self.state
        log = self.log
        state.advance(len(window.requests), window.size, state.epoch, position)
        self.precision.settle()
        self.averages.update(state.step)
        if self._lanes is not None:
            self._lanes.take(self._lanes.total())
        self._buffers.end(window)
        self.window = None
        self._checked += 1
        self._bodies += len(window.requests)
        if self._checked == 1:
            self.check_names()
        if self._checked == CHECKED_WINDOWS:
            self._note_carried()
        for name, kind in self._beside.changed() if self._checked == CHECKED_WINDOWS else ():
            self.rank.note(
                "not_kept",
                f"{name} ({kind}) changes in training and is in no checkpoint: a resume would begin with its first "
                f"values. Give it to session.prepare(), or to session.checkpoint({name.rpartition('.')[2]}=...)",
                "warning",
            )
        log.step(window.size, waited_s)
        if log.is_logged(state.step):
            self._log_scalars()
        log.end_step(self._flags if is_update else None, None if epoch_over or not is_done else self.save)

    def _note_carried(self) -> None:
        """Warn of a tensor that is kept from batch to batch and is in no checkpoint."""
        carried = self._origins.carried
        if carried is not None:
            self.rank.note(
                "carried",
                f"The loss depends on {carried.description} that the body keeps from the batch before, and no "
                "checkpoint has it: a resume within an epoch would begin without it. Put it into an object with "
                "state_dict() and load_state_dict(), and give that to session.checkpoint(state=...)",
                "warning",
            )

    def _log_scalars(self) -> None:
        scalars = as_numbers(self.scalars)
        for name in [*self.steppers][1:]:
            total, count = self._losses[name].read()
            self._losses[name].reset()
            if count:
                scalars[f"{name}_loss"] = total / count
        self.log_step(scalars, without_items=None)

    # Backward calls and steps.

    def backward(
        self,
        total: Any,
        count: Any,
        weight: Any,
        models: Iterable[nn.Module] | nn.Module | None,
        *,
        retain_graph: bool,
        create_graph: bool,
    ) -> None:
        window = self._inside("backward")
        samples = None
        self._origins.check(total)
        if self.checks_losses:
            self._beside.refuse_scaled()
            samples = window.requests[self.place].size
        total, count = checked_sum(total, count, weight, samples)
        if create_graph and self._shards:
            raise self._shards.second_order("backward(..., create_graph=True)")
        if models is not None and self._shards:
            raise UnsupportedError(
                "backward(..., models=...) is incompatible with strategy fsdp",
                why="a backward pass gathers and reduces whole blocks",
                fix="leave models out, and call zero_grad() of the optimizers that shall not step, or use ddp",
            )
        inputs = None if models is None else self.prepared.parameters(models)
        self._calls += 1
        for stepper in self.steppers.values():
            stepper.before_backward(self.state.step, self._calls, last=self.is_last)
        with self._origins.paused():
            value: Tensor | float = backward(
                total,
                self.precision,
                inputs,
                retain_graph=retain_graph,
                create_graph=create_graph,
                counts=not self.is_ghost,
            )
        if self.is_ghost:
            value = 0.0
            count = 0.0
        for stepper in self.steppers.values():
            stepper.after_backward(self.state.step, value, count, self._requests)

    def _requests(self) -> Flags:
        return self.log.requests(self.state.step + 1)

    def _stepper(self, optimizer: Any, call: str) -> tuple[SessionOptimizer, Window]:
        window = self._inside(call)
        return self.steppers[self.prepared.optimizer_name(optimizer, call)], window

    def _reduced(self, stepper: SessionOptimizer, window: Window) -> Reduced:
        """Sums of ``stepper``, and its gradients, over all ranks and micro-batches. Collective."""
        if stepper.held:
            return stepper.held
        if self.checks_losses:
            self.ranks.check(f"session.step({stepper.name})")
        sums = stepper.reduce(self._requests(), window.requests[self.place], self.state.step)
        self._flags = sums.flags or self._flags
        return sums

    def step(self, optimizer: Any, max_norm: float | None) -> bool:
        stepper, window = self._stepper(optimizer, "step")
        stepper.check_ready()
        self._origins.step(stepper.name)
        self._stepped.add(stepper.name)
        if not self.is_last:
            return False
        with self._origins.paused():
            sums = self._reduced(stepper, window)
            self.has_stepped = True
            self._losses[stepper.name].add(sums.total, sums.count)
            stepper.apply(sums, self.state.step, max_norm, want_norm=self.log.is_logged(self.state.step + 1))
        for name in self._sharing.get(stepper.name, ()):
            self.steppers[name].share(stepper.name)
        return True

    def reduce_only(self, optimizer: Any) -> bool:
        """Make ``p.grad`` the mean gradient over all ranks; :meth:`step` may follow."""
        stepper, window = self._stepper(optimizer, "reduce")
        if self.is_last and not stepper.held:
            with self._origins.paused():
                stepper.hold(self._reduced(stepper, window))
        return self.is_last

    # Epochs.

    def end_epoch(self, logged: Mapping[str, float]) -> None:
        """Write the epoch's row, and save; ``logged`` may be the best so far."""
        log = self.log
        self.ranks.check("the end of an epoch")
        if self._left_in is not None:
            self.rank.note(
                "left_within_step",
                f"The loop was left in {self._left_in}, so that step was not taken. The body runs once for each "
                "micro-batch: a counter of bodies depends on the devices. Count by session.step_count, where "
                "session.step() has returned True, or set training.max_steps",
                "warning",
            )
            self._left_in = None
        loss = log.sum_epoch()
        logged = self.rank.collectives.broadcast(dict(logged))
        # Where the run ends within an epoch, nothing is judged: without the stop there would be no evaluation there.
        # A loop may evaluate in some epochs only.
        is_evaluated = self.state.best_step is None or self.rank.plan.monitor in logged
        judged = logged if is_evaluated and not self.is_cut else None
        metrics = {"train_loss": loss, **logged}
        if not self.is_cut:
            self.position.move_to(0)
        self.record_epoch(metrics, ended=not self.is_cut, judged=judged)

    @property
    def items(self) -> int:
        """How many items of the first loops of epochs have been used."""
        samples = self.rank.plan.batch.samples
        return self.state.epoch * samples + (samples if self.position.loops else self.state.position)

    # Checkpoints.

    def _trainer_state(self) -> dict[str, Any]:
        position = {
            "stage": self.position.loops,
            "update": self.position.updates,
            "made": list(self._resumed.made.values),
            "reshuffles": self.reshuffles,
        }
        return super()._trainer_state() | {
            "update": {name: stepper.update.state_dict() for name, stepper in self.steppers.items()},
            "task": {name: thing.state_dict() for name, thing in self._resumed.registered.items()},
            "session": position if self.stream is None else position | {"stream": self.stream.state_dict(self.items)},
        }

    def restore(self) -> None:
        """Restore optimizers and schedulers, and where the loop was. Raises :class:`CheckpointError`."""
        updates = {name: stepper.update for name, stepper in self.steppers.items()}
        session = self._resumed.restore(self.rank, updates, self._module)
        self._saved_at = self.state.step, self.state.epoch
        self.reshuffles = session.get("reshuffles", False)
