"""The machine around the devices: shared memory, limits of the process, CPU cores, the folder where runs go."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lockstep.doctor.finding import Finding, Status
from lockstep.errors import StorageError, many
from lockstep.hardware.device import gigabytes
from lockstep.planning.loader import automatic_workers
from lockstep.telemetry.files import absolute, write_text

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


def gather_limits() -> Limits:
    import resource

    def limits(which: int) -> list[int | None]:
        return [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)]

    files, hard = limits(resource.RLIMIT_NOFILE)
    rdma = tuple(sorted(entry.name for entry in INFINIBAND.iterdir())) if INFINIBAND.is_dir() else ()
    return Limits(files, hard, limits(resource.RLIMIT_MEMLOCK)[0], rdma)


def check_limits(limits: Limits, workers: int) -> Iterator[Finding]:
    """Args: workers: loader workers of a rank."""
    why = "a rank with loader workers holds many files open; at the limit it ends with 'Too many open files'"
    needed = FILES_PER_RANK + FILES_PER_WORKER * max(workers, 1)
    if limits.files is None or limits.files >= needed:
        text = "no limit" if limits.files is None else f"{limits.files:,} may be open"
        yield Finding("open files", "ok", text, why)
    else:
        above = limits.files_hard is not None and limits.files_hard < needed
        administrator = "let the administrator raise nofile in /etc/security/limits.conf"
        fix = administrator if above else f"ulimit -n {max(4096, needed)}"
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


def check_cores(visible: int, usable: int, ranks: int, *, gpus: bool) -> Iterator[Finding]:
    """Whether each rank has a core.

    Args:
        visible: cores that the process may run on.
        usable: cores that its control group gives it time for.
        ranks: of this node.
        gpus: whether they compute on GPUs.
    """
    why = "each rank needs a core, and each of its loader workers another one; else the devices wait for data"
    workers = automatic_workers(usable, ranks)
    text = f"{usable} cores for {many(ranks, 'rank')}"
    if usable < visible:
        threads = max(1, usable // ranks)
        fix = (
            f"give the container more cores, or train with --num-workers {workers} and --set training.threads={threads}"
        )
        what = f"{text}: the container's quota allows {usable} of the {visible} cores that it shows"
        yield Finding("cores", "warn", what, why, fix)
    elif usable < ranks:
        yield Finding("cores", "warn", f"{text}: ranks take turns", why, "choose fewer devices, or get more cores")
    elif gpus and not workers:
        fix = "get more cores, or fewer GPUs; keep the data in memory, so that no worker is needed"
        yield Finding("cores", "warn", f"{text}: none is left for loader workers", why, fix)
    else:
        yield Finding("cores", "ok", f"{text}, up to {many(workers, 'loader worker')} each", why)


PREFIX = ".lockstep-doctor-"
FSYNCS = 5
WRITTEN_BYTES = 16 << 20
#: Slower than this, heartbeats and checkpoints of small models are noticed in the training's speed.
SLOW_FSYNC_S = 0.1
LEAST_FREE, ENOUGH_FREE = 100_000_000, 2_000_000_000


@dataclass(frozen=True, slots=True)
class RunFolder:
    """What was tried in ``path`` (or, where it does not exist yet, in the parent that does).

    ``error``: why it cannot be written; then the rest was not tried. ``fsync_s``: the median for a small file.
    ``bytes_per_s``: of writing 16 MB durably. ``free``: bytes.
    """

    path: Path
    error: str = ""
    atomic: bool = False
    fsync_s: float = 0.0
    bytes_per_s: float = 0.0
    free: int = 0


def probe_run_folder(path: Path) -> RunFolder:
    """Try what a run does, in a hidden folder that is removed again."""
    path = absolute(path)
    try:
        there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=there, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            return RunFolder(
                path, "", _replaces_at_once(folder), _fsync_time(folder), _speed(folder), shutil.disk_usage(there).free
            )
    except StorageError as error:
        return RunFolder(path, error=f"{error.what}: {error.why}")
    except (OSError, ValueError) as error:
        return RunFolder(path, error=getattr(error, "strerror", None) or str(error))


def check_run_folder(folder: RunFolder) -> Iterator[Finding]:
    why = "all that a run keeps goes there; without it, training ends before it begins"
    if folder.error:
        fix = f"choose another folder with --runs-dir (train: --save-dir), or make {folder.path} writable"
        yield Finding("run folder", "fail", f"cannot write in {folder.path}: {folder.error}", why, fix)
        return
    yield Finding("run folder", "ok", f"{folder.path} is writable", why)
    why = "checkpoints are renamed when they are whole; a reader or a crash must see the old one or the new one"
    fix = "keep runs on a local disk or NFS, not on an object store mounted as a folder"
    if folder.atomic:
        yield Finding("atomic rename", "ok", "a rename replaces a file and moves a folder at once", why)
    else:
        yield Finding("atomic rename", "fail", f"renames in {folder.path} are not atomic", why, fix)
    why = "each checkpoint waits until the disk has it"
    what = f"{folder.fsync_s * 1e3:.1f} ms for a small file, {folder.bytes_per_s / 1e6:,.0f} MB/s for a large one"
    if folder.fsync_s > SLOW_FSYNC_S:
        fix = "keep runs on a local disk (--save-dir), or save less often (checkpoint.every_steps)"
        yield Finding("disk speed", "warn", what, why, fix)
    else:
        yield Finding("disk speed", "ok", what, why)
    yield _check_space(folder)


def _check_space(folder: RunFolder) -> Finding:
    status: Status = "ok" if folder.free >= ENOUGH_FREE else "warn" if folder.free >= LEAST_FREE else "fail"
    return Finding(
        "free space",
        status,
        f"{gigabytes(folder.free):g} GB",
        "a checkpoint holds the weights and about twice as much for the optimizer, and several are kept",
        "" if status == "ok" else "free some space, lower checkpoint.keep_last, or choose another --save-dir",
    )


def _replaces_at_once(folder: Path) -> bool:
    """Whether a rename replaces a file under its reader, and moves a folder with its content."""
    target, other = folder / "target", folder / "other"
    target.write_bytes(b"old")
    other.write_bytes(b"new")
    with target.open("rb") as reader:
        other.replace(target)
        kept = reader.read() == b"old"
    building, whole = folder / "building", folder / "whole"
    building.mkdir()
    (building / "file").write_bytes(b"content")
    building.rename(whole)
    moved = not building.exists() and (whole / "file").read_bytes() == b"content"
    return kept and target.read_bytes() == b"new" and not other.exists() and moved


def _fsync_time(folder: Path) -> float:
    times = []
    for _ in range(FSYNCS):
        started = time.perf_counter()
        write_text(folder / "small", "x" * 1000)
        times.append(time.perf_counter() - started)
    return median(times)


def _speed(folder: Path) -> float:
    block = os.urandom(1 << 20)
    started = time.perf_counter()
    with (folder / "large").open("wb") as file:
        for _ in range(WRITTEN_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return WRITTEN_BYTES / (time.perf_counter() - started)
