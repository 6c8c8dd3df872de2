"""What a device is: the record that detection makes and everything else reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process that holds memory on a GPU. ``memory_gb`` in 1e9 bytes, ``None`` where the driver does not say."""

    pid: int
    name: str
    memory_gb: float | None


@dataclass(frozen=True, slots=True)
class Device:
    """One entry of ``lockstep devices``.

    Attributes:
        id: ``"cpu"``, ``"gpu:<index>"`` (torch's ``cuda:<index>``), or, not supported yet, ``"mps:0"`` and the like.
        kind: ``"cpu"``, ``"gpu"``, or torch's name of another accelerator.
        name: the model, as the driver or the system reports it.
        memory_gb: total memory in 1e9 bytes, one decimal.
        free_gb: unused memory; ``None`` where unknown.
        users: processes on a GPU.
        precisions: what training can use here, of ``32``, ``16-mixed`` and ``bf16-mixed``.
        uuid: the driver's name of this very GPU.
        supported: whether Lockstep can train here.
        note: why it is not supported, or what else people should know.
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
        """The number in the id; 0 for the CPU."""
        return int(self.id.partition(":")[2] or 0)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as ``lockstep devices --json`` prints them."""
        return asdict(self)


def gigabytes(size: float) -> float:
    """Bytes to 1e9 bytes with one decimal: the unit of every memory figure that people see."""
    return round(size / 1e9, 1)
