"""The folder where runs go: can it be written, does a rename replace at once, how fast is it, how full."""

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
from lockstep.errors import StorageError
from lockstep.hardware.device import gigabytes
from lockstep.telemetry.files import absolute, write_text

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
