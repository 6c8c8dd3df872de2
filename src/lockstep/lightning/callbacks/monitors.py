"""What a training runs on, how busy its devices are, and its learning rate."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from torch.optim import Optimizer

from lockstep.hardware.monitor import INTERVAL_S
from lockstep.telemetry.sinks import monitored


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


class LearningRate(Callback):
    """Logs the learning rate that a step was *made* with, every ``log_every_n_steps`` steps.

    The name is ``lr``; with several parameter groups ``lr-<group>``, with several optimizers
    ``lr-<optimizer>`` or ``lr-<optimizer>-<group>`` (numbers from 0). ``values`` has the newest ones.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._logged_step = -1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        places = [getattr(wrapped, "optimizer", wrapped) for wrapped in trainer.optimizers]
        name = "lr" if len(places) == 1 else f"lr-{next(i for i, place in enumerate(places) if place is optimizer)}"
        groups = optimizer.param_groups
        if len(groups) == 1:
            self.values[name] = float(groups[0]["lr"])
        else:
            self.values |= {f"{name}-{place}": float(group["lr"]) for place, group in enumerate(groups)}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step = trainer.global_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning sets it from outside the class
        if step == self._logged_step or step % every or not self.values:
            return
        self._logged_step = step
        for logger in trainer.loggers:
            logger.log_metrics(self.values, step=step)
