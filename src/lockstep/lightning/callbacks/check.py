"""What a training really runs on, printed once."""

from __future__ import annotations

import sys
from typing import TextIO

from lightning.pytorch import Callback, LightningModule, Trainer


class ConfigurationCheck(Callback):
    """Prints accelerator, devices, strategy and precision as the trainer resolved them; rank 0, once.

    Args:
        stream: where to; ``None``: standard output.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._printed = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.is_global_zero and not self._printed:
            self._printed = True
            print(describe(trainer), file=self._stream or sys.stdout, flush=True)


def describe(trainer: Trainer) -> str:
    """The lines that are printed."""
    ranks = f"{trainer.world_size} ranks" if trainer.world_size > 1 else "1 rank"
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    lines = {
        "Accelerator": type(trainer.accelerator).__name__,
        "Devices": f"{list(trainer.device_ids)} ({trainer.strategy.root_device} on rank 0)",
        "Strategy": f"{type(trainer.strategy).__name__} ({ranks}{nodes})",
        "Precision": str(trainer.precision),
    }
    return "\n".join(["Training configuration check:", *(f"- {name}: {value}" for name, value in lines.items())])
