"""When to save a checkpoint, and which checkpoints to keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection


class SavePolicy:
    """Save every ``every_steps`` optimizer steps, or when ``every_s`` seconds have passed since the last save.

    Steps are counted from the start of the run, so a resumed run saves at the same steps. Time differs
    between ranks: ask one rank and send its answer to the others.
    """

    def __init__(
        self, every_steps: int | None, every_s: float | None, clock: Callable[[], float] = time.monotonic, step: int = 0
    ) -> None:
        self._every_steps = every_steps
        self._every_s = every_s
        self._clock = clock
        self.saved(step)

    def due(self, step: int) -> bool:
        """Return whether to save after optimizer step ``step``; never twice at one step."""
        if step <= self._step:
            return False
        if self._every_steps is not None and step // self._every_steps > self._step // self._every_steps:
            return True
        return self._every_s is not None and self._clock() - self._time >= self._every_s

    def saved(self, step: int) -> None:
        """Note that the state after ``step`` has been saved, for whatever reason."""
        self._step = step
        self._time = self._clock()


def retained(steps: Collection[int], keep_last: int, best: int | None) -> set[int]:
    """Choose the checkpoints to keep of those at ``steps``: the ``keep_last`` newest, and ``best`` if it exists."""
    newest = sorted(set(steps), reverse=True)[:keep_last]
    return {*newest, best} & set(steps) if best is not None else set(newest)
