"""What this machine has to train on: its devices, and the cores and memory that this process may really use.

NVIDIA's GPUs are described by NVML, anything else by a short-lived process that asks torch; the calling
process imports no torch and holds no context on any GPU. ``gpu:i`` is what torch here calls ``cuda:i``.

Cores and memory are those within the process's affinity and its control groups, version 2 (``cpu.max``, ``memory.max``)
and version 1 (``cpu.cfs_quota_us``, ``memory.limit_in_bytes``), as the kernel's documentation has them.
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

ROOT = Path("/")
TIMEOUT_S = 120.0
#: In the order in which generations of GPUs learned them.
PRECISIONS = ("32", "16-mixed", "bf16-mixed", "bf16-true")
# Runs in a separate process, so that what torch opens is closed again at once.
_SCRIPT = """
import json, torch
accelerator = torch.accelerator.current_accelerator(check_available=True)
devices = []
for index in range(torch.accelerator.device_count() if accelerator is not None else 0):
    entry = {"kind": accelerator.type, "uuid": "", "name": accelerator.type, "capability": [0, 0]}
    module = getattr(torch, accelerator.type, None)
    if accelerator.type == "cuda":
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        entry.update(name=properties.name, total=total, free=free, uuid=str(getattr(properties, "uuid", "")),
                     capability=[properties.major, properties.minor])
    elif hasattr(module, "get_device_name"):
        entry["name"] = module.get_device_name(index)
    devices.append(entry)
print(json.dumps(devices))
"""


@dataclass(frozen=True, slots=True)
class Device:
    """One entry of ``lockstep devices``. Memory in 1e9 bytes, one decimal; ``None`` where free memory is unknown.

    Attributes:
        id: ``"cpu"``, ``"gpu:<index>"`` (torch's ``cuda:<index>``), or, not supported yet, ``"mps:0"`` and the like.
        kind: ``"cpu"``, ``"gpu"``, or torch's name of another accelerator.
        precisions: what training can use here, of ``32``, ``16-mixed``, ``bf16-mixed`` and ``bf16-true``.
        supported: whether Lockstep can train here; ``note``: why not, or what else people should know.
        cores: of a CPU, the logical cores that this process may use.
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
    """What the installed torch was built for: versions, or ``None``."""

    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None

    @property
    def cuda_major(self) -> int:
        return int((self.cuda or "0").partition(".")[0])


def detect_devices(*, refresh: bool = False) -> list[Device]:
    """The CPU, then every GPU, then accelerators that are not supported yet.

    Looks once a process; ``refresh`` looks again (free memory and users change).
    """
    if refresh:
        _detected.cache_clear()
    return list(_detected())


def get_available_gpus() -> list[dict[str, Any]]:
    """The GPUs that Lockstep can train on: ``index``, ``name`` and ``memory_gb`` (1e9 bytes) of each."""
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
    """The driver's NVML, started; ``None`` where there is no NVIDIA driver."""
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
    return TorchBuild(cuda=values.get("cuda"), hip=values.get("hip"), xpu=values.get("xpu"))


def worth_probing(build: TorchBuild) -> bool:
    """Whether torch could find an accelerator at all: a probe takes seconds, so not without a reason."""
    import ctypes
    from importlib.metadata import entry_points

    if build.hip or build.xpu or sys.platform == "darwin" or entry_points(group="torch.backends"):
        return True
    with contextlib.suppress(OSError):  # loading the driver starts nothing; a context would need its ``cuInit``
        return build.cuda is not None and bool(ctypes.CDLL("libcuda.so.1"))
    return False


def probe() -> list[NvmlGpu]:
    """What ``torch.accelerator`` finds, asked in a separate process. Raises ``OSError``, with the reason."""
    command = [sys.executable, "-P", "-c", _SCRIPT]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"torch did not answer within {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return read_answer(done.stdout)


def read_answer(text: str) -> list[NvmlGpu]:
    """The devices in the probe's output; its last line, since libraries may print before it. Raises ``OSError``."""
    try:
        entries = json.loads(text.strip().splitlines()[-1])
        return [NvmlGpu(**{**entry, "capability": tuple(entry["capability"])}) for entry in entries]
    except (LookupError, ValueError, TypeError) as error:
        raise OSError(f"torch's answer was not understood: {error}") from None


def find_devices(
    environ: Mapping[str, str], build: TorchBuild, nvml: Nvml | None, ask_torch: Callable[[], list[NvmlGpu]]
) -> list[Device]:
    """Put together what the sources say.

    ``build``: what torch was built for. ``ask_torch``: called only when NVML does not know; raises ``OSError`` when it
    cannot answer either.
    """
    gpus = nvml.gpus() if nvml else []
    problem = _driver_problem(build, nvml) if nvml and gpus else ""
    order = _nvml_order(gpus, environ) if gpus else None
    if problem or order is not None:
        chosen = gpus if order is None else [gpus[position] for position in order]
        return [_cpu(), *(_gpu(index, gpu, build, problem) for index, gpu in enumerate(chosen))]
    try:
        found = ask_torch()
    except OSError as error:
        problem = f"torch cannot use it: {error}"
        note = "" if gpus else f"the search for accelerators failed: {error}"
        return [_cpu(note), *(_gpu(index, gpu, build, problem) for index, gpu in enumerate(gpus))]
    return [_cpu(), *(_probed(index, device, build, nvml, gpus) for index, device in enumerate(found))]


def _nvml_order(gpus: Sequence[NvmlGpu], environ: Mapping[str, str]) -> list[int] | None:
    """CUDA's order of the visible GPUs as positions in NVML's; ``None`` where only CUDA knows.

    CUDA puts the fastest GPU first unless it is set to follow the bus; among equal GPUs that is the bus order too.
    """
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    if not by_bus or any(gpu.mig for gpu in gpus):
        return None
    return visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), [gpu.uuid for gpu in gpus])


def visible_gpus(variable: str | None, uuids: Sequence[str]) -> list[int] | None:
    """Positions in ``uuids`` of the GPUs that ``CUDA_VISIBLE_DEVICES`` names, by numbers or by UUIDs.

    ``None`` for any other value, such as MIG slices, which only the CUDA runtime itself can number.
    """
    if variable is None:
        return list(range(len(uuids)))
    if variable.strip() in {"", "-1"}:
        return []
    positions = {name: position for position, uuid in enumerate(uuids) for name in (str(position), uuid)}
    entries = [entry.strip() for entry in variable.split(",")]
    found = [positions[entry] for entry in entries if entry in positions]
    alike = len({entry.isdecimal() for entry in entries}) == 1
    return found if alike and len(found) == len(entries) == len(set(found)) else None


def _driver_problem(build: TorchBuild, nvml: Nvml) -> str:
    """Why this torch cannot use NVIDIA GPUs with this driver; empty when it can."""
    if build.cuda is None:
        kind = "ROCm" if build.hip else "XPU" if build.xpu else "CPU"
        return f"the installed torch is a {kind} build: install the CUDA build"
    driver = nvml.driver_cuda()
    # Within a major version any driver runs any build: "CUDA minor version compatibility".
    if driver[0] < build.cuda_major:
        return f"the driver supports CUDA {driver[0]}.{driver[1]}, torch needs {build.cuda}: update the driver"
    return ""


def _gpu(index: int, gpu: NvmlGpu, build: TorchBuild, problem: str) -> Device:
    """A GPU as torch numbers it; ``problem``: why it cannot be used, if that is known."""
    capability = "compute capability {}.{}".format(*gpu.capability)
    # CUDA 13 dropped what came before Turing (its release notes, "Deprecated Architectures").
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
    """A device that torch numbered, with what NVML knows about it."""
    if device.kind != "cuda":
        return Device(
            id=f"{device.kind}:{index}",
            kind=device.kind,
            name=device.name,
            memory_gb=gigabytes(device.total or 0),
            precisions=(),
            supported=False,
            note=f"{device.kind} is not supported yet: Lockstep trains on CUDA and ROCm GPUs and on CPUs",
        )
    known = nvml and next((gpu for gpu in gpus if gpu.uuid.removeprefix("GPU-") == device.uuid), None)
    if nvml and device.uuid and known is None:
        known = nvml.by_uuid(f"MIG-{device.uuid}")
    return _gpu(index, replace(device, uuid=known.uuid, users=known.users) if known else device, build, "")


def cuda_precisions(capability: tuple[int, int]) -> tuple[str, ...]:
    """What an NVIDIA GPU of a compute capability computes at full speed ("Compute Capabilities" in CUDA's guide).

    Half precision has tensor cores since 7.0, bfloat16 since 8.0; torch emulates bfloat16 before that. The numbers that
    torch gives ROCm's GPUs are above both, as these compute in both formats.
    """
    return PRECISIONS[: 1 + (capability >= (7, 0)) + 2 * (capability >= (8, 0))]


def _cpu(note: str = "") -> Device:
    """The CPU: it computes in every precision, in half precision only slowly (torch emulates it)."""
    total, free = usable_memory()
    return Device(
        id="cpu",
        kind="cpu",
        name=cpu_name(),
        memory_gb=gigabytes(total),
        free_gb=gigabytes(free),
        precisions=PRECISIONS,
        note=note,
        cores=usable_cores(),
    )


def visible_cores() -> int:
    """Logical cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def usable_cores(root: Path = ROOT) -> int:
    """Logical cores: the process's affinity, cut to its cgroup's quota; at least 1."""
    cores = visible_cores()
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = _cpu_quota(folder)
        if quota > 0 and period > 0:
            # 1.5 cores' worth of time throttles two busy threads, so round down.
            cores = min(cores, max(1, quota // period))
    return cores


def usable_memory(root: Path = ROOT) -> tuple[int, int]:
    """Total and free memory in bytes, cut to the cgroup's limit, whose file cache the kernel would give back."""
    import psutil

    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < total:
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
            counts = _counts(folder / "memory.stat")
            cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
            total, free = limit, min(free, max(0, limit - max(0, used - cached)))
    return total, free


def oom_kills(root: Path = ROOT) -> int:
    """How many processes the kernel has killed for want of memory: in this cgroup, or on the machine; 0: not known."""
    names = ("memory.events", "memory.oom_control")
    files = [folder / name for folder in _cgroup_folders(root, "memory") for name in names]
    found = (_counts(file).get("oom_kill") for file in (*files, root / "proc/vmstat"))
    return next((count for count in found if count is not None), 0)


def cpu_name(root: Path = ROOT) -> str:
    try:
        for line in (root / "proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders whose limits hold for this process: its own cgroup and all above it."""
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
        # In a container the path is often the host's, and the limits lie at the top.
        yield from (place for place in (folder, *folder.parents) if place.is_dir() and place.is_relative_to(top))


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """(time, period) in µs; (0, 0) without a limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return (0, 0) if quota == "max" else (int(quota), int(period))
    except (OSError, ValueError):
        return _number(folder / "cpu.cfs_quota_us") or 0, _number(folder / "cpu.cfs_period_us") or 0


def _counts(file: Path) -> dict[str, int]:
    """Lines of a name and a number; empty where there are none."""
    try:
        return {name: int(count) for name, count in (line.split() for line in file.read_text().splitlines())}
    except (OSError, ValueError):
        return {}


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
