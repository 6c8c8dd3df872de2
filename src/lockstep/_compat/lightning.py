"""Private names of Lightning, except those of :mod:`lockstep._compat.lightning_cli`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer

#: Where a checkpoint of the Trainer counts the batches that took an optimizer step.
STEPPED = "_batches_that_stepped"


def call_before(loop: Any, hook: str, action: Callable[[], bool | None]) -> None:
    """Call ``action`` before the method ``hook`` of one of a Trainer's loops, which is left out if it returns False."""
    method = getattr(loop, hook)

    def called(*args: Any) -> None:
        if action() is not False:
            method(*args)

    setattr(loop, hook, called)


def optimizers_of(made: Any) -> tuple[list[Optimizer], list[Any]]:
    """Return the optimizers, and the configurations of schedulers, in what ``configure_optimizers()`` returned."""
    optimizers, schedulers, monitor = _configure_optimizers(made)
    return optimizers, _configure_schedulers_automatic_opt(schedulers, monitor)


class LaunchedDdp(DDPStrategy):
    """DDP without a launcher: the processes exist, and the plan has decided their number of threads."""

    def _configure_launcher(self) -> None:
        pass
