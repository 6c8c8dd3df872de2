"""The CPU and memory that this process may really use: affinity and cgroup limits included.

Source of the limits: the kernel's documentation of control groups, version 2 (``cpu.max``, ``memory.max``)
and version 1 (``cpu.cfs_quota_us``, ``memory.limit_in_bytes``).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


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
