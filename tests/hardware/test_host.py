"""The CPU and memory that a process may use, with cgroup files as kernels write them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

import lockstep
from lockstep.hardware import host
from lockstep.hardware.host import cpu_name, usable_cores, usable_memory
from tests.toys import Toy

HERE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_without_limits_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == HERE
    assert usable_memory(tmp_path)[0] == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", HERE), ("100000 100000", 1), ("50000 100000", 1), ("1000000 1000", HERE), ("nonsense", HERE)],
)
def test_cpu_quota_of_version_2(tmp_path: Path, quota: str, expected: int) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota})
    assert usable_cores(root) == expected


def test_the_tightest_limit_on_the_way_up_holds(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/cpu.max": "max 100000",
        "sys/fs/cgroup/job/cpu.max": "100000 100000",
        "sys/fs/cgroup/job/step/memory.max": "max",
        "sys/fs/cgroup/job/memory.max": str(64 * MIB),
        "sys/fs/cgroup/job/memory.current": str(48 * MIB),
        "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {16 * MIB}\n",
    }
    root = write(tmp_path, files)
    assert usable_cores(root) == 1
    assert usable_memory(root) == (64 * MIB, 32 * MIB)


def test_limits_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(64 * MIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(16 * MIB),
    }
    root = write(tmp_path, files)
    assert usable_cores(root) == 1
    assert usable_memory(root) == (64 * MIB, 48 * MIB)


def test_a_quota_of_minus_one_is_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert usable_cores(write(tmp_path, files)) == HERE


def test_a_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": str(2**62)}
    assert usable_memory(write(tmp_path, files))[0] == psutil.virtual_memory().total


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or HERE < 2, reason="needs two cores")
def test_affinity_counts(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_cpu_name(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Test CPU 3000\nmodel name\t: other\n"})
    assert cpu_name(root) == "Test CPU 3000"
    assert cpu_name(tmp_path / "nowhere")


@pytest.mark.skipif(HERE < 2, reason="one core is all there is")
def test_a_plan_counts_on_the_cores_that_a_quota_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000")
    monkeypatch.setattr(host, "_cgroup_folders", lambda root, controller: iter([tmp_path]))
    plan = lockstep.make_plan(Toy, {"hardware": {"selected_devices": "cpu"}})
    assert plan.threads == 1
