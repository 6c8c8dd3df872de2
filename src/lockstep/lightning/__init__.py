"""Training a ``LightningModule`` with Lockstep, and parts for your own ``Trainer``. Lightning is imported when used."""

from lockstep.hardware.detect import get_available_gpus
from lockstep.hardware.resolve import resolve_hardware
from lockstep.lightning.training import build_trainer, fit

__all__ = ["build_trainer", "fit", "get_available_gpus", "resolve_hardware"]
