"""The machine around the devices: shared memory, limits of the process, CPU cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.doctor.finding import Finding
from lockstep.hardware.device import gigabytes
from lockstep.hardware.host import usable_cores
from lockstep.planning.loader import automatic_workers

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
#: Loader workers pass whole batches through it; Docker's default is 64 MB.
ENOUGH_SHARED = 1_000_000_000
#: NCCL's own segments take about 10 MB a rank.
LEAST_SHARED = 32_000_000
#: Open files of a rank, and for each loader worker: torch passes each tensor in flight as a descriptor.
FILES_PER_RANK, FILES_PER_WORKER = 256, 128


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes in /dev/shm; ``error``: why nothing can be written there."""

    total: int = 0
    free: int = 0
    error: str = ""


def gather_shared_memory(path: Path = SHARED_MEMORY) -> SharedMemory:
    try:
        space = os.statvfs(path)
    except OSError as error:
        return SharedMemory(error=error.strerror or str(error))
    writable = "" if os.access(path, os.W_OK | os.X_OK) else "no permission to write"
    return SharedMemory(space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize, writable)


def check_shared_memory(shared: SharedMemory) -> Iterator[Finding]:
    why = "loader workers and NCCL pass data through it; when it is full, they are killed by a bus error"
    fix = "give the container more (docker run --shm-size=8g, or --ipc=host); until then train with --num-workers 0"
    free, total = gigabytes(shared.free), gigabytes(shared.total)
    if shared.error:
        yield Finding("shared memory", "fail", f"{SHARED_MEMORY} cannot be used: {shared.error}", why, fix)
    elif shared.free < LEAST_SHARED:
        yield Finding("shared memory", "fail", f"{SHARED_MEMORY} has {shared.free / 1e6:.0f} MB free", why, fix)
    elif shared.free < ENOUGH_SHARED:
        what = f"{SHARED_MEMORY} has {shared.free / 1e6:.0f} MB free of {shared.total / 1e6:.0f}"
        yield Finding("shared memory", "warn", what, why, fix)
    else:
        yield Finding("shared memory", "ok", f"{SHARED_MEMORY} has {free:g} of {total:g} GB free", why)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process; ``None``: none. ``locked`` in bytes. ``rdma``: network adapters that pin memory."""

    files: int | None
    files_hard: int | None
    locked: int | None
    rdma: tuple[str, ...] = ()


def gather_limits(adapters: Path = INFINIBAND) -> Limits:
    import resource

    def limit(which: int) -> tuple[int | None, int | None]:
        soft, hard = resource.getrlimit(which)
        unlimited = resource.RLIM_INFINITY
        return (None if soft == unlimited else soft), (None if hard == unlimited else hard)

    files, hard = limit(resource.RLIMIT_NOFILE)
    rdma = tuple(sorted(entry.name for entry in adapters.iterdir())) if adapters.is_dir() else ()
    return Limits(files, hard, limit(resource.RLIMIT_MEMLOCK)[0], rdma)


def check_limits(limits: Limits, workers: int) -> Iterator[Finding]:
    """Args: workers: loader workers of a rank."""
    why = "a rank with loader workers holds many files open; at the limit it ends with 'Too many open files'"
    needed = FILES_PER_RANK + FILES_PER_WORKER * max(workers, 1)
    if limits.files is None or limits.files >= needed:
        text = "no limit" if limits.files is None else f"{limits.files:,} may be open"
        yield Finding("open files", "ok", text, why)
    else:
        above = limits.files_hard is not None and limits.files_hard < needed
        fix = (
            "let the administrator raise nofile in /etc/security/limits.conf"
            if above
            else f"ulimit -n {max(4096, needed)}"
        )
        what = f"only {limits.files:,} may be open, and a rank with {workers} loader workers may need {needed:,}"
        yield Finding("open files", "warn", what, why, fix)
    why = "InfiniBand and RoCE adapters pin the memory that they send from; with a low limit NCCL falls back or fails"
    locked = "no limit" if limits.locked is None else f"{limits.locked / 1e6:,.1f} MB"
    if not limits.rdma:
        yield Finding("locked memory", "ok", f"{locked}; no RDMA adapter here needs more", why)
    elif limits.locked is None:
        yield Finding("locked memory", "ok", f"{locked}, for {', '.join(limits.rdma)}", why)
    else:
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1; memlock in /etc/security/limits.conf)"
        yield Finding("locked memory", "warn", f"only {locked}, with {', '.join(limits.rdma)} here", why, fix)


@dataclass(frozen=True, slots=True)
class Cores:
    """``visible``: what the process may run on; ``usable``: what its control group gives it time for."""

    visible: int
    usable: int


def gather_cores() -> Cores:
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cores(visible, usable_cores())


def check_cores(cores: Cores, ranks: int, *, gpus: bool) -> Iterator[Finding]:
    """Args: ranks: of this node. gpus: whether they compute on GPUs."""
    why = "each rank needs a core, and each of its loader workers another one; else the devices wait for data"
    workers = automatic_workers(cores.usable, ranks)
    text = f"{cores.usable} cores for {ranks} rank(s)"
    if cores.usable < cores.visible:
        fix = f"give the container more cores, or train with --num-workers {workers} and --set training.threads=" + str(
            max(1, cores.usable // ranks)
        )
        what = f"{text}: the container's quota allows {cores.usable} of the {cores.visible} cores that it shows"
        yield Finding("cores", "warn", what, why, fix)
    elif cores.usable < ranks:
        yield Finding("cores", "warn", f"{text}: ranks take turns", why, "choose fewer devices, or get more cores")
    elif gpus and not workers:
        fix = "get more cores, or fewer GPUs; keep the data in memory, so that no worker is needed"
        yield Finding("cores", "warn", f"{text}: none is left for loader workers", why, fix)
    else:
        yield Finding("cores", "ok", f"{text}, up to {workers} loader worker(s) each", why)
