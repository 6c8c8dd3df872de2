"""``system-<node>.jsonl``: how busy the devices are while training runs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator

from lockstep.errors import StorageError
from lockstep.hardware.device import gigabytes
from lockstep.telemetry.files import JsonLines


class DeviceMonitor(Callback):
    """Appends a line to ``FOLDER/system-<node>.jsonl`` every ``interval_s`` seconds; one writer a node.

    A line: ``time`` (seconds since the epoch), ``host`` (``cpu`` from 0 to 1, ``memory_gb``) and ``devices``: for each
    GPU of this node's ranks ``id``, ``utilisation`` (0 to 1), ``memory_gb``, ``power_w``, ``temperature_c``; a value
    that the driver does not tell is ``null``.
    """

    def __init__(self, folder: Path | str, *, interval_s: float = 5.0) -> None:
        self._folder = Path(folder)
        self._interval_s = interval_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.local_rank:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        gpus = trainer.device_ids if isinstance(trainer.accelerator, CUDAAccelerator) else []
        lines = JsonLines(self._folder / f"system-{socket.gethostname()}.jsonl")
        self._end.clear()
        self._thread = threading.Thread(
            target=self._run, args=(lines, list(gpus)), name="lockstep-device-monitor", daemon=True
        )
        self._thread.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, lines: JsonLines, gpus: Sequence[int]) -> None:
        psutil.cpu_percent()  # the first call only starts the measurement
        ended = False
        while not ended:
            ended = self._end.wait(self._interval_s)
            with contextlib.suppress(StorageError):  # a full disk is for others to report
                lines.append(sample(gpus))


def sample(gpus: Sequence[int]) -> dict[str, Any]:
    """One line now. ``gpus``: torch's indices."""
    memory = psutil.virtual_memory()
    return {
        "time": time.time(),
        "host": {"cpu": psutil.cpu_percent() / 100, "memory_gb": gigabytes(memory.total - memory.available)},
        "devices": [_gpu(index) for index in gpus],
    }


def _gpu(index: int) -> dict[str, Any]:
    return {
        "id": f"gpu:{index}",
        "utilisation": _ask(torch.cuda.utilization, index, 1 / 100),
        "memory_gb": _ask(torch.cuda.device_memory_used, index, 1e-9),
        "power_w": _ask(torch.cuda.power_draw, index, 1 / 1000),
        "temperature_c": _ask(torch.cuda.temperature, index, 1.0),
    }


def _ask(question: Callable[[int], float], index: int, unit: float) -> float | None:
    try:
        return round(question(index) * unit, 3)
    except Exception:  # NVML says in many ways that it does not know
        return None
