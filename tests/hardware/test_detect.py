"""Detection: what NVML, torch and the system say; cores and memory, with cgroup files as kernels write them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.hardware import detect, detect_devices, get_available_gpus
from lockstep.hardware.detect import (
    Device,
    TorchBuild,
    cpu_name,
    cuda_precisions,
    find_devices,
    read_answer,
    read_torch_build,
    usable_cores,
    usable_memory,
    visible_gpus,
    worth_probing,
)
from lockstep.hardware.nvml import GpuUser, NvmlGpu
from tests.fakes import FakeNvml
from tests.toys import Toy

CUDA = TorchBuild(cuda="12.8")
CPU_ONLY = TorchBuild()


def h100(number: int, **changes: object) -> NvmlGpu:
    values = {
        "uuid": f"GPU-{number}",
        "name": "NVIDIA H100 80GB HBM3",
        "capability": (9, 0),
        "total": 85_899_345_920,
        "free": 85_000_000_000,
        **changes,
    }
    return NvmlGpu(**values)  # type: ignore[arg-type]


def nobody() -> list[NvmlGpu]:
    raise AssertionError("torch need not be asked here")


def broken() -> list[NvmlGpu]:
    raise OSError("CUDA error: unknown error")


def answers(*devices: NvmlGpu) -> Callable[[], list[NvmlGpu]]:
    return lambda: list(devices)


def gpus_of(devices: list[Device]) -> list[tuple[str, str | None]]:
    assert devices[0].id == "cpu"
    return [(device.id, device.uuid) for device in devices[1:]]


# this machine


def test_the_cpu_comes_first_and_computes_in_every_precision() -> None:
    cpu = detect_devices()[0]
    assert (cpu.id, cpu.kind, cpu.supported) == ("cpu", "cpu", True)
    assert cpu.precisions == ("32", "16-mixed", "bf16-mixed", "bf16-true")
    assert cpu.name
    assert cpu.cores is not None
    assert cpu.cores >= 1
    assert cpu.free_gb is not None
    assert 0 < cpu.free_gb <= cpu.memory_gb


def test_results_are_kept_until_refreshed() -> None:
    assert detect_devices()[0] is detect_devices()[0]
    before = detect_devices()[0]
    assert detect_devices(refresh=True)[0] is not before


def test_available_gpus_have_three_keys() -> None:
    for gpu in get_available_gpus():
        assert set(gpu) == {"index", "name", "memory_gb"}


@pytest.mark.slow
def test_detection_agrees_with_torch_and_touches_no_gpu() -> None:
    program = """if True:
        import json, sys
        from lockstep.hardware import detect_devices
        found = [d.id for d in detect_devices() if d.kind == "gpu" and d.supported]
        assert "torch" not in sys.modules
        import torch
        assert not torch.cuda.is_initialized()
        print(json.dumps([found, [f"gpu:{i}" for i in range(torch.cuda.device_count())]]))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    ours, torchs = json.loads(done.stdout)
    assert ours == torchs


@pytest.mark.gpu
def test_a_real_gpu_is_described() -> None:
    gpu = detect_devices(refresh=True)[1]
    assert gpu.id == "gpu:0"
    assert gpu.memory_gb > 1
    assert gpu.free_gb is not None
    assert gpu.uuid is not None
    assert get_available_gpus()[0] == {"index": 0, "name": gpu.name, "memory_gb": gpu.memory_gb}


# NVIDIA GPUs through NVML


def test_a_gpu_has_memory_users_and_precisions() -> None:
    users = (GpuUser(123, "python", 20.1),)
    devices = find_devices({}, CUDA, FakeNvml([h100(0, users=users)]), nobody)
    assert devices[1] == Device(
        id="gpu:0",
        kind="gpu",
        name="NVIDIA H100 80GB HBM3",
        memory_gb=85.9,
        free_gb=85.0,
        users=users,
        precisions=("32", "16-mixed", "bf16-mixed", "bf16-true"),
        uuid="GPU-0",
    )


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["GPU-0", "GPU-1", "GPU-2"]),
        ("2,0", ["GPU-2", "GPU-0"]),
        ("GPU-1", ["GPU-1"]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_gpus_are_numbered_as_cuda_does(variable: str | None, expected: list[str]) -> None:
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    devices = find_devices(environ, CUDA, FakeNvml([h100(number) for number in range(3)]), nobody)
    assert gpus_of(devices) == [(f"gpu:{index}", uuid) for index, uuid in enumerate(expected)]


def test_unequal_gpus_in_bus_order_need_no_question() -> None:
    nvml = FakeNvml([h100(0, name="Tesla T4", capability=(7, 5)), h100(1)])
    devices = find_devices({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, CUDA, nvml, nobody)
    assert gpus_of(devices) == [("gpu:0", "GPU-0"), ("gpu:1", "GPU-1")]
    assert devices[1].precisions == ("32", "16-mixed")
    assert re.search(r"bf16-mixed\b.*\b8\.0", devices[1].note)


def test_of_unequal_gpus_cuda_says_which_is_first() -> None:
    users = (GpuUser(5, "python", 1.0),)
    nvml = FakeNvml([h100(0, name="Tesla T4", capability=(7, 5)), h100(1, users=users)])
    probed = answers(
        NvmlGpu("1", "NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000, 84_000_000_000),
        NvmlGpu("0", "Tesla T4", (7, 5), 15_000_000_000, 14_000_000_000),
    )
    devices = find_devices({}, CUDA, nvml, probed)
    assert gpus_of(devices) == [("gpu:0", "GPU-1"), ("gpu:1", "GPU-0")]
    assert devices[1].users == users
    assert devices[2].precisions == ("32", "16-mixed")


def test_mig_slices_are_numbered_by_cuda_and_described_by_nvml() -> None:
    part = h100(9, uuid="MIG-7", name="NVIDIA H100 MIG 1g.10gb", total=10_000_000_000, users=(GpuUser(3, "a", 1.0),))

    class WithSlice(FakeNvml):
        def by_uuid(self, uuid: str) -> NvmlGpu | None:
            return part if uuid == "MIG-7" else None

    probed = answers(NvmlGpu("7", part.name, (9, 0), 10_000_000_000, 9_000_000_000))
    for environ, gpu in (({"CUDA_VISIBLE_DEVICES": "MIG-7"}, h100(0)), ({}, h100(0, mig=True))):
        devices = find_devices(environ, CUDA, WithSlice([gpu]), probed)
        assert gpus_of(devices) == [("gpu:0", "MIG-7")]
        assert devices[1].memory_gb == 10.0
        assert devices[1].users == part.users


@pytest.mark.parametrize(
    ("build", "driver", "capability", "words"),
    [
        (CPU_ONLY, (12, 8), (9, 0), "CPU build"),
        (TorchBuild(hip="6.4"), (12, 8), (9, 0), "ROCm"),
        (TorchBuild(cuda="13.0"), (12, 8), (9, 0), "driver"),
        (TorchBuild(cuda="13.0"), (13, 0), (7, 0), "CUDA 12"),
    ],
)
def test_gpus_that_this_torch_cannot_use_are_listed_with_the_reason(
    build: TorchBuild, driver: tuple[int, int], capability: tuple[int, int], words: str
) -> None:
    nvml = FakeNvml([h100(0, capability=capability)], driver=driver)
    gpu = find_devices({}, build, nvml, nobody)[1]
    assert not gpu.supported
    assert words in gpu.note
    assert gpu.precisions == ()


@pytest.mark.parametrize("driver", [(12, 4), (12, 8), (13, 0)])
def test_any_driver_of_the_major_version_or_newer_will_do(driver: tuple[int, int]) -> None:
    assert find_devices({}, CUDA, FakeNvml([h100(0)], driver=driver), nobody)[1].supported


def test_memory_that_nobody_tells() -> None:
    gpu = find_devices({}, CUDA, FakeNvml([h100(0, total=None, free=None)]), nobody)[1]
    assert (gpu.memory_gb, gpu.free_gb) == (0.0, None)


def test_when_torch_fails_to_answer_the_gpus_say_so() -> None:
    nvml = FakeNvml([h100(0), h100(1, name="Tesla T4")])
    devices = find_devices({}, CUDA, nvml, broken)
    assert [device.supported for device in devices] == [True, False, False]
    assert "unknown error" in devices[1].note
    assert "unknown error" in find_devices({}, CUDA, None, broken)[0].note


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), ("32", "16-mixed", "bf16-mixed", "bf16-true")),
        ((8, 0), ("32", "16-mixed", "bf16-mixed", "bf16-true")),
        ((7, 5), ("32", "16-mixed")),
        ((7, 0), ("32", "16-mixed")),
        ((6, 1), ("32",)),
    ],
)
def test_cuda_precisions(capability: tuple[int, int], expected: tuple[str, ...]) -> None:
    assert cuda_precisions(capability) == expected


# everything else through torch


def test_rocm_gpus_are_gpus() -> None:
    probed = answers(NvmlGpu("", "AMD Instinct MI300X", (9, 4), 205_000_000_000, 200_000_000_000))
    devices = find_devices({}, TorchBuild(hip="6.4"), None, probed)
    assert (devices[1].id, devices[1].supported, devices[1].memory_gb) == ("gpu:0", True, 205.0)
    assert devices[1].precisions == ("32", "16-mixed", "bf16-mixed", "bf16-true")


def test_no_accelerator() -> None:
    assert [device.id for device in find_devices({}, CPU_ONLY, None, answers())] == ["cpu"]
    assert [device.id for device in find_devices({}, CUDA, FakeNvml(), answers())] == ["cpu"]


def test_devices_are_plain_values() -> None:
    device = find_devices({}, CUDA, FakeNvml([h100(0, users=(GpuUser(1, "a", None),))]), nobody)[1]
    again = json.loads(json.dumps(device.as_dict()))
    assert again["users"] == [{"pid": 1, "name": "a", "memory_gb": None}]
    assert device.index == 0


def test_the_build_is_read_without_importing() -> None:
    assert read_torch_build() == TorchBuild(torch.version.cuda, torch.version.hip)


@pytest.mark.slow
def test_the_probe_agrees_with_torch_here_and_passes_over_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('not the library')")
    monkeypatch.chdir(tmp_path)
    found = detect.probe()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    expected = torch.accelerator.device_count() if accelerator is not None else 0
    assert len(found) == expected


def test_a_probe_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('no such library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(OSError, match="no such library"):
        detect.probe()


def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(detect, "TIMEOUT_S", 0.5)
    with pytest.raises(OSError, match=r"within 0\.5 s"):
        detect.probe()


def test_answers() -> None:
    line = '[{"name": "X", "total": 2, "free": 1, "uuid": "u", "capability": [8, 6]}]'
    assert read_answer(f"a library says hello\n{line}\n") == [NvmlGpu("u", "X", (8, 6), 2, 1)]
    assert read_answer("[]") == []


@pytest.mark.parametrize("text", ["", "hello", "3", '[{"name": "X"}]', '[{"unknown": 1}]'])
def test_answers_that_are_none(text: str) -> None:
    with pytest.raises(OSError, match="not understood"):
        read_answer(text)


@pytest.mark.skipif(sys.platform == "darwin", reason="always worth it there")
def test_a_cpu_build_is_not_worth_a_probe() -> None:
    assert not worth_probing(TorchBuild())
    assert worth_probing(TorchBuild(hip="6.4"))


UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("GPU-bb33", [2]),
        ("GPU-bb33,GPU-aa11", [2, 0]),
        # Only the driver knows: a rest after a number, what is not there, one named twice, both kinds.
        *(
            (text, None)
            for text in ("none", "1gpu", "0,-1,2", "0,7,2", "1,1", "GPU-b", "GPU-bb33,GPU-zz", "GPU-bb33,0")
        ),
        ("MIG-aa11", None),
        ("MIG-GPU-aa11/1/0", None),
    ],
)
def test_examples(variable: str | None, expected: list[int] | None) -> None:
    assert visible_gpus(variable, UUIDS) == expected


@given(st.text(alphabet="0123456789,- +GPUMIabx", max_size=20), st.integers(0, 4))
def test_any_text_gives_distinct_positions_that_exist(variable: str, count: int) -> None:
    found = visible_gpus(variable, [f"GPU-{index}" for index in range(count)])
    assert found is None or (len(set(found)) == len(found) and set(found) <= set(range(count)))


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
    monkeypatch.setattr(detect, "_cgroup_folders", lambda root, controller: iter([tmp_path]))
    plan = lockstep.make_plan(Toy, {"hardware": {"selected_devices": "cpu"}})
    assert plan.threads == 1
