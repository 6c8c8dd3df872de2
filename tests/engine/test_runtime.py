"""Torch's switches, variables and memory around the steps of a rank.

Float32 on GPUs: torch's two interfaces for it must agree, or its compiler raises.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import resolve
from lockstep.engine.runtime import before_nccl, expandable_segments, float32_products, rank_device
from lockstep.errors import ConfigError, DeviceError, PrecisionError
from lockstep.hardware import Device
from lockstep.hardware.resolve import resolve_placement
from lockstep.hardware.world import World
from lockstep.planning import TaskFacts, make_plan

pytestmark = pytest.mark.filterwarnings("ignore:Please use the new API settings")  # torch 2.9


def state() -> tuple[Any, ...]:
    backends: Any = torch.backends
    return (
        *(torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
        *(part.fp32_precision for part in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)),
        *(backends.mkldnn.matmul.fp32_precision, backends.cudnn.benchmark, backends.cudnn.deterministic),
    )


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "found"),
    [
        ({"matmul": "high", "benchmark": True}, ("high", True, True, "tf32", "tf32")),
        ({"matmul": "highest"}, ("highest", False, False, "ieee", "ieee")),
        ({"matmul": None, "exact": True}, ("highest", False, False, "ieee", "ieee")),
    ],
    ids=["high", "highest", "exact"],
)
def test_both_interfaces_say_the_same(how: dict[str, Any], found: tuple[Any, ...]) -> None:
    with float32_products(**how):
        assert state()[:5] == found
        assert state()[5] == found[4]
        assert state()[-2:] == (how.get("benchmark", False), how.get("exact", False))
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_caller_who_used_one_interface_gets_its_values_back() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with float32_products("highest", exact=True):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_the_allocator_is_left_alone_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    with expandable_segments(torch.device("cpu")):
        assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_a_rank_with_nccl_has_its_variables_before_the_group_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads them when the group is made; what the user has set stays."""
    for name in (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_FR_DUMP_TEMP_FILE",
    ):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    before_nccl(tmp_path)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl-rank-")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    before_nccl(tmp_path / "other")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl-rank-")


AMPERE = Device("gpu:0", "gpu", "NVIDIA A100-SXM4-40GB", 40.0, precisions=("32", "16-mixed", "bf16-mixed"))
TURING = Device("gpu:0", "gpu", "Tesla T4", 16.0, precisions=("32", "16-mixed"))
CPU = Device("cpu", "cpu", "a processor", 8.0, precisions=("32", "bf16-mixed"))


@pytest.mark.parametrize(
    ("device", "settings", "lengths", "expected"),
    [
        (AMPERE, {}, None, ("32", "high", True)),
        (AMPERE, {"hardware": {"precision": "auto"}}, None, ("bf16-mixed", "high", True)),
        (AMPERE, {"hardware": {"precision": "tf32"}}, None, ("32", "high", True)),
        (AMPERE, {"training": {"reproducibility": "exact"}}, None, ("32", "highest", False)),
        (AMPERE, {"hardware": {"matmul_precision": "highest"}}, "a hash", ("32", "highest", False)),
        (TURING, {"hardware": {"precision": "auto", "cudnn_benchmark": False}}, None, ("32", "highest", False)),
        (CPU, {"hardware": {"precision": "auto"}}, None, ("32", None, None)),
    ],
)
def test_the_plan_decides(
    device: Device, settings: dict[str, Any], lengths: str | None, expected: tuple[str, str | None, bool | None]
) -> None:
    chosen = {"selected_devices": [device.id], **settings.get("hardware", {})}
    config = resolve({}, {**settings, "hardware": chosen})
    placement = resolve_placement(config.hardware, config.distributed, World(), [device, CPU])
    plan = make_plan(config, placement, TaskFacts(name="toy", train_samples=64, lengths=lengths), cores=2)
    assert (placement.precision, plan.value("matmul_precision"), plan.value("cudnn_benchmark")) == expected
    assert placement.gpu == ("" if device is CPU else device.name)


@pytest.mark.parametrize("device", [TURING, CPU])
def test_tf32_is_refused_where_there_is_none(device: Device) -> None:
    config = resolve({}, {"hardware": {"selected_devices": [device.id], "precision": "tf32"}})
    with pytest.raises(PrecisionError, match=r"tf32 .*\b(cpu|gpu:\d+)\b"):
        resolve_placement(config.hardware, config.distributed, World(), [device, CPU])


def test_tf32_and_float32_products_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"tf32 .*matmul_precision .*highest"):
        resolve({}, {"hardware": {"precision": "tf32", "matmul_precision": "highest"}})


def test_the_torch_device_of_a_rank() -> None:
    world = World(rank=1, size=2, local_rank=1, local_size=2)
    assert rank_device(("cpu",), world) == torch.device("cpu")
    with pytest.raises(DeviceError, match="gpu:77"):
        rank_device(("gpu:93", "gpu:77"), world)


#: Memory that a step frees serves the next one, and goes back to the system at the end.
PROGRAM = """
import ctypes, json, os, random, resource, torch
from pathlib import Path
from lockstep.engine.runtime import kept_memory

dice = random.Random(0)
sizes = [dice.randrange(1, 30) << 18 for _ in range(12)]

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        held = [torch.ones(size) for size in sizes]
        dice.shuffle(held)
        while held:
            held.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

ctypes.CDLL(None).mallopt(-3, 128 * 1024)  # else the beginning depends on what was freed before
found = {"usual": faults(2)}
os.environ["MALLOC_TOP_PAD_"] = "0"
with kept_memory():
    found |= {"users": faults(2)}
del os.environ["MALLOC_TOP_PAD_"]
with kept_memory():
    faults(3)
    found |= {"kept": faults(2), "held": resident()}
print(json.dumps(found | {"left": resident()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_step_finds_the_memory_of_the_one_before_unless_the_user_has_set_something_else() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env={})
    found = json.loads(done.stdout)
    assert found["users"] > found["usual"] / 2, "the user's own setting holds"
    assert found["kept"] < found["usual"] / 5
    assert found["left"] < found["held"] - 100e6
