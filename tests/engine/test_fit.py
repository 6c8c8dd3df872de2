"""What happens around the steps of a run, as its folder tells it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep import Loss, Task
from lockstep.checkpoint.store import CheckpointStore
from lockstep.launch.evaluation import evaluate_checkpoint
from lockstep.launch.run import resume
from lockstep.telemetry.rundir import RunDir
from tests.toys import Toy

STEPS_PER_EPOCH = 13


def trained(folder: Path, log_interval: int = 50, task: type[Task] = Toy, **sections: Any) -> RunDir:
    """Two epochs of thirteen steps in this process."""
    lockstep.train(
        task,
        {
            "save_dir": str(folder),
            "hardware": {"selected_devices": "cpu"},
            "training": {"threads": 1, "early_stopping_patience": 0},
            "telemetry": {"log_interval": log_interval, "tensorboard": "off", "progress": "off", "monitor": False},
            **sections,
        },
    )
    return RunDir.open(folder)


def interval_means(each: Sequence[dict[str, Any]], some: Sequence[dict[str, Any]]) -> list[float]:
    """Means over the items of the intervals that the rows ``some`` end, from ``each`` step's own row."""
    totals, items = [0.0], [0]
    for row in each:
        totals.append(totals[-1] + row["loss"] * (row["samples_seen"] - items[-1]))
        items.append(row["samples_seen"])
    ends = [0, *(row["step"] for row in some)]
    return [(totals[b] - totals[a]) / (items[b] - items[a]) for a, b in itertools.pairwise(ends)]


def test_the_loss_of_an_interval_takes_in_the_steps_before_an_epochs_end(tmp_path: Path) -> None:
    each, some = (trained(tmp_path / str(interval), interval).steps() for interval in (1, 5))
    assert [row["step"] for row in some] == [5, 10, 15, 20, 25, 26], "the third interval is in both epochs"
    assert [row["loss"] for row in some] == pytest.approx(interval_means(each, some), rel=1e-6)


def test_evaluations_between_epochs_are_kept_and_judged(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", validation={"every_steps": 5})
    found, epochs = run.evaluations(), run.epochs()
    assert [(row["epoch"], row["step"], row["attempt"]) for row in found] == [
        (1, 5, 1),
        (1, 10, 1),
        (2, 15, 1),
        (2, 20, 1),
        (2, 25, 1),
    ]
    assert {"val_loss", "val_accuracy"} <= found[0].keys()
    assert found[0]["improved"], "the first of all is the best so far"
    assert [row["step"] for row in epochs] == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    best = max([*found, *epochs], key=lambda row: row["val_accuracy"])
    assert run.read().best_metric["val_accuracy"] == best["val_accuracy"]


def test_a_resume_of_a_finished_run_leaves_it_finished(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    result = resume(run)
    progress = run.progress()
    assert progress is not None
    assert (result.step, progress.step, progress.total) == (26, 26, 26)


class Drawing(Toy):
    """Draws from every generator, in training, in evaluation and for its remarks."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        return Loss(total * (0.5 + random.random() + float(np.random.rand())), count)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        self.remarks()
        return super().evaluate(model, batch)

    def remarks(self) -> tuple[str, ...]:
        random.random(), np.random.rand(), torch.rand(1)
        return ()


def test_validation_does_not_change_training(tmp_path: Path) -> None:
    often, once = (
        trained(tmp_path / str(every), task=Drawing, validation={"every_steps": every, "sanity_steps": every % 2})
        for every in (1, 100)
    )
    for name, value in weights(often).items():
        assert torch.equal(value, weights(once)[name]), name


def weights(run: RunDir) -> dict[str, Tensor]:
    store = CheckpointStore(run.checkpoints)
    return store.load(store.step_of("last") or 0).model


class Declining(Toy):
    """Its first evaluation is its best. Its state is on a layer that model() makes, and is what evaluations show."""

    monitor = ("val_score", "max")
    evaluations = 0

    def model(self) -> nn.Module:
        model = super().model()
        self.layer: Any = model[0]
        self.layer.steps = 0
        return model

    def hooks(self) -> Any:
        def count(result: Any, model: nn.Module) -> None:
            self.layer.steps = result.step

        return [(count, 1)]

    def metrics(self) -> Any:
        self.evaluations += 1
        return self

    def update(self, *rows: Tensor) -> None:
        pass

    def compute(self) -> dict[str, float]:
        return {"score": -self.evaluations, "steps": self.layer.steps}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.layer.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.layer.steps = state["steps"]


def test_the_best_weights_are_tested_with_the_tasks_state_at_that_time(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", task=Declining)
    assert [row["val_steps"] for row in run.epochs()] == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    assert run.read().final_metrics["test_steps"] == STEPS_PER_EPOCH
    found = evaluate_checkpoint(run, split="test", devices="cpu", checkpoint="best")
    assert found["metrics"]["test_steps"] == STEPS_PER_EPOCH, "the state is restored after model()"


def test_another_monitor_starts_again_with_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run", task=Declining, training={"threads": 1, "max_steps": 20})
    assert run.read().best_epoch == 1
    changes = {"training": {"max_steps": None}, "checkpoint": {"monitor": "val_loss"}}
    resume(run, overrides={**changes, "telemetry": {"progress": "plain"}})
    assert run.read().best_epoch == 2, "a loss is compared with losses, not with the best score"
    assert "judged by val_score (max) and is now judged by val_loss (min)" in capsys.readouterr().out


class LateMixup(Toy):
    """Draws from Python's and NumPy's generators from its tenth step on."""

    step = 0

    def hooks(self) -> Any:
        def count(result: Any, model: nn.Module) -> None:
            self.step = result.step

        return [(count, 1)]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        drawn = random.random() + float(np.random.rand()) if model.training and self.step >= 9 else 1.0
        return Loss(total * drawn, count)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def test_what_a_loss_draws_from_pythons_and_numpys_generators_is_resumed(tmp_path: Path) -> None:
    constant = {"scheduler": {"name": "constant", "warmup_steps": 0}}
    whole = weights(trained(tmp_path / "whole", task=LateMixup, **constant))
    for stop in (5, 9, 10, 11):
        training = {"threads": 1, "early_stopping_patience": 0, "max_steps": stop}
        run = trained(tmp_path / str(stop), task=LateMixup, training=training, **constant)
        np.random.rand(), random.random()
        resume(run, overrides={"training": {"max_steps": None}})
        for name, value in weights(run).items():
            assert torch.equal(value, whole[name]), (stop, name)
