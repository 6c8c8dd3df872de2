"""``engine: lightning``: a task on Lightning's Trainer computes what the native engine computes."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import lockstep
from lockstep.engine.attempt import run_attempt
from lockstep.errors import UnsupportedError
from lockstep.hardware.world import World
from lockstep.launch.folder import create_folder
from lockstep.launch.prepare import prepare
from lockstep.launch.run import resume
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.sinks import standard_sinks
from tests.e2e.test_train import TOY, assert_close, finish, losses, start, wait_for_step
from tests.gloo import run_ranks
from tests.toys import Toy


def assert_same_run(left: Path, right: Path) -> None:
    rows = RunDir.open(left).steps(), RunDir.open(right).steps()
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    for ours, theirs in zip(*rows, strict=True):
        for key in ("epoch", "samples_seen", "lr", "skipped_steps"):
            assert ours[key] == theirs[key], key
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-6)
    for ours, theirs in zip(losses(left), losses(right), strict=True):
        for key in ("train_loss", "val_loss", "val_accuracy", "lr"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-6), key
    assert RunDir.open(left).read().final_metrics == pytest.approx(RunDir.open(right).read().final_metrics, abs=1e-6)
    assert_close(left, right, tolerance=1e-6)


def test_one_rank_computes_what_the_native_engine_does_and_leaves_no_trace(tmp_path: Path) -> None:
    for engine in ("native", "lightning"):
        settings = {
            "task": {"batchnorm": True, "samples": 101},
            "training": {"batch_size": 8, "accumulate": 2, "engine": engine, "threads": 1},
            "hardware": {"selected_devices": ["cpu"]},
            "telemetry": {"log_interval": 1},
            "lightning": {"profiler": "simple"},
            "save_dir": str(tmp_path / engine),
        }
        assert lockstep.train(Toy, settings).status == "completed"
    assert_same_run(tmp_path / "native", tmp_path / "lightning")
    report = next((tmp_path / "lightning" / "logs").glob("*profile*")).read_text()
    assert "run_training_epoch" in report


def train_on_both_engines(rank: int, size: int, folder: str) -> None:
    """Two attempts in one process group; rank 0 makes the run folders."""
    for engine in ("native", "lightning"):
        settings = {
            "task": {"batchnorm": True, "samples": 101},
            "training": {"batch_size": 4, "accumulate": 2, "engine": engine, "threads": 1},
            "hardware": {"selected_devices": ["cpu"] * size},
            "telemetry": {"log_interval": 1, "progress": "silent"},
            "save_dir": f"{folder}/{engine}",
        }
        prepared = prepare(Toy, settings, world=World())
        if rank == 0:
            run = create_folder(prepared.config)
            run.begin_attempt(prepared.plan.as_dict(), prepared.placement.as_dict(), 0)
        dist.barrier()
        run = RunDir.open(Path(folder) / engine)
        result = run_attempt(
            run,
            World(rank=rank, size=size, local_rank=rank, local_size=size),
            *(prepared.task, prepared.config, prepared.plan),
            attempt=1,
            sink=standard_sinks(run, prepared.config, sys.stdout),
            stop_signal=lambda: None,
        )
        assert result.status == "completed"


def test_two_ranks_compute_what_the_native_engine_does(tmp_path: Path) -> None:
    """With BatchNorm, two micro-batches a step, and a ragged tail: 101 samples in steps of 16."""
    run_ranks(train_on_both_engines, 2, str(tmp_path))
    assert RunDir.open(tmp_path / "lightning").plan()["batch"]["global_batch"] == 16
    assert_same_run(tmp_path / "native", tmp_path / "lightning")


def test_a_stopped_run_goes_on_with_either_engine_and_other_ranks(tmp_path: Path) -> None:
    """Stopped by a signal in mid-epoch on two ranks; the result is that of a run that was never stopped."""
    held = {
        "training": {"batch_size": 32, "global_batch_size": 32, "threads": 1},
        "hardware": {"selected_devices": ["cpu"]},
    }
    lockstep.train(Toy, {**held, "save_dir": str(tmp_path / "whole")})
    command = ("--batch-size", "32", "--global-batch-size", "32", "--engine", "lightning")
    slow = ("--save-dir", "run", "--devices", "cpu,cpu", "--set", "task.pause_s=0.2")
    process = start("train", TOY, *slow, *command, cwd=tmp_path)
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGTERM)
    finish(process, code=143)
    run = RunDir.open(tmp_path / "run")
    assert run.read().status == "stopped"
    assert 2 <= run.progress().step < 14
    for engine in ("native", "lightning"):
        shutil.copytree(tmp_path / "run", tmp_path / engine, symlinks=True)
        changes = {"training": {"engine": engine, "threads": 1}}
        result = resume(RunDir.open(tmp_path / engine), devices="cpu", overrides=changes)
        assert result.status == "completed"
        assert_close(tmp_path / engine, tmp_path / "whole")
        assert RunDir.open(tmp_path / engine).epochs()[-1]["epoch"] == 2


def test_exact_mode_is_refused_with_lightning(tmp_path: Path) -> None:
    settings = {
        "training": {"engine": "lightning", "reproducibility": "exact"},
        "hardware": {"selected_devices": ["cpu"]},
        "save_dir": str(tmp_path / "run"),
    }
    with pytest.raises(UnsupportedError, match="lightning"):
        lockstep.train(Toy, settings)
    assert not (tmp_path / "run").exists()


def test_without_lightning_the_engine_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(UnsupportedError, match="pip install"):
        lockstep.train(Toy, {"training": {"engine": "lightning"}, "save_dir": str(tmp_path / "run")})
