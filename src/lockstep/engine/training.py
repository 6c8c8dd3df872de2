"""Training on one rank: rows of steps, the ends of epochs, checkpoints.

The loop of a task (:mod:`lockstep.engine.fit`) and that of a session (:mod:`lockstep.engine.session.training`) derive
from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from lockstep._compat.torch import plain_name
from lockstep.checkpoint.content import check_saveable
from lockstep.checkpoint.writer import Steady
from lockstep.engine.distributed.buffers import check_agreement
from lockstep.engine.optim.averages import Averages
from lockstep.engine.optim.step import Update
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import frozen_names
from lockstep.engine.run_log import RunLog
from lockstep.engine.strategies.base import Passes
from lockstep.errors import TaskError
from lockstep.rundir.heartbeat import Activity, pulse


class Training:
    """Trains on one rank. Each method is called on all ranks alike.

    Rank 0 writes checkpoints in the background, or each rank its part.

    Args:
        passes: the trained modules, with their buffers.
        updates: of the optimizers; the first one has the averages of all weights, and the rate of the rows.
        compares: whether the ranks' weights are compared before they are saved.
    """

    def __init__(
        self, rank: RankContext, log: RunLog, passes: Passes, updates: Sequence[Update], *, compares: bool = True
    ) -> None:
        self.rank = rank
        self.log = log
        self.state = log.state
        self.passes = passes
        self._module = passes.module
        self._updates = updates
        self._divides = rank.plan.strategy.divides
        self._compares = compares and not self._divides
        self._names = self._weight_names()
        #: Step and epoch of the last checkpoint.
        self._saved_at = -1, -1

    @property
    def averages(self) -> Averages:
        """The averages of the trained weights."""
        return self._updates[0].averages

    # Rows.

    def log_step(
        self, scalars: Mapping[str, float], *, without_items: float | None = math.nan, is_empty: bool = False
    ) -> None:
        """Emit the row of a log interval; the arguments are those of :meth:`.RunLog.log_step`. Collective."""
        first = self._updates[0]
        skipped = sum(update.skipped for update in self._updates)
        norm = None if first.grad_norm is None else float(first.grad_norm)
        self.log.log_step(
            first.rates.lr, norm, scalars, skipped=skipped, without_items=without_items, is_empty=is_empty
        )

    def record_epoch(self, metrics: Mapping[str, float], *, ended: bool, judged: Mapping[str, float] | None) -> None:
        """Advance schedules, emit the row of an epoch, and save; arguments of :meth:`.RunLog.end_epoch`. Collective."""
        if judged is not None:
            self.advance_rates(judged)
        if ended:
            for update in self._updates:
                update.rates.advance("epoch")
        lr = self._updates[0].rates.lr
        improved = self.log.end_epoch(metrics, lr, ended=ended, judged=judged)
        self.save(best=improved)

    def advance_rates(self, metrics: Mapping[str, float]) -> None:
        """Step the schedules that follow the monitored metric."""
        value = metrics.get(self.rank.plan.monitor)
        if value is not None:
            for update in self._updates:
                update.rates.advance("metric", value)

    # Checkpoints.

    @property
    def saved_at(self) -> int:
        """The step of the last checkpoint; -1: none yet."""
        return self._saved_at[0]

    def check(self) -> None:
        """Raise now what could not be saved, rather than after an epoch."""
        if self.rank.writer is not None:
            check_saveable(self._module.state_dict(), self._trainer_state())

    def check_names(self) -> None:
        """Raise :class:`TaskError` where the model has other weights than it began with: no resume could load them."""
        names = self._weight_names()
        changes = ("gained", sorted(names - self._names)), ("lost", sorted(self._names - names))
        listed = [f"{verb} {', '.join(changed[:5])}" for verb, changed in changes if changed]
        if listed:
            raise TaskError(
                f"in training the model has {' and '.join(listed)}",
                why="whatever makes the model again, such as a resume or an export, makes it without this change, and "
                "could not load its checkpoints",
                fix="make all parameters and buffers with the model; register a cache with persistent=False",
            )

    def _weight_names(self) -> set[str]:
        return {plain_name(name) for name in self._module.state_dict()}

    def save(self, *, best: bool = False) -> None:
        """Compare buffers and weights of the ranks, and save, unless this step has been saved already. Collective."""
        rank = self.rank
        position = (self.state.step, self.state.epoch)
        if self._saved_at == position and not best:
            return
        self._saved_at = position
        self.check_names()
        self.passes.buffers.check()
        if self._compares:
            check_agreement(self._module, [update.optimizer for update in self._updates], rank.collectives)
        self.log.saved()
        if rank.writer is None and not self._divides:
            return
        with pulse.during(Activity.SAVING), ExitStack() as averages:
            for update in self._updates:
                averages.enter_context(update.averages.in_use())
            content: dict[str, Any] = {"model": self._module.state_dict(), "trainer": self._trainer_state()}
            if rank.reads_shards:
                from lockstep.engine.distributed.dtensor_state import own_part

                content = own_part(content, is_main=rank.collectives.is_main)
            elif (divided := self._updates[0].divided) is not None:
                content = divided.whole(content, rank.collectives, keep=rank.writer is not None)
            if rank.writer is not None:
                content["frozen"] = frozen_names(self._module)
                self.log.write(content, best=best, steady=self._steady())
                for update in self._updates:
                    update.waits_for = rank.writer.copied

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Collective."""
        with pulse.during(Activity.SAVING if self.rank.writer is not None else Activity.AWAITING_SAVE):
            if self.rank.writer is not None:
                self.rank.writer.wait()
                pulse.at(Activity.AWAITING_SAVE)
            self.rank.collectives.broadcast(None)  # barrier

    def _trainer_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint besides the model; subclasses add optimizers, schedules and generators."""
        state = self.state
        state.skipped_steps = sum(update.skipped for update in self._updates)
        if not self._divides:
            state.frozen = frozen_names(self._module)
        return {"state": self.log.current_state()}

    def _steady(self) -> Steady | None:
        """Return the argument ``steady`` of :meth:`.HostBuffers.copy`."""
        return None
