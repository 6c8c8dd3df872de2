"""Checks of the host: shared memory, open files and the run folder."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lockstep.errors import StorageError, gigabytes
from lockstep.hardware.detect import usable_cores
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.lab.doctor.report import Check, Finding, Status, guarded
from lockstep.planning.loader import automatic_workers
from lockstep.rundir.files import absolute, write_text

SHARED_MEMORY = Path("/dev/shm")
#: Bytes. Loader workers pass whole batches through it (Docker's default: 64 MB), NCCL about 10 MB a rank.
MIN_SHARED_BYTES = 32_000_000
ENOUGH_SHARED_BYTES = 1_000_000_000
#: Open files of a rank.
FILES_PER_RANK = 256
#: Open files for each loader worker: torch passes each tensor in flight as a descriptor.
FILES_PER_WORKER = 128
#: Above this time, heartbeats and checkpoints slow down the training of small models.
SLOW_FSYNC_S = 0.1
FSYNC_REPEATS = 5
MIN_FREE_BYTES = 100_000_000
ENOUGH_FREE_BYTES = 2_000_000_000


def check_machine(placement: Placement, world: World, runs_dir: Path) -> Iterator[Finding]:
    """Yield the findings on this machine; starts no process and leaves no file."""
    ranks = world.local_size if world.from_outside else placement.world_size
    workers = automatic_workers(usable_cores(), ranks)
    yield from guarded("shared memory", lambda: check_shared_memory(*shared_memory()))
    yield from guarded("open files", lambda: check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), workers))
    yield from guarded("run folder", lambda: check_run_folder(probe_run_folder(runs_dir)))


def shared_memory(path: Path = SHARED_MEMORY) -> tuple[int, int, str]:
    """Return total bytes, free bytes, and an error if ``path`` is not writable, else an empty text."""
    try:
        space = shutil.disk_usage(path)
    except OSError as error:
        return 0, 0, error.strerror or str(error)
    return space.total, space.free, "" if os.access(path, os.W_OK | os.X_OK) else "no permission to write"


def check_shared_memory(total: int, free: int, error: str = "") -> Iterator[Finding]:
    check = Check(
        "shared memory",
        "loader workers and NCCL pass data through it; when it is full, they are killed by a bus error",
        "give the container more (docker run --shm-size=8g, or --ipc=host); until then train with --num-workers 0",
    )
    if error:
        yield check("fail", f"{SHARED_MEMORY} cannot be used: {error}")
    else:
        status = _status(free, minimum=MIN_SHARED_BYTES, enough=ENOUGH_SHARED_BYTES)
        yield check(status, f"{SHARED_MEMORY} has {free / 1e6:,.0f} of {total / 1e6:,.0f} MB free")


def _status(free: int, *, minimum: int, enough: int) -> Status:
    return "fail" if free < minimum else "warn" if free < enough else "ok"


def check_open_files(soft_limit: int, hard_limit: int, workers: int) -> Iterator[Finding]:
    """Check the limits of open files (getrlimit(2); -1: none); ``workers``: loader workers of a rank."""
    check = Check(
        "open files",
        "a rank with loader workers holds many files open; at the limit it ends with 'Too many open files'",
    )
    needed = FILES_PER_RANK + FILES_PER_WORKER * max(workers, 1)
    unlimited = resource.RLIM_INFINITY
    if soft_limit >= needed or soft_limit == unlimited:
        yield check("ok", "no limit" if soft_limit == unlimited else f"{soft_limit:,} may be open")
    else:
        fix = f"ulimit -n {max(4096, needed)}"
        if hard_limit < needed and hard_limit != unlimited:
            fix = "let the administrator raise nofile in /etc/security/limits.conf"
        text = f"only {soft_limit:,} may be open, and a rank with {workers} loader workers may need {needed:,}"
        yield check("warn", text, fix)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Measurements of writing in ``path``, or in its nearest parent that exists.

    Attributes:
        error: the reason if it is not writable; then nothing else was measured.
        atomic: renames replace files and move folders at once.
        fsync_s: median time to write a small file durably.
        free: free bytes.
    """

    path: Path
    error: str = ""
    atomic: bool = False
    fsync_s: float = 0.0
    free: int = 0


def probe_run_folder(path: Path) -> RunFolder:
    """Write and rename files as a run does, in a hidden folder that is removed again."""
    path = absolute(path)
    try:
        parent = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        with tempfile.TemporaryDirectory(prefix=".lockstep-doctor-", dir=parent, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            fsync_s = median(_seconds(lambda: write_text(folder / "small", "x" * 1000)) for _ in range(FSYNC_REPEATS))
            return RunFolder(
                path,
                atomic=_has_atomic_renames(folder),
                fsync_s=fsync_s,
                free=shutil.disk_usage(parent).free,
            )
    except StorageError as error:
        return RunFolder(path, error=f"{error.what}: {error.why}")
    except (OSError, ValueError) as error:
        return RunFolder(path, error=getattr(error, "strerror", None) or str(error))


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _has_atomic_renames(folder: Path) -> bool:
    """Check that a rename replaces a file while it is read, and moves a folder with its content."""
    target = folder / "target"
    target.write_bytes(b"old")
    (folder / "source").mkdir()
    (folder / "source" / "file").write_bytes(b"new")
    (folder / "source").rename(folder / "moved")
    with target.open("rb") as reader:
        (folder / "moved" / "file").replace(target)
        return (reader.read(), target.read_bytes()) == (b"old", b"new")


def check_run_folder(folder: RunFolder) -> Iterator[Finding]:
    check = Check("run folder", "a run writes all its files there; without it, training does not begin")
    if folder.error:
        fix = f"choose another folder with --runs-dir (train: --save-dir), or make {folder.path} writable"
        yield check("fail", f"cannot write in {folder.path}: {folder.error}", fix)
        return
    yield check("ok", f"{folder.path} is writable")
    check = Check(
        "atomic rename",
        "checkpoints are renamed when they are complete; a reader or a crash must see the old one or the new one",
        "keep runs on a local disk or NFS, not on an object store mounted as a folder",
    )
    if folder.atomic:
        yield check("ok", "a rename replaces a file and moves a folder at once")
    else:
        yield check("fail", f"renames in {folder.path} are not atomic")
    check = Check(
        "disk speed",
        "each checkpoint waits until the disk has it",
        "keep runs on a local disk (--save-dir), or save less often (checkpoint.every_steps)",
    )
    yield check("warn" if folder.fsync_s > SLOW_FSYNC_S else "ok", f"{folder.fsync_s * 1e3:.1f} ms for a small file")
    check = Check(
        "free space",
        "a checkpoint holds the weights and about twice as much for the optimizer, and several are kept",
        "free some space, lower checkpoint.keep_last, or choose another --save-dir",
    )
    status = _status(folder.free, minimum=MIN_FREE_BYTES, enough=ENOUGH_FREE_BYTES)
    yield check(status, f"{gigabytes(folder.free):g} GB")
