"""The checkpoint that a session begins with, and objects of the loop in checkpoints besides models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.checkpoint.content import check_saveable, walked
from lockstep.checkpoint.store import Snapshot
from lockstep.data.reader import states_of_generators
from lockstep.engine.optim.step import Update
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import Reads, load_initial_weights, load_latest, load_weights, restore, restoring
from lockstep.engine.state import TrainState
from lockstep.errors import CheckpointError, TaskError


class Stateful(Protocol):
    """An object that checkpoints can keep."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass
class EpochPosition:
    """Position of the loop in its epoch: ``loops`` over batches or updates that are done, and ``updates`` of the next.

    The position in a loop over batches is that of :class:`.TrainState`.
    """

    loops: int = 0
    updates: int = 0

    def move_to(self, loops: int, updates: int = 0) -> None:
        self.loops = loops
        self.updates = updates


class Resumed:
    """The checkpoint that a session begins with, if there is one; optimizers are restored from it with the plan.

    Besides models and optimizers a session keeps ``state``, its ``position``, ``registered`` objects, and values
    ``made`` in the epoch.
    """

    def __init__(self, rank: Reads) -> None:
        self._rank = rank
        self._source = rank.run_dir.path
        self._begun = False
        self.snapshot: Snapshot | None = None
        self.state = TrainState()
        self.position = EpochPosition()
        self.made = Made()
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

    def begin(self, module: nn.Module, *, is_resume: bool, init_from: Path | None) -> None:
        """Restore the run, once; of a new one, the initial weights. Collective."""
        if self._begun:
            return
        self._begun = True
        self.snapshot = load_latest(self._rank) if is_resume else None
        if self.snapshot is None:
            load_initial_weights(module, init_from, self._rank.collectives)
            return
        session = self.snapshot.trainer.get("session", {})
        with restoring(self._source):
            vars(self.state).update(vars(TrainState.from_state_dict(self.snapshot.trainer["state"])))
        self.position.move_to(session.get("stage", 0), session.get("update", 0))
        is_within = self.state.position > 0 or self.position != EpochPosition()
        self.made.resume(session.get("made", ()), within=is_within)
        load_weights(module, self.snapshot.model, self._source)
        for name in self.registered:
            self._load(name)

    def restore(self, rank: RankContext, updates: Mapping[str, Update], module: nn.Module) -> Mapping[str, Any]:
        """Restore optimizers by name, and which parameters of ``module`` are frozen; return the state of the loop.

        Raises:
            CheckpointError: the checkpoint has others.
        """
        snapshot = self.snapshot
        assert snapshot is not None
        saved = snapshot.trainer["update"]
        if "session" not in snapshot.trainer or saved.keys() != updates.keys():
            raise CheckpointError(
                f"the checkpoints in {self._source} are not of this loop",
                why=f"it prepares the optimizers {', '.join(updates)}, and they have "
                + (", ".join(saved) if "session" in snapshot.trainer else "the state of a task"),
                fix="give prepare() the same optimizers as before, under the same names, or choose another --save-dir",
            )

        def load() -> None:
            for name, update in updates.items():
                update.load_state_dict(saved[name])

        judged, _ = restore(rank, snapshot, self.state, module, load)
        if judged is not None:
            rank.note("judged_afresh", judged)
        session: Mapping[str, Any] = snapshot.trainer["session"]
        return session

    def _load(self, name: str) -> None:
        if self.snapshot is None:
            return
        saved = self.snapshot.trainer["task"]
        if name not in saved:
            raise CheckpointError(
                f"the checkpoint has no state of {name}",
                why=f"it has {', '.join(saved) or 'no registered state at all'}",
                fix="register the same objects as when the run began, under the same names",
            )
        with restoring(self._source):
            self.registered[name].load_state_dict(saved[name])


class Made:
    """``values`` that :meth:`lockstep.Session.once` made in this epoch, each with whether it is on a device."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._saved: list[Any] = []
        self._within = False
        self._checked = 0
        self._drawn: tuple[Any, ...] = ()

    def resume(self, values: Iterable[Any], *, within: bool) -> None:
        """Take ``values`` of a checkpoint; ``within``: it is of the middle of an epoch."""
        self._saved = list(values)
        self._within = within

    def begin_epoch(self) -> None:
        self.values.clear()  # of an epoch that was left before its first batch
        self._drawn = states_of_generators() if self._within and not self._saved else ()

    def end_epoch(self) -> None:
        self.values.clear()
        self._saved = []
        self._within = False

    @property
    def is_drawn_again(self) -> bool:
        """Whether the loop has drawn since an epoch began in whose middle the run was stopped, and kept nothing."""
        return bool(self._drawn) and self._drawn != states_of_generators()

    @property
    def replaces_data(self) -> bool:
        """Whether the data of a resumed run may be others than before."""
        return bool(self.values) and (bool(self._saved) or not self._within)

    def once(self, make: Callable[..., Any], arguments: tuple[Any, ...], device: torch.device) -> Any:
        number = len(self.values)
        if number < len(self._saved):
            self.values.append(self._saved[number])
            there, value = self._saved[number]
            return walked(value, lambda leaf, _: leaf.to(device) if there and isinstance(leaf, Tensor) else leaf)
        value = make(*arguments)
        if number >= self._checked:  # not in the first checkpoint; later epochs make the same
            check_saveable({}, {"session.once": value})
            self._checked = number + 1
        on_device = set[bool]()
        walked(value, lambda leaf, _: on_device.add(isinstance(leaf, Tensor) and leaf.device.type != "cpu"))
        self.values.append((True in on_device, value))
        return value
