"""How busy a machine is, sampled once a second by a daemon thread: GPUs through NVML, the host through psutil.

One monitor a node. GPUs are asked by UUID, so ``gpu:0`` is the right one under ``CUDA_VISIBLE_DEVICES``; no context is
opened on any of them. A sample is a plain dictionary of ``time``, ``host`` and ``devices`` (shares are from 0 to 1,
memory in 1e9 bytes, ``None``: the driver does not say); ``users`` stands in every tenth one, and ``note`` in the first
when there is no GPU to ask.
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
#: Samples in a row that may fail before the monitor gives up, and how long its end is waited for.
_MAX_FAILURES, _PATIENCE_S = 10, 5.0
#: Samples from one look at the processes on the GPUs to the next: it is the slowest question.
USERS_EVERY = 10
NO_GPU = "no NVIDIA GPU is monitored: these samples are of the host alone"

Sample = dict[str, Any]


class SystemSource:
    """Where samples of this machine come from; use it as a context manager, in one thread.

    ``devices``: ids of the GPUs to ask (other ids are passed over); ``None``: all that are here.
    """

    def __init__(
        self,
        devices: Iterable[str] | None = None,
        *,
        detect: Callable[[], Sequence[Device]] = detect_devices,
        open_driver: Callable[[], Nvml | None] = open_nvml,
    ) -> None:
        self._wanted = None if devices is None else set(devices)
        self._detect, self._open_driver = detect, open_driver
        self._nvml: Nvml | None = None
        self._gpus: list[Device] = []
        self._samples = 0

    def __enter__(self) -> SystemSource:
        psutil.cpu_percent()  # the first call only starts the measurement
        self._nvml = self._open_driver()
        if self._nvml is not None:
            gpus = [device for device in self._detect() if device.kind == "gpu" and device.uuid is not None]
            self._gpus = [gpu for gpu in gpus if self._wanted is None or gpu.id in self._wanted]
        return self

    def __exit__(self, *exception: object) -> None:
        if self._nvml is not None:
            self._nvml.__exit__(*exception)
        self._nvml = None

    def sample(self) -> Sample:
        """What the machine does now; CPU use is the mean since the last sample."""
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

    ``source`` is entered and left in the thread, so that opening a driver does not delay the caller. What ``write``
    raises there ends the monitor and nothing else: ``error``. ``cpu_s``: CPU seconds that the thread has used.
    """

    def __init__(
        self, source: SystemSource, write: Callable[[Mapping[str, Any]], None], *, interval_s: float = INTERVAL_S
    ) -> None:
        self._source, self._write, self._interval_s = source, write, interval_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-monitor", daemon=True)
        self.cpu_s = 0.0
        self.error: Exception | None = None

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join(_PATIENCE_S)  # a GPU that has fallen off the bus may never answer

    def _run(self) -> None:
        failures, ended = 0, False
        try:
            with self._source as source:
                while not ended:
                    ended = self._end.wait(self._interval_s)
                    try:
                        sample, failures = source.sample(), 0
                    except Exception as error:  # one that fails is left out, until too many have failed in a row
                        failures += 1
                        if failures >= _MAX_FAILURES:
                            text = f"the monitor has ended: {error}"
                            self._write({"time": time.time(), "host": {}, "devices": [], "note": text})
                            raise
                    else:
                        self._write(sample)
                    self.cpu_s = time.thread_time()
        except Exception as error:  # drivers and disks fail in many ways, and none of them may end a run
            self.error = error
