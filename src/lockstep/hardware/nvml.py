"""Facts about NVIDIA GPUs through NVML, without a CUDA context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lockstep.errors import gigabytes

#: nvmlClocksThrottleReasons of faults (nvml.h); a power cap under load is normal.
_SLOWDOWNS = {"hot": 0x20 | 0x40, "power brake": 0x80, "hardware": 0x8}
_POWER_CAP = {"power cap": 0x4}
#: NVML_P2P_CAPS_INDEX_READ (nvml.h); the bindings have a tuple there.
_P2P_READ = 0


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process with memory on a GPU. ``memory_gb`` in 1e9 bytes, ``None`` if the driver does not report it."""

    pid: int
    name: str
    memory_gb: float | None


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One GPU (or MIG slice). Memory in bytes, ``None`` if unknown."""

    uuid: str
    name: str
    capability: tuple[int, int]
    total: int | None = None
    free: int | None = None
    users: tuple[GpuUser, ...] = ()
    mig: bool = False


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """Health of a GPU; ``None`` if the driver does not report a value.

    Attributes:
        ecc: error correction is on.
        ecc_errors: uncorrectable errors since the driver was loaded.
        repair: repair of broken memory rows: ``"pending"`` (at the next reset), ``"failed"``, or empty.
        slowdowns: reasons for reduced clocks now: ``"hot"``, ``"power brake"``, ``"hardware"``.
    """

    temperature_c: int | None = None
    ecc: bool | None = None
    ecc_errors: int | None = None
    repair: str = ""
    slowdowns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuLink:
    """Connection of two GPUs: peer access (``None``: not reported), and NVLink."""

    peer: bool | None
    nvlink: bool


class Nvml:
    """The driver's NVML, through nvidia-ml-py's module ``library``; use it as a context manager."""

    def __init__(self, library: Any) -> None:
        self._lib = library
        self._handles: dict[str, Any] = {}

    def gpus(self) -> list[NvmlGpu]:
        """List every GPU in the order of the PCI bus, regardless of ``CUDA_VISIBLE_DEVICES``."""
        count = self._lib.nvmlDeviceGetCount()
        return [self._describe(self._lib.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]

    def by_uuid(self, uuid: str) -> NvmlGpu | None:
        handle = self._handle(uuid)
        return None if handle is None else self._describe(handle)

    def driver_cuda(self) -> tuple[int, int]:
        """Return the newest CUDA version that the driver supports, as (major, minor)."""
        version = self._lib.nvmlSystemGetCudaDriverVersion_v2()  # 1000 × major + 10 × minor
        return version // 1000, version % 1000 // 10

    def driver_version(self) -> str:
        """Return the version of the driver; empty if it does not report one."""
        return _text(self._ask(self._lib.nvmlSystemGetDriverVersion))

    def health(self, uuid: str) -> GpuHealth:
        lib = self._lib
        ask = self._ask
        handle = self._handle(uuid)
        ecc = ask(lib.nvmlDeviceGetEccMode, handle)
        kinds = (lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, lib.NVML_VOLATILE_ECC)
        rows = ask(lib.nvmlDeviceGetRemappedRows, handle)  # corrected, uncorrected, pending, failed
        return GpuHealth(
            temperature_c=ask(lib.nvmlDeviceGetTemperature, handle, lib.NVML_TEMPERATURE_GPU),
            ecc=None if ecc is None else bool(ecc[0]),
            ecc_errors=ask(lib.nvmlDeviceGetTotalEccErrors, handle, *kinds),
            repair="" if rows is None else "failed" if rows[3] else "pending" if rows[2] else "",
            slowdowns=self._slowed_by(handle, _SLOWDOWNS),
        )

    def reading(self, uuid: str) -> dict[str, Any]:
        """Return the load of a GPU; cheap enough for once a second. ``None`` if the driver does not report a value.

        ``utilisation``: share of the last sample period (up to a second) in which a kernel ran; a MIG slice has none.
        ``memory_gb``: in use by all processes. ``throttled``: the slowdowns of :class:`GpuHealth`, and ``"power cap"``,
        which is usual under load.
        """
        lib = self._lib
        ask = self._ask
        handle = self._handle(uuid)
        rates = ask(lib.nvmlDeviceGetUtilizationRates, handle)  # percent
        memory = ask(lib.nvmlDeviceGetMemoryInfo, handle)
        power = ask(lib.nvmlDeviceGetPowerUsage, handle)  # mW
        limit = ask(lib.nvmlDeviceGetEnforcedPowerLimit, handle)  # mW
        return {
            "utilisation": None if rates is None else rates.gpu / 100,
            "memory_gb": None if memory is None else gigabytes(int(memory.total) - int(memory.free)),
            "memory_total_gb": None if memory is None else gigabytes(int(memory.total)),
            "power_w": None if power is None else power / 1000,
            "power_limit_w": None if limit is None else limit / 1000,
            "temperature_c": ask(lib.nvmlDeviceGetTemperature, handle, lib.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": ask(lib.nvmlDeviceGetClockInfo, handle, lib.NVML_CLOCK_SM),
            "memory_clock_mhz": ask(lib.nvmlDeviceGetClockInfo, handle, lib.NVML_CLOCK_MEM),
            "throttled": list(self._slowed_by(handle, _POWER_CAP | _SLOWDOWNS)),
        }

    def users(self, uuid: str) -> tuple[GpuUser, ...]:
        return self._users(self._handle(uuid))

    def link(self, first_uuid: str, second_uuid: str) -> GpuLink:
        lib = self._lib
        ask = self._ask
        pair = [self._handle(first_uuid), self._handle(second_uuid)]
        reads = ask(lib.nvmlDeviceGetP2PStatus, *pair, _P2P_READ)
        return GpuLink(
            peer=None if reads is None else reads == lib.NVML_P2P_STATUS_OK,
            nvlink=ask(lib.nvmlDeviceGetP2PStatus, *pair, lib.NVML_P2P_CAPS_INDEX_NVLINK) == lib.NVML_P2P_STATUS_OK,
        )

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ask(self._lib.nvmlShutdown)

    def _ask(self, function: Any, *args: Any) -> Any:
        """Call NVML; ``None`` if the driver or device does not support the call, or if a handle is ``None``."""
        try:
            return None if None in args else function(*args)
        except self._lib.NVMLError:
            return None

    def _handle(self, uuid: str) -> Any:
        """Return the driver's handle of a GPU, cached because finding it takes milliseconds."""
        if self._handles.get(uuid) is None:
            self._handles[uuid] = self._ask(self._lib.nvmlDeviceGetHandleByUUID, uuid.encode())
        return self._handles[uuid]

    def _slowed_by(self, handle: Any, kinds: Mapping[str, int]) -> tuple[str, ...]:
        reasons = self._ask(self._lib.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return tuple(name for name, bits in kinds.items() if reasons & bits)

    def _describe(self, handle: Any) -> NvmlGpu:
        lib = self._lib
        ask = self._ask
        memory = ask(lib.nvmlDeviceGetMemoryInfo, handle)
        mig = ask(lib.nvmlDeviceGetMigMode, handle)
        parent = ask(lib.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        capability = ask(lib.nvmlDeviceGetCudaComputeCapability, handle if parent is None else parent)
        return NvmlGpu(
            uuid=_text(ask(lib.nvmlDeviceGetUUID, handle)),
            name=_text(ask(lib.nvmlDeviceGetName, handle)) or "NVIDIA GPU",
            capability=capability or (0, 0),
            total=memory and int(memory.total),
            free=memory and int(memory.free),
            users=self._users(handle),
            mig=parent is not None or bool(mig and mig[0]),
        )

    def _users(self, handle: Any) -> tuple[GpuUser, ...]:
        users = []
        for process in self._ask(self._lib.nvmlDeviceGetComputeRunningProcesses, handle) or ():
            # The driver knows the name even if the process runs in another container.
            name = PurePath(_text(self._ask(self._lib.nvmlSystemGetProcessName, process.pid))).name
            memory = None if process.usedGpuMemory is None else gigabytes(process.usedGpuMemory)
            users.append(GpuUser(pid=int(process.pid), name=name or "unknown", memory_gb=memory))
        return tuple(users)


def _text(value: Any) -> str:
    """Convert to text; bindings of old drivers return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
