"""The rest of what a run can be asked for, each once, in real processes."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lockstep.rundir.folder import RunDir
from tests import commands
from tests.e2e.test_train import SAME, TOY, finish, start, train, wait_for_step
from tests.gloo import ROOT, clean_environment


@pytest.mark.slow
def test_validation_between_epochs_finds_the_best_there(tmp_path: Path) -> None:
    train(tmp_path, "--devices", "cpu", "--set", "validation.every_steps=3", "--epochs", "1", "--log-interval", "1")
    run = RunDir.open(tmp_path / "run")
    best = json.loads((run.checkpoints / "best" / "manifest.json").read_text())
    assert best["step"] in {3, 6, 9, 12, 13}
    assert len(run.epochs()) == 1


@pytest.mark.slow
def test_overfitting_a_few_batches_uses_the_same_samples_in_every_epoch(tmp_path: Path) -> None:
    train(
        tmp_path, "--devices", "cpu", "--epochs", "3", "--set", "debug.overfit_batches=2",
        "--set", "telemetry.record_samples=true",
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples-rank0.jsonl").read_text().splitlines()]
    used = [sorted(i for row in rows if row["epoch"] == epoch for i in row["indices"]) for epoch in (1, 2, 3)]
    assert len(used[0]) == len(set(used[0])) == 32
    assert used[0] == used[1] == used[2]


@pytest.mark.slow
def test_anomaly_detection_names_the_operator(tmp_path: Path) -> None:
    output = train(tmp_path, "--devices", "cpu", "--set", "debug.detect_anomaly=true", "--set", "task.nan_at=2", code=1)
    assert "returned nan values" in output
    assert RunDir.open(tmp_path / "run").read().status == "failed"


@pytest.mark.parametrize("devices", [pytest.param("cpu", marks=pytest.mark.drill), "cpu,cpu"])
def test_sixteen_bit_training_scales_its_loss_and_recovers_from_overflow(tmp_path: Path, devices: str) -> None:
    train(tmp_path, "--devices", devices, "--precision", "16-mixed", "--set", "task.nan_at=3", "--log-interval", "1")
    run = RunDir.open(tmp_path / "run")
    rows = run.steps()
    assert rows[-1]["skipped_steps"] >= 1
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert run.read().status == "completed"


@pytest.mark.drill
def test_accumulation_changes_nothing_but_rounding(tmp_path: Path) -> None:
    losses = []
    for name, batch in (("whole", ("--batch-size", "32")), ("parts", ("--batch-size", "8", "--grad-accum-steps", "4"))):
        folder = tmp_path / name
        folder.mkdir()
        train(folder, "--devices", "cpu", *batch)
        losses.append([row["train_loss"] for row in RunDir.open(folder / "run").epochs()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_processes_that_srun_started_are_ranks(tmp_path: Path) -> None:
    """What ``srun -n 2`` leaves in the environment is enough; the rendezvous follows from the job's number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        job = (probe.getsockname()[1] * 7919) % 100_000
    ranks = [
        commands.start(
            *("-m", "lockstep", "train", TOY, "--save-dir", "run", *SAME),
            cwd=tmp_path,
            env=clean_environment(
                PYTHONPATH=f"{ROOT / 'src'}:{ROOT}",
                SLURM_JOB_ID=str(job),
                SLURM_STEP_ID="0",
                SLURM_PROCID=rank,
                SLURM_LOCALID=rank,
                SLURM_NODEID="0",
                SLURM_STEP_NUM_TASKS="2",
                SLURM_STEP_NUM_NODES="1",
                SLURM_STEP_NODELIST="localhost",
            ),
            merged=True,
        )
        for rank in ("0", "1")
    ]
    for process in ranks:
        finish(process)
    assert RunDir.open(tmp_path / "run").plan()["placement"]["world_size"] == 2


@pytest.mark.drill
def test_hidden_gpus_under_torchrun_leave_the_cpu(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lockstep",
         "train", TOY, "--save-dir", "run", "--multi-gpu", "ddp", *SAME],
        cwd=tmp_path, env=clean_environment(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES=""),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    output = process.communicate(timeout=90)[0]
    assert process.returncode == 0, output
    assert RunDir.open(tmp_path / "run").plan()["placement"]["devices"] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        *(pytest.param(file, marks=pytest.mark.drill) for file in ("trainer.pt", "manifest.json")),
    ],
)
def test_a_corrupt_newest_checkpoint_is_passed_over_loudly(tmp_path: Path, file: str) -> None:
    train(tmp_path, "--devices", "cpu", "--max-steps", "20")
    newest = tmp_path / "run" / "checkpoints" / "step-00000020" / file
    newest.write_bytes(newest.read_bytes()[:-7])
    output = finish(start("resume", "run", "--set", "training.max_steps=null", cwd=tmp_path))
    assert re.search(r"^warning: .*step 20\b", output, re.MULTILINE)
    assert "from step 13" in output
    assert RunDir.open(tmp_path / "run").read().status == "completed"


@pytest.mark.slow
def test_loader_workers_end_with_the_process_that_was_killed(tmp_path: Path) -> None:
    process = start(
        "train", TOY, "--save-dir", "run", "--devices", "cpu", "--num-workers", "2", "--set", "task.dataset=plain",
        "--set", "task.pause_s=0.05", cwd=tmp_path,
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 1, process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
