"""What a session restores before its loop begins: weights and registered states; optimizers follow with the plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.checkpoint.store import Snapshot
from lockstep.engine.resume import Reads, load_initial_weights, load_latest, load_weights, restoring
from lockstep.engine.session.saving import Stateful
from lockstep.engine.state import TrainState
from lockstep.errors import CheckpointError, TaskError


class Resumed:
    """The checkpoint that a session begins with, if there is one; registered states are restored from it."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.registered: dict[str, Stateful] = {}
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
