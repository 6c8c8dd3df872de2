"""Private names of Lightning, except those of :mod:`lockstep._compat.lightning_cli`."""

from __future__ import annotations

from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

#: Where a checkpoint of the Trainer counts the batches that took an optimizer step.
STEPPED = "_batches_that_stepped"


class LaunchedDdp(DDPStrategy):
    """DDP without a launcher: the processes exist, and the plan has decided their number of threads."""

    def _configure_launcher(self) -> None:
        pass


class ReducedEarlyStopping(EarlyStopping):
    """Early stopping that decides on :meth:`reduced` of the monitored value."""

    def reduced(self, current: Tensor) -> Tensor:
        """``current``, of shape (), as all ranks see it; on the same device as before or another."""
        raise NotImplementedError

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        return super()._evaluate_stopping_criteria(self.reduced(current))
