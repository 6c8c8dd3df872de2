"""NVML through its bindings: mapping of what the driver says, gaps included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import gigabytes
from lockstep.hardware.detect import open_nvml
from lockstep.hardware.nvml import GpuHealth, GpuLink, GpuUser, Nvml, NvmlGpu
from tests.fakes import NO_READING, FakeNvml


class DriverError(Exception):
    """Stands for ``pynvml.NVMLError``."""


class Driver:
    """The functions of ``pynvml`` that Lockstep calls, over plain dictionaries; a missing entry is 'not supported'."""

    NVMLError = DriverError
    NVML_TEMPERATURE_GPU = NVML_VOLATILE_ECC = NVML_P2P_STATUS_OK = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self, *handles: dict[str, Any]) -> None:
        self.handles = handles
        self.open = True

    def _get(self, handle: dict[str, Any], key: str) -> Any:
        if key not in handle:
            raise DriverError(key)
        return handle[key]

    def nvmlDeviceGetCount(self) -> int:
        return sum("parent" not in handle for handle in self.handles)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.handles[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> dict[str, Any]:
        for handle in self.handles:
            if handle.get("uuid") == uuid.decode():
                return handle
        raise DriverError(uuid)

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> Any:
        return self._get(handle, "name")

    def nvmlDeviceGetUUID(self, handle: dict[str, Any]) -> Any:
        return self._get(handle, "uuid")

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> Any:
        total, free = self._get(handle, "memory")
        return SimpleNamespace(total=total, free=free)

    def nvmlDeviceGetMigMode(self, handle: dict[str, Any]) -> Any:
        return self._get(handle, "mig")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: dict[str, Any]) -> Any:
        return self._get(handle, "parent")

    def nvmlDeviceGetCudaComputeCapability(self, handle: dict[str, Any]) -> Any:
        return self._get(handle, "capability")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: dict[str, Any]) -> Any:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._get(handle, "processes")]

    def nvmlSystemGetProcessName(self, pid: int) -> Any:
        if pid == 404:
            raise DriverError(pid)
        return b"/usr/bin/python3"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlDeviceGetTemperature(self, handle: dict[str, Any], sensor: int) -> Any:
        return self._get(handle, "temperature")

    def nvmlDeviceGetUtilizationRates(self, handle: dict[str, Any]) -> Any:
        return SimpleNamespace(gpu=self._get(handle, "utilisation"), memory=0)

    def nvmlDeviceGetPowerUsage(self, handle: dict[str, Any]) -> Any:
        return self._get(handle, "power")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: dict[str, Any]) -> Any:
        return self._get(handle, "power limit")

    def nvmlDeviceGetClockInfo(self, handle: dict[str, Any], kind: int) -> Any:
        return self._get(handle, "clocks")[kind]

    def nvmlDeviceGetEccMode(self, handle: dict[str, Any]) -> Any:
        return self._get(handle, "ecc")

    def nvmlDeviceGetTotalEccErrors(self, handle: dict[str, Any], kind: int, counter: int) -> Any:
        return self._get(handle, "ecc errors")

    def nvmlDeviceGetRemappedRows(self, handle: dict[str, Any]) -> Any:
        return self._get(handle, "remapped rows")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: dict[str, Any]) -> Any:
        return self._get(handle, "throttle reasons")

    def nvmlDeviceGetP2PStatus(self, one: dict[str, Any], other: dict[str, Any], capability: int) -> Any:
        return self._get(one, "peers")[other["uuid"]][capability]

    def nvmlShutdown(self) -> None:
        self.open = False


WHOLE = {
    "name": "NVIDIA H100 80GB HBM3",
    "uuid": "GPU-1",
    "memory": (85_899_345_920, 80_000_000_000),
    "capability": (9, 0),
    "mig": (0, 0),
    "processes": [(11, 2_000_000_000), (404, None)],
}


def test_a_gpu_in_full() -> None:
    driver = Driver(WHOLE)
    with Nvml(driver) as nvml:
        (gpu,) = nvml.gpus()
        assert nvml.driver_cuda() == (12, 4)
    assert not driver.open
    assert gpu == NvmlGpu(
        uuid="GPU-1",
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        total=85_899_345_920,
        free=80_000_000_000,
        users=(GpuUser(11, "python3", 2.0), GpuUser(404, "unknown", None)),
    )


def test_a_gpu_whose_driver_says_little() -> None:
    (gpu,) = Nvml(Driver({"name": b"Orin", "uuid": b"GPU-2"})).gpus()
    assert gpu == NvmlGpu(uuid="GPU-2", name="Orin", capability=(0, 0), total=None, free=None)


def test_mig_slices_take_the_capability_of_their_gpu() -> None:
    parent = {**WHOLE, "mig": (1, 1), "processes": []}
    part = {"name": "NVIDIA H100 MIG 1g.10gb", "uuid": "MIG-7", "memory": (10, 9), "parent": parent}
    nvml = Nvml(Driver(parent, part))
    assert [gpu.mig for gpu in nvml.gpus()] == [True]
    found = nvml.by_uuid("MIG-7")
    assert found is not None
    assert (found.mig, found.capability, found.total) == (True, (9, 0), 10)
    assert nvml.by_uuid("MIG-8") is None


def test_health_and_links() -> None:
    hot = {"uuid": "GPU-1", "temperature": 93, "ecc": (1, 1), "ecc errors": 2, "remapped rows": (0, 1, 1, 0)}
    hot |= {"throttle reasons": 0x4 | 0x40 | 0x80, "peers": {"GPU-2": {0: 0, 2: 5}}, "levels": {"GPU-2": 50}}
    nvml = Nvml(Driver(hot, {"uuid": "GPU-2"}))
    assert nvml.driver_version() == "550.54.15"
    assert nvml.health("GPU-1") == GpuHealth(93, True, 2, "pending", ("hot", "power brake"))
    assert nvml.health("GPU-2") == nvml.health("GPU-9") == GpuHealth()
    assert nvml.link("GPU-1", "GPU-2") == GpuLink(peer=True, nvlink=False)
    assert nvml.link("GPU-2", "GPU-1") == nvml.link("GPU-1", "GPU-9") == GpuLink(peer=None, nvlink=False)


def test_readings() -> None:
    busy = {**WHOLE, "utilisation": 97, "power": 640_500, "power limit": 700_000, "temperature": 61}
    busy |= {"clocks": {1: 1980, 2: 2619}, "throttle reasons": 0x4 | 0x20}
    nvml = Nvml(Driver(busy, {"uuid": "GPU-2"}))
    assert list(nvml.reading("GPU-1").values()) == [0.97, 5.9, 85.9, 640.5, 700.0, 61, 1980, 2619, ["power cap", "hot"]]
    assert nvml.users("GPU-1") == (GpuUser(11, "python3", 2.0), GpuUser(404, "unknown", None))
    for uuid in ("GPU-2", "GPU-9"):  # a driver that says nothing; no such GPU
        assert nvml.reading(uuid) == NO_READING
        assert nvml.users(uuid) == ()


def test_the_fake_is_one_too() -> None:
    gpu = NvmlGpu("GPU-1", "X", (8, 0), 1, 1)
    fake: Nvml = FakeNvml([gpu], driver=(12, 8))
    with fake as nvml:
        assert nvml.gpus() == [gpu]
        assert nvml.by_uuid("GPU-1") == gpu
        assert nvml.by_uuid("GPU-2") is None
        assert nvml.driver_cuda() == (12, 8)


def test_opening_works_or_says_no() -> None:
    nvml = open_nvml()
    if nvml is not None:
        with nvml:
            assert all(gpu.uuid for gpu in nvml.gpus())


@pytest.mark.gpu
def test_the_real_one_knows_its_gpus() -> None:
    nvml = open_nvml()
    assert nvml is not None
    with nvml:
        for gpu in nvml.gpus():
            assert gpu.total
            assert gpu.capability > (0, 0)
            assert nvml.by_uuid(gpu.uuid) is not None
            health = nvml.health(gpu.uuid)
            assert health.temperature_c is None or 0 < health.temperature_c < 120
            assert nvml.reading(gpu.uuid)["memory_total_gb"] == gigabytes(gpu.total)
        assert nvml.driver_version()
