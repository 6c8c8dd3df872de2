"""What a device is, and which of those detected a selection such as ``gpu:0,gpu:1`` or ``all`` means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import DeviceError
from lockstep.events import Note

_FORM = re.compile(r"cpu|gpu:(0|[1-9][0-9]{0,3})")
#: More ranks than this on one machine are a typing error.
MAX_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process that holds memory on a GPU. ``memory_gb`` in 1e9 bytes, ``None`` where the driver does not say."""

    pid: int
    name: str
    memory_gb: float | None


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


def gigabytes(size: float) -> float:
    """Bytes to 1e9 bytes with one decimal: the unit of every memory figure that people see."""
    return round(size / 1e9, 1)


@dataclass(frozen=True, slots=True)
class Selection:
    """Devices of one accelerator, in the order of the ranks; ``explicit``: the user has named them."""

    devices: tuple[str, ...]
    reason: str
    notes: tuple[Note, ...] = ()
    explicit: bool = False


def parse(names: Iterable[str]) -> tuple[str, ...]:
    """Check the form of each name: ``cpu``, ``gpu:<index>``, or ``all`` alone. Raises :class:`DeviceError`."""
    given = tuple(names)
    if not given:
        raise DeviceError("no device is selected", fix="name at least one, for example --devices cpu")
    if len(given) > MAX_DEVICES:
        raise DeviceError(f"{len(given)} devices are selected", why=f"at most {MAX_DEVICES} are", fix="name fewer")
    if given == ("all",):
        return given
    if "all" in given:
        why = "it means every GPU, or the CPU on a machine without one"
        raise DeviceError("`all` cannot be combined with other devices", why=why, fix="use --devices all")
    for name in given:
        if not isinstance(name, str) or not _FORM.fullmatch(name):
            fix = _nearest_form(str(name).strip().lower())
            raise DeviceError(f"{name!r} is not a device", why="a device is cpu or gpu:<index>", fix=fix)
    return given


def _nearest_form(name: str) -> str:
    """A hint for common mistakes: ``cuda:1``, ``GPU0``, ``0``, ``gpu``."""
    number = re.fullmatch(r"(?:cuda|gpu|nvidia)[\s:_]*(\d{0,4})", name)
    if name.isdecimal():
        return f"name each device: --devices gpu:{int(name)} is one GPU, cpu,cpu two CPU ranks, all every GPU"
    if number:
        return f"write gpu:{int(number[1] or 0)}"
    return "write cpu" if name == "cpu" else "`lockstep devices` lists what is here"


def choose_default(detected: Sequence[Device]) -> Selection:
    """``gpu:0`` if there is one, else the CPU."""
    gpus = usable_gpus(detected)
    if gpus:
        return Selection((gpus[0].id,), "default: the first GPU")
    return Selection(("cpu",), "default: the CPU, as there is no GPU that Lockstep can use")


def select(names: tuple[str, ...], detected: Sequence[Device]) -> Selection:
    """Match parsed names with what is here; ``all`` becomes every GPU, and the CPU is dropped beside a GPU.

    Raises :class:`DeviceError` for a device that is not here, or that Lockstep cannot use.
    """
    if names == ("all",):
        gpus = tuple(gpu.id for gpu in usable_gpus(detected))
        if gpus:
            return Selection(gpus, "all: every GPU", explicit=True)
        return Selection(("cpu",), "all: there is no GPU that Lockstep can use, so the CPU")
    for name in names:
        find(name, detected)
    gpus = tuple(name for name in names if name != "cpu")
    if gpus and len(gpus) < len(names):
        note = Note("cpu_ignored", "The CPU is ignored: a run uses GPUs or the CPU, not both.")
        return Selection(gpus, "as selected, without the CPU", (note,), explicit=True)
    return Selection(names, "as selected", explicit=True)


def find(name: str, detected: Sequence[Device]) -> Device:
    """The detected device of that name. Raises :class:`DeviceError` where there is none that Lockstep can use."""
    device = next((device for device in detected if device.id == name), None)
    fix = f"choose from: {describe([device for device in detected if device.supported])}"
    if device is None:
        raise DeviceError(f"there is no {name} on this machine", why=f"found: {describe(detected)}", fix=fix)
    if not device.supported:
        raise DeviceError(f"{name} ({device.name}) cannot be used", why=device.note or "not supported yet", fix=fix)
    return device


def describe(devices: Sequence[Device]) -> str:
    """``cpu (AMD EPYC), gpu:0 (NVIDIA H200)``, or ``nothing``."""
    return ", ".join(f"{device.id} ({device.name})" for device in devices) or "nothing"


def usable_gpus(detected: Sequence[Device]) -> list[Device]:
    return [device for device in detected if device.kind == "gpu" and device.supported]
