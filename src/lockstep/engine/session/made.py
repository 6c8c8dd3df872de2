"""What a loop makes once in each epoch, kept in the checkpoints within it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.content import walked
from lockstep.engine.process.runtime import states_of_generators


class Made:
    """What :meth:`lockstep.Session.once` has made in this epoch.

    Attributes:
        values: each with whether it has tensors on a device, for checkpoints.
    """

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
        self._kept.clear()
        self._within = False

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
