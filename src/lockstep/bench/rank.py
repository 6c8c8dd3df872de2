"""What a benchmark's function gets on every rank: where its rows go, and what its devices use."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.hardware.host import usable_memory
from lockstep.hardware.monitor import SystemSource
from lockstep.hardware.resolve import Placement
from lockstep.launch.local import worker
from lockstep.telemetry.files import JsonLines, read_jsonl

#: In the folder of a trial: what rank 0 has reported so far.
ROWS_FILE = "rows.jsonl"
#: Share of a machine's free memory that the ranks of a trial on its CPU may take together.
CPU_SHARE = 0.8


class Rank(worker.Rank):
    """One rank of a trial."""

    def report(self, row: Mapping[str, Any]) -> None:
        """Keep ``row``, whatever happens to this process afterwards; rank 0 alone does."""
        if self.world.is_main:
            JsonLines(self.folder.path / ROWS_FILE).append(row)

    def check(self) -> None:
        """Raises :class:`KeyboardInterrupt` once a stop was requested."""
        if self.stop.requested is not None:
            raise KeyboardInterrupt


def reported(folder: Path) -> list[dict[str, Any]]:
    """The rows that rank 0 has reported in the folder of a trial."""
    return read_jsonl(folder / ROWS_FILE)


class PeakMemory:
    """The most memory that this rank has held since :meth:`reset`, in bytes for each of its devices.

    On a GPU what torch's allocator gave out; on a CPU the process's resident memory, where Linux lets the peak be
    reset (proc(5), ``clear_refs``, value 5; ``VmHWM``).
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = devices
        self._on_gpu = devices[0].type == "cuda"

    def reset(self) -> None:
        if self._on_gpu:
            for device in self._devices:
                torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> list[int]:
        if self._on_gpu:
            return [torch.cuda.max_memory_allocated(device) for device in self._devices]
        return [_status("VmHWM")]


#: What an NVML reading of the utilisation may span, seconds (nvmlUtilization_t: a sixth of a second to one).
_NVML_WINDOW_S = 1.0


class Utilisation:
    """How busy this rank's devices are, as shares; use it as a context manager.

    On a GPU what its driver says of the last moments, at most a second (NVML); ``None`` where it does not say, and when
    less than that has passed since :meth:`begin`, so that it would be of the time before. On a CPU the processor
    time of this process since :meth:`begin`, as a share of what ``threads`` threads can use.
    """

    def __init__(self, devices: list[torch.device], threads: int) -> None:
        self._gpus = [f"gpu:{device.index}" for device in devices if device.type == "cuda"]
        self._threads = threads
        self._source = SystemSource(self._gpus)
        self._open = contextlib.ExitStack()
        self._began = (0.0, 0.0)

    def __enter__(self) -> Utilisation:
        if self._gpus:
            self._open.enter_context(self._source)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def begin(self) -> None:
        self._began = time.process_time(), time.perf_counter()

    def read(self) -> list[float | None]:
        """One share for each device."""
        used, began = self._began
        if self._gpus and time.perf_counter() - began < _NVML_WINDOW_S:
            return [None] * len(self._gpus)
        if self._gpus:
            found = {device["id"]: device["utilisation"] for device in self._source.sample()["devices"]}
            return [found.get(name) for name in self._gpus]
        return [(time.process_time() - used) / (time.perf_counter() - began) / self._threads]


def memory_share(placement: Placement) -> int | None:
    """Bytes that each rank on a CPU may allocate, so that its trial runs out of memory and not the machine.

    ``None`` on GPUs, whose memory is the limit.
    """
    if placement.accelerator == "gpu":
        return None
    return int(usable_memory()[1] * CPU_SHARE / placement.world_size)


def limit_memory(extra: int) -> None:
    """Let this process allocate at most ``extra`` bytes more than it has now; beyond it allocations fail.

    RLIMIT_DATA counts private writable memory (setrlimit(2), since Linux 4.7), not what is only mapped.
    """
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _status("VmData") + extra
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _status(name: str) -> int:
    """A size in bytes of this process, from ``/proc``."""
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)
