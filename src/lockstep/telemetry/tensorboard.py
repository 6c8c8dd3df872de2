"""TensorBoard's event files in a run's ``logs/``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError
from lockstep.events import EpochEnded, Event, PictureDrawn, RunEnded, RunStarted
from lockstep.telemetry.pictures import loggers_take_pictures
from lockstep.telemetry.scalars import named_scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def tensorboard_wanted(setting: str) -> bool:
    """Whether to write TensorBoard files: ``auto`` means when it is installed."""
    installed = importlib.util.find_spec("tensorboard") is not None
    if setting == "on" and not installed:
        raise ConfigError(
            "telemetry.tensorboard is on, but TensorBoard is not installed",
            fix="pip install 'lockstep-train[tensorboard]', or set telemetry.tensorboard=auto",
        )
    return installed and setting != "off"


class TensorBoardSink:
    """Scalars for TensorBoard over the optimizer step, named as :func:`~lockstep.telemetry.scalars.named_scalars` does.

    Args:
        folder: where the event files go; a resumed run adds one, which hides what it supersedes.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(self._folder), purge_step=event.step + 1)
        if self._writer is None:
            return
        step, values = named_scalars(event)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if isinstance(event, PictureDrawn) and loggers_take_pictures():
            form = "HW" if event.pixels.ndim == 2 else "HWC"
            self._writer.add_image(event.name, event.pixels, event.step, dataformats=form)
        if isinstance(event, EpochEnded | RunEnded):
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
