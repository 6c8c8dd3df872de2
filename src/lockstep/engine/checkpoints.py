"""Saving the checkpoints of an attempt, and testing the best one."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lockstep.checkpoint.content import check_saveable
from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.writer import Steady
from lockstep.data.stream import Stream
from lockstep.engine.distributed.buffers import check_agreement
from lockstep.engine.optim.step import Update
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import frozen_names, load_shared, load_weights, restoring
from lockstep.engine.run_log import RunLog
from lockstep.engine.task import Task
from lockstep.rundir.heartbeat import Activity, pulse

if TYPE_CHECKING:
    from lockstep.engine.parts import Parts

#: Bytes on a GPU that may be copied there, so that the copy to host memory need not be waited for.
MOST_CLONED = 2**30


class Saves:
    """Saves what one rank trains. Ranks save together; rank 0 writes in the background, or each rank its part.

    ``compares``: whether the ranks' weights are compared before they are saved.
    """

    def __init__(self, rank: RankContext, log: RunLog, module: nn.Module, *, compares: bool = True) -> None:
        self._rank, self._log, self._module = rank, log, module
        self._divides = rank.plan.strategy.divides
        self._compares = compares and not self._divides
        #: Step and epoch of the last checkpoint.
        self._saved_at = -1, -1

    @property
    def saved_at(self) -> int:
        """The step of the last checkpoint; -1: none yet."""
        return self._saved_at[0]

    def check(self) -> None:
        """Raise now what could not be saved, rather than after an epoch."""
        if self._rank.writer is not None:
            check_saveable(self._module.state_dict(), self._trainer_state())

    def save(self, *, best: bool = False) -> None:
        """Compare buffers and weights of the ranks, and save, unless this step has been saved already. Collective."""
        rank, place = self._rank, (self._log.state.step, self._log.state.epoch)
        if self._saved_at == place and not best:
            return
        self._saved_at = place
        self._check_buffers()
        for update in self._updates() if self._compares else ():
            check_agreement(self._module, update.optimizer, rank.collectives)
        self._log.saved()
        if rank.writer is None and not self._divides:
            return
        with pulse.during(Activity.SAVING), ExitStack() as averages:
            for update in self._updates():
                averages.enter_context(update.averages.in_use())
            content: dict[str, Any] = {"model": self._module.state_dict(), "trainer": self._trainer_state()}
            if rank.reads_shards:
                from lockstep.engine.distributed.dtensor_state import own_part

                content = own_part(content, is_main=rank.collectives.is_main)
            else:
                content = self._whole(content)
            if rank.writer is not None:
                content["frozen"] = frozen_names(self._module)
                self._log.write(content, best=best, steady=self._steady())
                for update in self._updates():
                    update.waits_for = rank.writer.copied

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Collective."""
        with pulse.during(Activity.SAVING if self._rank.writer is not None else Activity.AWAITING_SAVE):
            if self._rank.writer is not None:
                self._rank.writer.wait()
                pulse.at(Activity.AWAITING_SAVE)
            self._rank.collectives.broadcast(None)  # barrier

    def _trainer_state(self) -> dict[str, Any]:
        state = self._log.state
        state.skipped_steps = sum(update.skipped for update in self._updates())
        if not self._divides:
            state.frozen = frozen_names(self._module)
        return {"state": self._log.current_state()}

    def _updates(self) -> Collection[Update]:
        raise NotImplementedError

    def _check_buffers(self) -> None:
        raise NotImplementedError

    def _whole(self, content: dict[str, Any]) -> dict[str, Any]:
        """``content`` from the parts that ranks have, on ranks with a writer. Collective if the model is divided."""
        raise NotImplementedError

    def _steady(self) -> Steady | None:
        """As for :meth:`.HostBuffers.copy`."""
        return None


class Checkpoints(Saves):
    """The checkpoints of a task."""

    def __init__(self, rank: RankContext, task: Task, parts: Parts, log: RunLog, training_data: Any) -> None:
        super().__init__(rank, log, parts.strategy.module, compares=rank.config.debug.trace == "off")
        self._task, self._parts = task, parts
        self._stream = training_data if isinstance(training_data, Stream) else None

    def _updates(self) -> Collection[Update]:
        return (self._parts.update,)

    def _check_buffers(self) -> None:
        self._parts.strategy.check_buffers()

    def _whole(self, content: dict[str, Any]) -> dict[str, Any]:
        return self._parts.strategy.whole(content, self._rank.collectives, keep=self._rank.writer is not None)

    def _steady(self) -> Steady | None:
        """On one GPU, weights and optimizer state stay as they are until the next update, which waits for their copy.

        Not where something besides the update may write to them before.
        """
        parts, has_hooks = self._parts, getattr(self._task.hooks, "__func__", None) is not Task.hooks
        swaps = parts.update.averages.trained() is not None
        if self._rank.device.type != "cuda" or self._divides or swaps or has_hooks or len(parts.callbacks):
            return None
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        whole = sum(value.nbytes for value in self._module.state_dict().values() if isinstance(value, Tensor))
        if whole - sum(parameter.nbytes for parameter in trained) > MOST_CLONED:
            return None
        weights = {parameter.data_ptr() for parameter in trained}
        return lambda place, tensor: tensor.data_ptr() in weights or place[:2] == ("trainer", "update")

    def load_best(self) -> int:
        """Load the weights and the task's state of the best checkpoint, if any; returns their step. Collective."""
        rank, step = self._rank, self._parts.state.step
        store = CheckpointStore(rank.run_dir.checkpoints)
        best = rank.collectives.broadcast(store.step_of("best") if rank.collectives.is_main else None)
        if best is None or best == step:
            return step
        snapshot = load_shared(store, best, rank.collectives, in_pieces=rank.reads_shards)
        load_weights(self._module, snapshot.model, rank.run_dir.path)
        with restoring(f"the checkpoint of step {best}"):
            self._task.load_state_dict(snapshot.trainer["task"])
        return int(best)

    def _trainer_state(self) -> dict[str, Any]:
        state, update = self._parts.state, self._parts.update
        content = super()._trainer_state() | {"update": update.state_dict(), "task": self._task.state_dict()}
        if self._stream is not None:
            content["stream"] = self._stream.state_dict(state.epoch * self._rank.plan.batch.samples + state.position)
        return content
