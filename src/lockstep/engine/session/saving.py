"""The checkpoints of a session: what is prepared and registered, what the epoch has made, and where the loop is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.checkpoint.content import walked
from lockstep.checkpoint.store import Snapshot
from lockstep.engine.checkpoints import Saves
from lockstep.engine.distributed.buffers import Buffers
from lockstep.engine.optim.averages import Averages
from lockstep.engine.optim.step import Update
from lockstep.engine.rank_context import RankContext, states_of_generators
from lockstep.engine.resume import Reads, freeze_again, load_initial_weights, load_latest, load_weights, restoring
from lockstep.engine.run_log import RunLog
from lockstep.engine.session.stepper import Stepper
from lockstep.engine.state import TrainState
from lockstep.engine.strategies.base import SeededDraws
from lockstep.errors import CheckpointError, TaskError


class Stateful(Protocol):
    """What a checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class SessionCheckpoints(Saves):
    """Saves and restores what one rank trains, what is ``registered``, and the ``place`` where the loop is."""

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
        self._saved_at = self._log.state.step, self._log.state.epoch
        freeze_again(self._module, self._log.state.frozen)
        place: dict[str, Any] = trainer["session"]
        return place


class Resumed:
    """The checkpoint that a session begins with, if there is one; optimizers are restored from it with the plan."""

    def __init__(self, rank: Reads) -> None:
        self._rank, self._source, self._begun = rank, rank.run_dir.path, False
        self.snapshot: Snapshot | None = None
        self.registered: dict[str, Stateful] = {}

    def register(self, things: Mapping[str, Any]) -> None:
        for name, thing in things.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TaskError(
                    f"checkpoint({name}=...) was given a {type(thing).__name__}",
                    fix="give it an object with state_dict() and load_state_dict()",
                )
            self.registered[name] = thing
            self._load(name)

    @property
    def place(self) -> Mapping[str, Any]:
        """Where the loop was, if the run is resumed."""
        return {} if self.snapshot is None else self.snapshot.trainer.get("session", {})

    def begin(self, module: nn.Module, state: TrainState, *, found: bool, init_from: Path | None) -> None:
        """Restore all if the run was ``found``, once; of a new run, the initial weights. Collective."""
        if self._begun:
            return
        self._begun = True
        self.snapshot = load_latest(self._rank) if found else None
        if self.snapshot is None:
            load_initial_weights(module, init_from, self._rank.collectives)
            return
        with restoring(self._source):
            vars(state).update(vars(TrainState.from_state_dict(self.snapshot.trainer["state"])))
        load_weights(module, self.snapshot.model, self._source)
        for name in self.registered:
            self._load(name)

    def _load(self, name: str) -> None:
        if self.snapshot is None:
            return
        saved = self.snapshot.trainer["task"]
        if name not in saved:
            raise CheckpointError(
                f"the checkpoint has no state of {name}",
                why=f"it has {', '.join(saved) or 'no registered state at all'}",
                fix="register what was registered when the run began, under the same names",
            )
        with restoring(self._source):
            self.registered[name].load_state_dict(saved[name])


class Made:
    """What :meth:`lockstep.Session.once` has made in this epoch: ``values``, each with whether it is on a device."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._kept: list[Any] = []
        self._within = False
        self._drawn: tuple[Any, ...] = ()

    def resume(self, kept: Iterable[Any], *, within: bool) -> None:
        """An attempt begins. ``kept``: ``values`` of the checkpoint; ``within``: it is of the middle of an epoch."""
        self._kept, self._within = list(kept), within

    def begin_epoch(self) -> None:
        self.values.clear()  # of an epoch that was left before its first batch
        self._drawn = states_of_generators() if self._within and not self._kept else ()

    def end_epoch(self) -> None:
        self.values.clear()
        self._kept, self._within = [], False

    @property
    def is_drawn_again(self) -> bool:
        """Whether the loop has drawn since an epoch began in whose middle the run was stopped, and kept nothing."""
        return bool(self._drawn) and self._drawn != states_of_generators()

    @property
    def replaces_data(self) -> bool:
        """Whether the data of a resumed run may be others than before."""
        return bool(self.values) and (bool(self._kept) or not self._within)

    def once(self, make: Callable[..., Any], arguments: tuple[Any, ...], device: torch.device) -> Any:
        place = len(self.values)
        if place < len(self._kept):
            self.values.append(self._kept[place])
            there, value = self._kept[place]
            return walked(value, lambda leaf, _: leaf.to(device) if there and isinstance(leaf, Tensor) else leaf)
        value, where = make(*arguments), set[bool]()
        walked(value, lambda leaf, _: where.add(isinstance(leaf, Tensor) and leaf.device.type != "cpu"))
        self.values.append((True in where, value))
        return value
