"""``system-<node>.jsonl``: how busy the devices are while training runs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator

from lockstep.hardware.monitor import INTERVAL_S
from lockstep.telemetry.system import monitored


class DeviceMonitor(Callback):
    """Appends a line to ``FOLDER/system-<node>.jsonl`` every ``interval_s`` seconds; one writer a node.

    The lines are those of every run (:mod:`lockstep.hardware.monitor`), about the GPUs of this node's ranks.
    """

    def __init__(self, folder: Path | str, *, interval_s: float = INTERVAL_S) -> None:
        self._folder = Path(folder)
        self._interval_s = interval_s
        self._open = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.local_rank:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        gpus = trainer.device_ids if isinstance(trainer.accelerator, CUDAAccelerator) else []
        devices = [f"gpu:{index}" for index in gpus]
        monitor = monitored(self._folder, devices, node=trainer.node_rank, interval_s=self._interval_s)
        self._open.enter_context(monitor)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._open.close()
