"""A run from Python: train on two ranks, open, resume elsewhere, evaluate, export, load the model."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.errors import CheckpointError, ConfigError, LockstepError, RunFolderError, TaskError, UsageError
from tests.toys import Toy


@pytest.mark.slow
def test_the_life_of_a_run_on_two_ranks(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = lockstep.train(Toy(), devices="cpu,cpu", epochs=1, batch_size=8, runs_dir=runs)
    assert (run.status, run.exit_code, run.best_epoch, run.run_dir.parent) == ("completed", 0, 1, runs)
    assert run.plan.batch.batch_size == 8 and run.config.training.epochs == 1
    assert run.metrics["val_loss"] == run.history[0]["val_loss"]
    assert [row["epoch"] for row in run.history] == [1]

    for ref in ("last", run.id, run.run_dir):
        opened = lockstep.Run(ref, runs_dir=runs)
        assert (opened.id, opened.status, opened.exit_code) == (run.id, "completed", 0)
        assert (opened.metrics, opened.step, opened.best_metric) == (run.metrics, run.step, run.best_metric)

    assert run.resume(devices="cpu", epochs=2) is run
    assert [row["epoch"] for row in run.history] == [1, 2] and run.step == opened.step
    assert run.plan.placement["devices"] == ["cpu"] and run.plan.batch.global_batch == 16

    metrics = run.evaluate(split="test", checkpoint="best")
    assert metrics == {name: pytest.approx(value) for name, value in run.metrics.items() if name in metrics}
    assert "test_accuracy" in metrics
    assert (run.export(tmp_path / "out") / "weights.safetensors").exists()
    model = run.load_model("best")
    assert not model.training and model(torch.zeros(2, 12)).shape == (2, 3)
    with pytest.raises(CheckpointError, match="'999'") as caught:
        run.load_model("999")
    assert not isinstance(caught.value, UsageError)
    shutil.rmtree(run.run_dir / "checkpoints")
    with pytest.raises(CheckpointError, match=r"\bcompleted\b"):
        run.load_model("best")


@pytest.mark.slow
def test_a_task_made_in_a_function_is_remembered_or_asked_for_and_needs_no_super(tmp_path: Path) -> None:
    class Local(Toy):
        def __init__(self, width: int) -> None:
            self.width = width

    run = lockstep.train(Local(7), devices="cpu", epochs=1, save_dir=tmp_path / "run")
    assert "test_loss" in run.evaluate(devices="cpu,cpu")  # to other processes it travels by value
    opened = lockstep.Run(run.run_dir)
    for use in (opened.load_model, opened.evaluate, lambda: opened.resume(epochs=2)):
        with pytest.raises(RunFolderError, match="is defined in a script or notebook"):
            use()
    assert opened.resume(Local(7), epochs=2).step == 2 * run.plan.steps_per_epoch
    assert torch.equal(*(next(r.load_model(task=Local(7)).parameters()) for r in (run, opened)))
    with pytest.raises(ConfigError, match="width"):
        lockstep.plan(Local, devices="cpu")


def test_a_global_batch_alone_is_one_micro_batch_of_each_device(tmp_path: Path) -> None:
    shared = {"global_batch_size": 96, "lr_scaling": "linear", "lr": 1e-4, "max_steps": 1}
    run = lockstep.train(Toy(), devices="cpu,cpu", save_dir=tmp_path / "run", **shared)
    divided = lockstep.plan(Toy(), devices="cpu,cpu", batch_size=16, **shared)
    assert (divided.batch.batch_size, divided.batch.accumulate) == (16, 3)
    sizes = run.plan.batch
    assert (sizes.global_batch, sizes.batch_size, sizes.accumulate) == (96, 48, 1)
    assert run.plan.decisions["lr"].value == divided.decisions["lr"].value, "scaled against the task's batch size"
    assert run.config.validation.batch_size == 16
    sizes = run.resume(devices="cpu", max_steps=2).plan.batch
    assert (sizes.global_batch, sizes.batch_size, sizes.accumulate) == (96, 96, 1)
    resumed = lockstep.train(Toy(), devices="cpu", save_dir=run.run_dir, resume=True, **(shared | {"max_steps": 3}))
    assert (resumed.plan.batch, resumed.plan.decisions["lr"]) == (sizes, run.plan.decisions["lr"])


def test_no_task_is_an_error_that_names_what_to_give() -> None:
    for call in (lockstep.train, lockstep.plan, lockstep.verify):
        with pytest.raises(TaskError, match=r"(?s)\btask\b.*fix: lockstep\.train\(") as caught:
            call(devices="cpu")
        assert "MyTask()" in caught.value.fix and "lockstep.fit" in caught.value.fix


def test_plan_explains_every_decision(tmp_path: Path) -> None:
    plan = lockstep.plan(Toy(), devices="cpu,cpu", lr=0.25, runs_dir=tmp_path / "runs")
    assert plan.world_size == 2 and plan.schedule.lr == 0.25
    assert not (tmp_path / "runs").exists()


def test_old_call_forms_work(tmp_path: Path) -> None:
    settings = {"hardware": {"selected_devices": ["cpu"]}, "training": {"epochs": 1}, "save_dir": str(tmp_path / "run")}
    result = lockstep.train(Toy, settings)
    assert isinstance(result, lockstep.Run) and result.metrics["test_accuracy"] > 0
    assert lockstep.make_plan(Toy, settings).total_steps == result.step


def test_packages_with_the_names_of_functions_are_importable() -> None:
    from lockstep.planning import Plan
    from lockstep.verification import VerifyReport

    assert callable(lockstep.plan) and callable(lockstep.verify)
    assert pickle.loads(pickle.dumps(Plan)) is Plan and VerifyReport.__module__ == "lockstep.verification.report"


def test_a_missing_run_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="'nothing'") as caught:
        lockstep.Run("nothing", runs_dir=tmp_path)
    assert isinstance(caught.value, LockstepError) and caught.value.exit_code == 2
    assert "--save-dir" in caught.value.fix
