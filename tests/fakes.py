"""What stands in for a driver, a machine and a logger in tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.events import Event
from lockstep.hardware.monitor import Sample
from lockstep.hardware.nvml import GpuHealth, GpuLink, GpuUser, NvmlGpu

#: Of a driver that says nothing.
NO_READING: dict[str, Any] = {
    **dict.fromkeys(("utilisation", "memory_gb", "memory_total_gb", "power_w", "power_limit_w", "temperature_c")),
    **{"sm_clock_mhz": None, "memory_clock_mhz": None, "throttled": []},
}


class FakeNvml:
    """A machine with the GPUs that it is given."""

    def __init__(
        self,
        gpus: Sequence[NvmlGpu] = (),
        *,
        driver: tuple[int, int] = (13, 0),
        health: Mapping[str, GpuHealth] | None = None,
        links: Mapping[tuple[str, str], GpuLink] | None = None,
        readings: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self._gpus = list(gpus)
        self._readings = dict(readings or {})
        self._driver = driver
        self._health = dict(health or {})
        self._links = dict(links or {})

    def gpus(self) -> list[NvmlGpu]:
        return list(self._gpus)

    def by_uuid(self, uuid: str) -> NvmlGpu | None:
        return next((gpu for gpu in self._gpus if gpu.uuid == uuid), None)

    def driver_cuda(self) -> tuple[int, int]:
        return self._driver

    def driver_version(self) -> str:
        return "580.65.06"

    def health(self, uuid: str) -> GpuHealth:
        return self._health.get(uuid, GpuHealth())

    def reading(self, uuid: str) -> dict[str, Any]:
        return {**NO_READING, **self._readings.get(uuid, {})}

    def users(self, uuid: str) -> tuple[GpuUser, ...]:
        gpu = self.by_uuid(uuid)
        return gpu.users if gpu else ()

    def link(self, one: str, other: str) -> GpuLink:
        return self._links.get((one, other), GpuLink(peer=None, nvlink=False))

    def __enter__(self) -> FakeNvml:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class FakeSource:
    """Gives the samples that it is given, then the last one again."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._left = list(samples)

    def sample(self) -> Sample:
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]

    def __enter__(self) -> FakeSource:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class RecordingSink:
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass
