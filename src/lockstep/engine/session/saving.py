"""The checkpoints of a session: what is prepared and registered, and where the loop is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from lockstep.checkpoint.store import Snapshot
from lockstep.engine.checkpoints import Saves
from lockstep.engine.distributed.buffers import Buffers
from lockstep.engine.optim.averages import Averages
from lockstep.engine.optim.step import Update
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import (
    Reads,
    check_moments,
    freeze_again,
    load_initial_weights,
    load_latest,
    load_weights,
    restoring,
)
from lockstep.engine.run_log import RunLog
from lockstep.engine.session.made import Made
from lockstep.engine.session.stepper import Stepper
from lockstep.engine.state import TrainState
from lockstep.engine.strategies.base import SeededDraws
from lockstep.errors import CheckpointError, TaskError


class Stateful(Protocol):
    """What a checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class SessionCheckpoints(Saves):
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
        super().__init__(rank, log, module)
        self._steppers, self._buffers, self._draws = steppers, buffers, draws
        self._registered, self._place = registered, place
        #: Of all models; the first optimizer's update saves and restores them.
        self.averages = Averages(rank.config.averaging, module, rank.plan.total_steps)
        next(iter(self._updates())).averages = self.averages

    def _updates(self) -> Collection[Update]:
        return [stepper.update for stepper in self._steppers.values()]

    def _check_buffers(self) -> None:
        self._buffers.check()

    def _whole(self, content: dict[str, Any]) -> dict[str, Any]:
        if not self._divides:
            return content
        from lockstep.engine.distributed.dtensor_state import gathered

        found: dict[str, Any] = gathered(content, keep=self._rank.writer is not None)
        return found

    def _trainer_state(self) -> dict[str, Any]:
        self._log.state.draws_seeded = self._draws.everything
        return super()._trainer_state() | {
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


class Resumed:
    """The checkpoint that a session begins with, if there is one; optimizers are restored from it with the plan."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.registered: dict[str, Stateful] = {}
        self.made = Made()
        self._begun = False

    def register(self, things: Mapping[str, Any], source: Path) -> None:
        for name, thing in things.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TaskError(
                    f"checkpoint({name}=...) was given a {type(thing).__name__}",
                    fix="give it an object with state_dict() and load_state_dict()",
                )
            self.registered[name] = thing
            self._load(name, source)

    @property
    def place(self) -> Mapping[str, Any]:
        """Where the loop was, if the run is resumed."""
        return {} if self.snapshot is None else self.snapshot.trainer.get("session", {})

    def begin(self, rank: Reads, module: nn.Module, state: TrainState, *, found: bool, init_from: Path | None) -> None:
        """Restore ``module``, ``state`` and what is registered, once; of a new run, the initial weights. Collective.

        Args:
            found: whether the run has been trained before.
        """
        if self._begun:
            return
        self._begun = True
        self.snapshot = load_latest(rank) if found else None
        source = rank.run_dir.path
        if self.snapshot is None:
            load_initial_weights(module, init_from, rank.collectives)
            return
        with restoring(source):
            vars(state).update(vars(TrainState.from_state_dict(self.snapshot.trainer["state"])))
        load_weights(module, self.snapshot.model, source)
        for name in self.registered:
            self._load(name, source)

    def _load(self, name: str, source: Path) -> None:
        if self.snapshot is None:
            return
        saved = self.snapshot.trainer["task"]
        if name not in saved:
            raise CheckpointError(
                f"the checkpoint has no state of {name}",
                why=f"it has {', '.join(saved) or 'no registered state at all'}",
                fix="register what was registered when the run began, under the same names",
            )
        with restoring(source):
            self.registered[name].load_state_dict(saved[name])
