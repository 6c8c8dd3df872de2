"""Detect the devices of this machine, and the cores and memory that this process may use.

NVML describes NVIDIA GPUs; a short-lived process with torch describes those that NVML cannot number, and AMD's. The
calling process does not import torch and opens no context on a GPU. ``gpu:i`` is torch's ``cuda:i``.

Cores and memory are limited by the process's affinity and its control groups, version 2 (``cpu.max``, ``memory.max``)
and version 1 (``cpu.cfs_quota_us``, ``memory.limit_in_bytes``); see the kernel's documentation.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.errors import gigabytes
from lockstep.hardware.nvml import GpuUser, Nvml, NvmlGpu
from lockstep.precisions import PRECISIONS

ROOT = Path("/")
TIMEOUT_S = 120.0
#: In the order in which generations of GPUs introduced them.
# Runs in a separate process, so that torch's contexts on GPUs are closed at once.
_SCRIPT = """
import json, torch
devices = []
for index in range(torch.cuda.device_count()):
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    devices.append({"uuid": str(getattr(properties, "uuid", "")), "name": properties.name, "total": total, "free": free,
                    "capability": [properties.major, properties.minor]})
print(json.dumps(devices))
"""


@dataclass(frozen=True, slots=True)
class Device:
    """One entry of ``lockstep devices``. Memory in 1e9 bytes, one decimal; ``None`` if free memory is unknown.

    Attributes:
        id: ``"cpu"`` or ``"gpu:<index>"`` (torch's ``cuda:<index>``).
        kind: ``"cpu"`` or ``"gpu"``.
        precisions: names of supported precisions, of :data:`lockstep.precisions.PRECISIONS`.
        supported: Lockstep can train on this device.
        note: the reason if it is not supported, or another remark for users.
        cores: logical cores of the CPU that this process may use; ``None`` for other devices.
    """

    id: str
    kind: str
    name: str
    memory_gb: float
    free_gb: float | None = None
    users: tuple[GpuUser, ...] = ()
    precisions: tuple[str, ...] = ("32",)
    uuid: str | None = None
    supported: bool = True
    note: str = ""
    cores: int | None = None

    @property
    def index(self) -> int:
        return int(self.id.partition(":")[2] or 0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Versions of the platforms that the installed torch was built for, or ``None``."""

    cuda: str | None = None
    hip: str | None = None

    @property
    def cuda_major(self) -> int:
        return int((self.cuda or "0").partition(".")[0])


def detect_devices(*, refresh: bool = False) -> list[Device]:
    """Return the CPU, then every GPU.

    The result is cached in this process; ``refresh`` detects again (free memory and users change).
    """
    if refresh:
        _detected.cache_clear()
    return list(_detected())


def get_available_gpus() -> list[dict[str, Any]]:
    """Return ``index``, ``name`` and ``memory_gb`` (1e9 bytes) of each GPU that Lockstep can train on."""
    gpus = usable_gpus(detect_devices())
    return [{"index": gpu.index, "name": gpu.name, "memory_gb": gpu.memory_gb} for gpu in gpus]


def usable_gpus(detected: Sequence[Device]) -> list[Device]:
    return [device for device in detected if device.kind == "gpu" and device.supported]


@functools.cache
def _detected() -> tuple[Device, ...]:
    build = read_torch_build()
    ask = probe if worth_probing(build) else list[NvmlGpu]
    nvml = open_nvml()
    with nvml or contextlib.nullcontext():
        return tuple(find_devices(os.environ, build, nvml, ask))


def open_nvml() -> Nvml | None:
    """Initialize the driver's NVML; ``None`` without an NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return Nvml(pynvml)


def read_torch_build() -> TorchBuild:
    spec = find_spec("torch")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    try:
        values = runpy.run_path(str(Path(folders[0]) / "version.py"))
    except (IndexError, OSError, SyntaxError, NameError, ImportError):
        return TorchBuild()
    return TorchBuild(cuda=values.get("cuda"), hip=values.get("hip"))


def worth_probing(build: TorchBuild) -> bool:
    """Check whether torch could find a GPU; saves the seconds of a probe if not."""
    import ctypes

    if build.hip:
        return True
    with contextlib.suppress(OSError):  # loading the driver starts nothing; a context would need its ``cuInit``
        return build.cuda is not None and bool(ctypes.CDLL("libcuda.so.1"))
    return False


def probe() -> list[NvmlGpu]:
    """List the GPUs of ``torch.cuda`` in a separate process. Raises ``OSError`` with the reason."""
    command = [sys.executable, "-P", "-c", _SCRIPT]
    try:
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"torch did not answer within {TIMEOUT_S:g} s") from None
    if process.returncode:
        raise OSError((process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return read_answer(process.stdout)


def read_answer(text: str) -> list[NvmlGpu]:
    """Parse the last line of the probe's output; libraries may print before it. Raises ``OSError``."""
    try:
        entries = json.loads(text.strip().splitlines()[-1])
        return [NvmlGpu(**{**entry, "capability": tuple(entry["capability"])}) for entry in entries]
    except (LookupError, ValueError, TypeError) as error:
        raise OSError(f"torch's answer was not understood: {error}") from None


def find_devices(
    environ: Mapping[str, str], build: TorchBuild, nvml: Nvml | None, ask_torch: Callable[[], list[NvmlGpu]]
) -> list[Device]:
    """Combine the answers of NVML and torch.

    Args:
        ask_torch: called only if NVML cannot answer; raises ``OSError`` on failure.
    """
    gpus = nvml.gpus() if nvml else []
    problem = _driver_problem(build, nvml) if nvml and gpus else ""
    order = _nvml_order(gpus, environ) if gpus else None
    if problem or order is not None:
        visible = gpus if order is None else [gpus[position] for position in order]
        return [_cpu(), *(_gpu(index, gpu, build, problem) for index, gpu in enumerate(visible))]
    try:
        torch_devices = ask_torch()
    except OSError as error:
        problem = f"torch cannot use it: {error}"
        note = "" if gpus else f"the search for GPUs failed: {error}"
        return [_cpu(note), *(_gpu(index, gpu, build, problem) for index, gpu in enumerate(gpus))]
    return [_cpu(), *(_probed(index, device, build, nvml, gpus) for index, device in enumerate(torch_devices))]


def _nvml_order(gpus: Sequence[NvmlGpu], environ: Mapping[str, str]) -> list[int] | None:
    """Return the visible GPUs in CUDA's order as positions in NVML's; ``None`` if only CUDA knows the order.

    CUDA puts the fastest GPU first unless it is set to follow the bus; among equal GPUs that is the bus order too.
    """
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    if not by_bus or any(gpu.mig for gpu in gpus):
        return None
    return visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), [gpu.uuid for gpu in gpus])


def visible_gpus(variable: str | None, uuids: Sequence[str]) -> list[int] | None:
    """Return the positions in ``uuids`` of the GPUs that ``CUDA_VISIBLE_DEVICES`` names, by numbers or by UUIDs.

    ``None`` for any other value, such as MIG slices, which only the CUDA runtime itself can number.
    """
    if variable is None:
        return list(range(len(uuids)))
    if variable.strip() in {"", "-1"}:
        return []
    positions = {name: position for position, uuid in enumerate(uuids) for name in (str(position), uuid)}
    entries = [entry.strip() for entry in variable.split(",")]
    visible = [positions[entry] for entry in entries if entry in positions]
    has_one_form = len({entry.isdecimal() for entry in entries}) == 1
    return visible if has_one_form and len(visible) == len(entries) == len(set(visible)) else None


def _driver_problem(build: TorchBuild, nvml: Nvml) -> str:
    """Return the reason if this torch cannot use NVIDIA GPUs with this driver, else an empty text."""
    if build.cuda is None:
        kind = "ROCm" if build.hip else "CPU"
        return f"the installed torch is a {kind} build: install the CUDA build"
    driver = nvml.driver_cuda()
    # Within a major version any driver runs any build: "CUDA minor version compatibility".
    if driver[0] < build.cuda_major:
        return f"the driver supports CUDA {driver[0]}.{driver[1]}, torch needs {build.cuda}: update the driver"
    return ""


def _gpu(index: int, gpu: NvmlGpu, build: TorchBuild, problem: str) -> Device:
    """Describe a GPU with torch's ``index``; ``problem``: the reason if it cannot be used."""
    capability = "compute capability {}.{}".format(*gpu.capability)
    # CUDA 13 dropped the architectures before Turing (its release notes, "Deprecated Architectures").
    if not problem and build.cuda_major >= 13 and (0, 0) < gpu.capability < (7, 5):
        problem = f"{capability} is older than CUDA {build.cuda} supports: install torch for CUDA 12"
    note = "" if gpu.capability >= (8, 0) else f"{capability}: bf16-mixed needs 8.0, 16-mixed 7.0"
    return Device(
        id=f"gpu:{index}",
        kind="gpu",
        name=gpu.name,
        memory_gb=gigabytes(gpu.total or 0),
        free_gb=None if gpu.free is None else gigabytes(gpu.free),
        users=gpu.users,
        precisions=() if problem else cuda_precisions(gpu.capability),
        uuid=gpu.uuid or None,
        supported=not problem,
        note=problem or note,
    )


def _probed(index: int, device: NvmlGpu, build: TorchBuild, nvml: Nvml | None, gpus: Sequence[NvmlGpu]) -> Device:
    """Describe a GPU that torch listed, with NVML's UUID and users."""
    nvml_gpu = nvml and next((gpu for gpu in gpus if gpu.uuid.removeprefix("GPU-") == device.uuid), None)
    if nvml and device.uuid and nvml_gpu is None:
        nvml_gpu = nvml.by_uuid(f"MIG-{device.uuid}")
    if nvml_gpu:
        device = replace(device, uuid=nvml_gpu.uuid, users=nvml_gpu.users)
    return _gpu(index, device, build, problem="")


def cuda_precisions(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the precisions that a GPU has at full speed.

    ROCm GPUs compute in all formats, and torch's capabilities of them are above 8.0.
    """
    return tuple(spec.name for spec in PRECISIONS.values() if capability >= spec.capability)


def _cpu(note: str = "") -> Device:
    """Describe the CPU, which supports every precision (half precision is slow, as torch emulates it)."""
    total, free = usable_memory()
    return Device(
        id="cpu",
        kind="cpu",
        name=cpu_name(),
        memory_gb=gigabytes(total),
        free_gb=gigabytes(free),
        precisions=tuple(PRECISIONS),
        note=note,
        cores=usable_cores(),
    )


def visible_cores() -> int:
    """Count the logical cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def usable_cores(root: Path = ROOT) -> int:
    """Count the logical cores of the process's affinity, limited by its cgroup's quota; at least 1."""
    cores = visible_cores()
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = _cpu_quota(folder)
        if quota > 0 and period > 0:
            # 1.5 cores' worth of time throttles two busy threads, so round down.
            cores = min(cores, max(1, quota // period))
    return cores


def usable_memory(root: Path = ROOT) -> tuple[int, int]:
    """Return total and free memory in bytes, limited by the cgroup; its file cache counts as free."""
    import psutil

    memory = psutil.virtual_memory()
    total = int(memory.total)
    free = int(memory.available)
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < total:
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
            counts = _counts(folder / "memory.stat")
            cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
            total = limit
            free = min(free, max(0, limit - max(0, used - cached)))
    return total, free


def oom_kills(root: Path = ROOT) -> int:
    """Count the processes that the kernel has killed out of memory, in this cgroup or on the machine; 0 if unknown."""
    names = ("memory.events", "memory.oom_control")
    files = [folder / name for folder in _cgroup_folders(root, "memory") for name in names]
    kills = (_counts(file).get("oom_kill") for file in (*files, root / "proc/vmstat"))
    return next((count for count in kills if count is not None), 0)


def cpu_name(root: Path = ROOT) -> str:
    try:
        for line in (root / "proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders whose limits apply to this process: its cgroup and all above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        names = [name for name in (controllers, controller) if controllers and (base / name).is_dir()]
        top = base / names[-1] if names else base
        folder = top / path.strip("/")
        # In a container the path is often the host's, and the limits are in the top folder.
        ancestors = (folder, *folder.parents)
        yield from (ancestor for ancestor in ancestors if ancestor.is_dir() and ancestor.is_relative_to(top))


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """Return quota and period in µs; (0, 0) without a limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return (0, 0) if quota == "max" else (int(quota), int(period))
    except (OSError, ValueError):
        return _number(folder / "cpu.cfs_quota_us") or 0, _number(folder / "cpu.cfs_period_us") or 0


def _counts(file: Path) -> dict[str, int]:
    """Parse lines of a name and a number; empty if the file cannot be read or parsed."""
    try:
        return {name: int(count) for name, count in (line.split() for line in file.read_text().splitlines())}
    except (OSError, ValueError):
        return {}


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
