"""Whole runs on GPUs: in every precision, compiled, resumed elsewhere, and by every strategy over several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import merge
from lockstep.rundir.folder import RunDir
from tests.dist.runs import assert_equal_runs, go_on, train, used

TOY, STAGED = "tests.toys:Toy", "tests.dist.staged:Staged"
#: 200 samples: six full steps of 32 an epoch, and a tail of 8. Adam would blow rounding up.
SAME: dict[str, Any] = {
    "training": {"epochs": 2, "global_batch_size": 32, "batch_size": 8},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "hardware": {"matmul_precision": "highest"},  # TF32 keeps 10 bits
}

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same training on one GPU."""
    return train(TOY, tmp_path_factory.mktemp("alone") / "run", "gpu:0", SAME)


def epoch_losses(run: RunDir) -> list[float]:
    return [row["train_loss"] for row in run.epochs()]


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "16-mixed"])
def test_it_learns_as_on_the_cpu_in_every_precision(tmp_path: Path, precision: str) -> None:
    on_cpu = train(TOY, tmp_path / "cpu", "cpu", SAME)
    on_gpu = train(TOY, tmp_path / "gpu", "gpu:0", merge(SAME, {"hardware": {"precision": precision}}))
    assert on_gpu.read().final_metrics["test_accuracy"] > 0.5
    assert epoch_losses(on_gpu) == pytest.approx(epoch_losses(on_cpu), rel=1e-3 if precision == "32" else 5e-2)
    assert used(on_gpu) == used(on_cpu)


def test_launch_bound_models_compile_to_cuda_graphs(tmp_path: Path, alone: RunDir) -> None:
    compiled = {"training": {"compile": True, "compile_mode": "reduce-overhead"}}
    run = train(TOY, tmp_path / "run", "gpu:0", merge(SAME, compiled))
    assert epoch_losses(run) == pytest.approx(epoch_losses(alone), rel=1e-4)
    assert used(run) == used(alone)


@pytest.mark.parametrize(("first", "then"), [("gpu:0", "cpu"), ("cpu", "gpu:0"), ("gpu:0", "gpu:0,gpu:0")])
def test_a_run_goes_on_on_other_devices(tmp_path: Path, alone: RunDir, first: str, then: str) -> None:
    run = train(TOY, tmp_path / "run", first, merge(SAME, {"training": {"max_steps": 5}}))
    go_on(run, then, {"training": {"max_steps": None}})
    assert run.read().status == "completed"
    assert epoch_losses(run) == pytest.approx(epoch_losses(alone), rel=1e-3)
    assert used(run) == used(alone)


@several
@pytest.mark.parametrize(
    "settings",
    [
        {"hardware": {"strategy": "ddp"}},
        {"hardware": {"strategy": "fsdp"}},
        {"hardware": {"strategy": "fsdp"}, "fsdp": {"cpu_offload": True}},
        {"hardware": {"strategy": "dp"}},
    ],
    ids=["ddp", "fsdp", "fsdp-offloaded", "dp"],
)
def test_every_strategy_computes_on_two_gpus_what_one_computes(
    tmp_path: Path, alone: RunDir, settings: dict[str, Any]
) -> None:
    assert_equal_runs(train(TOY, tmp_path / "run", "gpu:0,gpu:1", merge(SAME, settings)), alone)


@several
def test_stages_on_two_gpus_compute_what_one_computes(tmp_path: Path) -> None:
    reference = train(STAGED, tmp_path / "alone", "gpu:0", SAME)
    settings = {"hardware": {"strategy": "pipeline"}}
    assert_equal_runs(train(STAGED, tmp_path / "run", "gpu:0,gpu:1", merge(SAME, settings)), reference)
