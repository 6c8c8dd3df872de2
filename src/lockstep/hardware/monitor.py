"""Load of a machine, sampled once a second by a daemon thread: GPUs through NVML, the host through psutil.

Each node has one monitor. GPUs are addressed by UUID, so ``gpu:0`` is correct under ``CUDA_VISIBLE_DEVICES``; no
context is opened on any of them. A sample is a plain dictionary of ``time``, ``host`` and ``devices`` (shares from 0
to 1, memory in 1e9 bytes, ``None`` if the driver does not report a value). Every tenth sample has ``users``; the first
has ``note`` if there is no GPU.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil

from lockstep.errors import gigabytes
from lockstep.hardware.detect import Device, detect_devices, open_nvml, usable_memory
from lockstep.hardware.nvml import Nvml

INTERVAL_S = 1.0
#: Consecutive failed samples after which the monitor ends.
_MAX_FAILURES = 10
#: Maximum time to wait for the end of the thread.
_JOIN_TIMEOUT_S = 5.0
#: Interval, in samples, of listing the processes on the GPUs, which is the slowest query.
USERS_EVERY = 10
NO_GPU = "no NVIDIA GPU is monitored: these samples are of the host alone"

Sample = dict[str, Any]


class SystemSource:
    """Source of samples of this machine; use it as a context manager, in one thread.

    ``devices``: ids of the GPUs to sample, default: all. Ids of other devices are ignored.
    """

    def __init__(
        self,
        devices: Iterable[str] | None = None,
        *,
        detect: Callable[[], Sequence[Device]] = detect_devices,
        open_driver: Callable[[], Nvml | None] = open_nvml,
    ) -> None:
        self._device_ids = None if devices is None else set(devices)
        self._detect = detect
        self._open_driver = open_driver
        self._nvml: Nvml | None = None
        self._gpus: list[Device] = []
        self._samples = 0

    def __enter__(self) -> SystemSource:
        psutil.cpu_percent()  # the first call only starts the measurement
        self._nvml = self._open_driver()
        if self._nvml is not None:
            gpus = [device for device in self._detect() if device.kind == "gpu" and device.uuid is not None]
            self._gpus = [gpu for gpu in gpus if self._device_ids is None or gpu.id in self._device_ids]
        return self

    def __exit__(self, *exception: object) -> None:
        if self._nvml is not None:
            self._nvml.__exit__(*exception)
        self._nvml = None

    def sample(self) -> Sample:
        """Take a sample; CPU use is the mean since the last one."""
        total, free = usable_memory()
        host = {
            "name": socket.gethostname(),
            "cpu": round(psutil.cpu_percent() / 100, 3),
            "memory_gb": gigabytes(total - free),
            "memory_total_gb": gigabytes(total),
        }
        sample: Sample = {"time": time.time(), "host": host, "devices": [self._gpu(device) for device in self._gpus]}
        if not self._gpus and not self._samples:
            sample["note"] = NO_GPU
        self._samples += 1
        return sample

    def _gpu(self, device: Device) -> dict[str, Any]:
        assert self._nvml is not None and device.uuid is not None
        values = {"id": device.id, "name": device.name, **self._nvml.reading(device.uuid)}
        if self._samples % USERS_EVERY == 0:
            values["users"] = [asdict(user) for user in self._nvml.users(device.uuid)]
        return values


class Monitor:
    """Takes a sample every ``interval_s`` seconds in a daemon thread, and a last one when it is stopped.

    ``source`` is entered and left in the thread, so that opening a driver does not delay the caller. An exception of
    ``write`` ends the monitor only.

    Attributes:
        cpu_s: CPU seconds of the thread.
        error: the exception that ended the monitor.
    """

    def __init__(
        self, source: SystemSource, write: Callable[[Mapping[str, Any]], None], *, interval_s: float = INTERVAL_S
    ) -> None:
        self._source = source
        self._write = write
        self._interval_s = interval_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-monitor", daemon=True)
        self.cpu_s = 0.0
        self.error: Exception | None = None

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join(_JOIN_TIMEOUT_S)  # a GPU that has fallen off the bus may never answer

    def _run(self) -> None:
        failures = 0
        is_last = False
        try:
            with self._source as source:
                while not is_last:
                    is_last = self._end.wait(self._interval_s)
                    try:
                        sample = source.sample()
                    except Exception as error:  # skip the sample, unless too many have failed in a row
                        failures += 1
                        if failures >= _MAX_FAILURES:
                            text = f"the monitor has ended: {error}"
                            self._write({"time": time.time(), "host": {}, "devices": [], "note": text})
                            raise
                    else:
                        failures = 0
                        self._write(sample)
                    self.cpu_s = time.thread_time()
        except Exception as error:  # no failure of a driver or disk may end a run
            self.error = error
