"""The checkpoints of a session: what is prepared and registered, and where the loop is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

from lockstep.checkpoint.content import check_saveable
from lockstep.engine.distributed.buffers import Buffers, check_agreement
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import check_moments, freeze_again, frozen_names, restoring
from lockstep.engine.run_log import RunLog
from lockstep.engine.session.stepper import Stepper
from lockstep.engine.strategies.base import SeededDraws
from lockstep.errors import CheckpointError
from lockstep.telemetry.progress_board import Activity, pulse


class Stateful(Protocol):
    """What a checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class SessionCheckpoints:
    """Saves and restores what one rank trains.

    Args:
        registered: what is saved besides, by name.
        place: where the loop is, beyond what the run's state says.
    """

    def __init__(
        self,
        rank: RankContext,
        log: RunLog,
        module: nn.Module,
        steppers: Mapping[str, Stepper],
        buffers: Buffers,
        draws: SeededDraws,
        registered: Mapping[str, Stateful],
        place: Callable[[], dict[str, Any]],
    ) -> None:
        self._rank, self._log, self._module, self._steppers = rank, log, module, steppers
        self._buffers, self._draws, self._registered, self._place = buffers, draws, registered, place
        self._saved_at = -1, -1

    def check(self) -> None:
        """Raise now what could not be saved, rather than after an epoch."""
        if self._rank.writer is not None:
            check_saveable(self._module.state_dict(), self._trainer_state())

    def save(self, *, best: bool = False) -> None:
        """Compare the ranks' weights and save, unless this step has been saved already. Collective."""
        place = self._log.state.step, self._log.state.epoch
        if self._saved_at == place and not best:
            return
        self._saved_at = place
        self._buffers.check()
        for stepper in self._steppers.values():
            check_agreement(self._module, stepper.optimizer, self._rank.collectives)
        self._log.saved()
        if self._rank.writer is not None:
            with pulse.during(Activity.SAVING):
                trainer = self._trainer_state()
                content = {"model": self._module.state_dict(), "trainer": trainer, "frozen": self._log.state.frozen}
                self._log.write(content, best=best)

    def wait(self) -> None:
        """Wait until the last one is on disk. Collective."""
        with pulse.during(Activity.SAVING if self._rank.writer is not None else Activity.AWAITING_SAVE):
            if self._rank.writer is not None:
                self._rank.writer.wait()
            self._rank.collectives.broadcast(None)  # barrier

    def _trainer_state(self) -> dict[str, Any]:
        state = self._log.state
        state.draws_seeded = self._draws.everything
        state.skipped_steps = sum(stepper.update.skipped for stepper in self._steppers.values())
        state.frozen = frozen_names(self._module)
        return {
            "state": self._log.current_state(),
            "update": {name: stepper.update.state_dict() for name, stepper in self._steppers.items()},
            "task": {name: thing.state_dict() for name, thing in self._registered.items()},
            "session": self._place(),
        }

    def restore(self, trainer: Mapping[str, Any]) -> dict[str, Any]:
        """Restore optimizers and their schedulers; returns the saved place. Raises :class:`CheckpointError`."""
        saved, source = trainer["update"], self._rank.run_dir.path
        if "session" not in trainer or saved.keys() != self._steppers.keys():
            raise CheckpointError(
                f"the checkpoints in {source} are not of this loop",
                why=f"it prepares the optimizers {', '.join(self._steppers)}, and they have "
                + (", ".join(saved) if "session" in trainer else "the state of a task"),
                fix="give prepare() the same optimizers as before, under the same names, or choose another --save-dir",
            )
        with restoring(source):
            for name, stepper in self._steppers.items():
                stepper.update.load_state_dict(saved[name])
                check_moments(stepper.optimizer)
        self._saved_at = self._log.state.step, self._log.state.epoch
        freeze_again(self._module, self._log.state.frozen)
        place: dict[str, Any] = trainer["session"]
        return place
