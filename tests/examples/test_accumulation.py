"""``examples/accumulation``: by hand and with Lockstep, alone and on two ranks, the same losses and weights."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.rundir.folder import RunDir
from tests.e2e.test_train import finish, start
from tests.gloo import ROOT, run_ranks

FOLDER = ROOT / "examples" / "accumulation"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node=2")
EPOCHS = 3

Result = tuple[list[float], dict[str, torch.Tensor]]


def by_hand(folder: Path, *launcher: str) -> Result:
    finish(start(str(FOLDER / "plain_pytorch.py"), "result.pt", module=launcher, cwd=folder, script=True))
    result = torch.load(folder / "result.pt")
    return result["losses"], result["weights"]


def with_lockstep(folder: Path, devices: str) -> Result:
    output = finish(start(str(FOLDER / "with_lockstep.py"), devices, devices, module=(), cwd=folder, script=True))
    assert re.search(r"^global batch +128 ", output, re.MULTILINE)
    losses = [row["train_loss"] for row in RunDir.open(folder / devices).epochs()]
    return losses, load_file(folder / devices / "checkpoints" / "last" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return by_hand(tmp_path_factory.mktemp("alone"))


def assert_same(ours: Result, theirs: Result, epochs: int = EPOCHS) -> None:
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
    assert len(ours[0]) == epochs
    assert ours[1].keys() == theirs[1].keys()
    for name, weights in ours[1].items():
        assert (weights - theirs[1][name]).abs().max() < 1e-6, name


@pytest.mark.drill
def test_by_hand_two_ranks_compute_what_one_computes(alone: Result, tmp_path: Path) -> None:
    assert_same(by_hand(tmp_path, *TORCHRUN), alone)


@pytest.mark.parametrize("devices", [pytest.param("cpu", marks=pytest.mark.drill), "cpu,cpu"])
def test_lockstep_computes_the_same(alone: Result, tmp_path: Path, devices: str) -> None:
    assert_same(with_lockstep(tmp_path, devices), alone)


def by_hand_in_ranks(rank: int, ranks: int, batches: list[tuple[int, int]]) -> list[tuple[int, Result]]:
    """All-reduces, loss and weights of an epoch for each (effective batch, micro-batch)."""
    sys.path.insert(0, str(FOLDER))
    import plain_pytorch as program  # type: ignore[import-not-found]

    found = []
    for program.EFFECTIVE_BATCH, program.MICRO_BATCH in batches:
        program.EPOCHS = 1
        torch.manual_seed(program.SEED)
        ddp = program.DistributedDataParallel(program.model())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            history = program.train_with_accumulation(ddp)
        reduced = sum(event.count for event in profile.key_averages() if event.key == "gloo:all_reduce")
        weights = {name: value.detach() for name, value in ddp.module.state_dict().items()}
        found.append((reduced, ([row["loss"] for row in history], weights)))
    return found


@pytest.mark.slow
def test_by_hand_a_step_reduces_once_and_a_rank_without_samples_takes_part() -> None:
    batches = [(128, 64), (128, 16), (333, 111)]  # 1000 = 3 × 333 + 1
    alone = run_ranks(by_hand_in_ranks, 1, batches)[0]
    for found in run_ranks(by_hand_in_ranks, 2, batches):
        # All gradients lie in one bucket; beside them, the loss of the epoch.
        assert [reduced for reduced, _ in found] == [8 + 1, 8 + 1, 4 + 1]
        for (_, ours), (_, theirs) in zip(found, alone, strict=True):
            assert_same(ours, theirs, epochs=1)
