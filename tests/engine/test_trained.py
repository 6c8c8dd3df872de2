"""Modules beside the model, schedulers and optimizers of the task's own: trained and saved as in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

import lockstep
from lockstep import ArrayDataset, Datasets, Loss, Scheduler
from lockstep.errors import TaskError, UnsupportedError
from lockstep.events import Note
from lockstep.rundir.folder import RunDir
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.toys import CLASSES, FEATURES, Toy, arrays

SAMPLES, STEPS = 48, 8
SETTINGS: dict[str, Any] = {
    "training": {"epochs": STEPS, "max_grad_norm": 0.5, "early_stopping_patience": 0},
    "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "scheduler": {"name": "constant", "warmup_epochs": 0},
}
KINDS: dict[str, dict[str, Any]] = {
    "one all-reduce": {},
    "ddp": {"distributed": {"bucket_cap_mb": 1}},
    "exact": {"training": {"reproducibility": "exact"}},
}


class Head(nn.Module):
    """Scores by angle, as ArcFace's, and a temperature that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 6))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, features: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.normalize(features), self.weight) * self.temperature


class Embedding(nn.Sequential):
    def embed(self, inputs: Tensor) -> Tensor:
        return self(inputs)  # type: ignore[no-any-return]


class ArcFace(Toy):
    """A criterion with weights; the optimizer is the run's, the scheduler the task's."""

    head: Head

    def datasets(self) -> Datasets:
        return Datasets(ArrayDataset(*arrays(SAMPLES, 1)), ArrayDataset(*arrays(7, 2)))

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return Embedding(nn.Linear(FEATURES, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh())

    def modules(self) -> dict[str, nn.Module]:
        torch.manual_seed(2)
        self.head = Head()
        return {"head": self.head}

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return StepLR(optimizer, 3, 0.5)

    def loss(self, model: Any, batch: Any) -> Loss:
        inputs, labels = batch
        scores = self.head(model.embed(inputs))
        return Loss(nn.functional.cross_entropy(scores, labels, reduction="sum"), len(labels))

    def evaluate(self, model: Any, batch: Any) -> tuple[Tensor, ...]:
        return self.head(model.embed(batch[0])), batch[1]


def plain_loop() -> tuple[dict[str, Tensor], list[float]]:
    task = ArcFace()
    model, head = task.model(), task.modules()["head"]
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    schedule, rates = StepLR(optimizer, 3, 0.5), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = task.loss(model, arrays(SAMPLES, 1))
        (loss.total / loss.count).backward()
        clip_grad_norm_(parameters, 0.5)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return {**model.state_dict(), **{f"modules.head.{k}": v for k, v in head.state_dict().items()}}, rates


def settings(ranks: int, **more: Any) -> dict[str, Any]:
    training = {**SETTINGS["training"], "batch_size": SAMPLES // ranks, **more.pop("training", {})}
    return {**SETTINGS, **more, "training": training}


def on_ranks(rank: int, ranks: int, folder: Path) -> Any:
    found = {
        name: attempt(ArcFace, folder / name, rank, ranks, **settings(ranks, **kind))[0] for name, kind in KINDS.items()
    }
    found["resumed"], _ = attempt(
        ArcFace, folder / "resumed", rank, ranks, resume=True, training={"max_steps": None, "epochs": STEPS}
    )
    return found


@pytest.mark.slow
def test_modules_and_scheduler_of_the_task_on_any_ranks_are_what_a_plain_loop_makes_of_them(tmp_path: Path) -> None:
    expected, rates = plain_loop()
    attempt(ArcFace, tmp_path / "resumed", **settings(1, training={"max_steps": 4}))
    alone, _ = attempt(ArcFace, tmp_path / "alone", **settings(1))
    found = run_ranks(on_ranks, 2, tmp_path)[0]
    exact = found.pop("exact")
    for name, weights in {"alone": alone, **found}.items():
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            if not key.startswith("1.running"):
                torch.testing.assert_close(weights[key], value, msg=lambda text, at=f"{name}: {key}": f"{at}: {text}")
    assert exact.keys() == expected.keys()
    for folder in ("alone", "resumed"):
        run = RunDir(tmp_path / folder)
        assert [row["lr"] for row in run.steps()] == pytest.approx(rates)
    assert run.plan()["decisions"]["schedule"]["value"] == "task"


class ByEpoch(ArcFace):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return Scheduler(StepLR(optimizer, 1, 0.5), "epoch")


class Plateau(ArcFace):
    """``val_accuracy`` never gets above the threshold, so every evaluation after the first lowers the rate."""

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0, threshold=10.0)


class Cycle(ArcFace):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=6)


@pytest.mark.parametrize(
    ("task", "expected"),
    [(ByEpoch, [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025]), (Plateau, [0.01, 0.01, 0.01, 0.01, 0.005, 0.005])],
)
def test_a_scheduler_steps_by_epoch_or_by_the_monitored_metric_also_after_a_resume(
    tmp_path: Path, task: type[ArcFace], expected: list[float]
) -> None:
    each = {"epochs": 3, "batch_size": SAMPLES // 2}
    attempt(task, tmp_path / "run", training={**each, "max_steps": 3}, optimizer={"lr": 0.01})
    attempt(task, tmp_path / "run", resume=True, training={**each, "max_steps": None})
    assert [row["lr"] for row in RunDir(tmp_path / "run").steps()] == pytest.approx(expected)


def test_a_scheduler_may_cycle_the_momentum_too(tmp_path: Path) -> None:
    each = {"epochs": 3, "batch_size": SAMPLES // 2}
    whole, _ = attempt(Cycle, tmp_path / "whole", training=each)
    attempt(Cycle, tmp_path / "parts", training={**each, "max_steps": 2})
    parts, _ = attempt(Cycle, tmp_path / "parts", resume=True, training={**each, "max_steps": None})
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


class Own(Toy):
    """An optimizer of the task's own, made by ``made``."""

    made: Any = None

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return type(self).made(model)  # type: ignore[no-any-return]


class Sam(torch.optim.SGD):
    def first_step(self) -> None: ...
    def second_step(self) -> None: ...


def scheduled(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    StepLR(optimizer, 1)
    return optimizer


def strange(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7, 5))], 0.1)


class Lazy(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(CLASSES))


class Rows(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(9, CLASSES, sparse=True))


def refusal(task: lockstep.Task) -> str:
    with pytest.raises((TaskError, UnsupportedError)) as error:
        lockstep.plan(task, devices="cpu")
    return str(error.value)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), ("LBFGS", "closure")),
        (lambda model: Sam(model.parameters(), 0.1), ("Sam", "lockstep.Session", "again()")),
        (scheduled, ("scheduler", "Task.scheduler(optimizer)")),
        (lambda model: [torch.optim.SGD(model.parameters())], ("a list", "parameter group", "Task.scheduler")),
        (strange, ("(7, 5) in group 0", "Task.modules()")),
    ],
)
def test_an_optimizer_that_cannot_train_is_refused_before_anything_starts(made: Any, words: tuple[str, ...]) -> None:
    kind = type("OwnToy", (Own,), {"made": staticmethod(made)})
    message = refusal(kind())
    assert all(word in message for word in words), message


def test_a_lazy_module_is_refused_before_anything_starts() -> None:
    assert "0.weight" in refusal(Lazy())


def test_sparse_gradients_are_refused_where_they_are_summed_and_under_adam(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"AdamW .*sparse .*\b0"):
        attempt(Rows, tmp_path / "adam", optimizer={"name": "adamw"})
    with pytest.raises(UnsupportedError, match=r"sparse .*\b0"):
        attempt(Rows, tmp_path / "exact", optimizer={"name": "sgd"}, training={"reproducibility": "exact"})


class Partial(Toy):
    """Half of the parameters are in no group."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.get_submodule("0").parameters(), 0.1)


def test_parameters_in_no_group_are_named_at_the_start(tmp_path: Path) -> None:
    _, events = attempt(Partial, tmp_path / "run", training={"epochs": 1, "max_grad_norm": 1.0})
    notes = [str(event) for event in events if isinstance(event, Note)]
    assert any("2 parameters " in note and "4.weight, 4.bias" in note for note in notes), notes
    assert any("max_grad_norm" in note for note in notes)


class Empty(Toy):
    """Batches of class 0 have no items; counts have the shape (1,)."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, _ = super().loss(model, batch)
        used = (batch[1] != 0).sum().reshape(1)
        return Loss(total * (used[0] > 0), used)


class OneClassAtATime(Empty):
    def datasets(self) -> Datasets:
        inputs, _ = arrays(6, 1)
        return Datasets(ArrayDataset(inputs, torch.tensor([0, 0, 0, 1, 2, 1])))


def test_steps_without_items_change_nothing_and_have_no_row(tmp_path: Path) -> None:
    attempt(OneClassAtATime, tmp_path / "run", training={"epochs": 2, "batch_size": 1})
    rows = RunDir(tmp_path / "run").steps()
    assert len(rows) == 6, "of twelve steps"
    assert all(row["loss"] == row["loss"] and row["skipped_steps"] == 0 for row in rows)


class InStages(ArcFace):
    def stages(self, model: Any) -> list[nn.Module]:
        return list(model)


def in_stages(rank: int, ranks: int, folder: Path) -> str:
    with pytest.raises(UnsupportedError) as error:
        attempt(InStages, folder, rank, ranks, hardware={"strategy": "pipeline"})
    return str(error.value)


def test_divided_models_refuse_modules_by_name(tmp_path: Path) -> None:
    for message in run_ranks(in_stages, 2, tmp_path / "run"):
        assert message.partition("\n")[0].endswith(": head")


class Lowest(Plateau):
    monitor = ("val_loss", "min")


class NoMode(ArcFace):
    monitor = "val_loss"  # type: ignore[assignment]


class AtEpochs(ArcFace):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return Scheduler(ReduceLROnPlateau(optimizer), "epoch")


class AtMetrics(ArcFace):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return Scheduler(StepLR(optimizer, 1), "metric")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Lowest, r"'max', .*\bval_loss\b.*\bmin"),
        (NoMode, "monitor .*'val_loss'"),
        (AtEpochs, r"ReduceLROnPlateau .*\bepoch"),
        (AtMetrics, r"StepLR .*\bmetric"),
    ],
)
def test_a_scheduler_that_would_step_by_the_wrong_thing_is_refused(
    tmp_path: Path, task: type[ArcFace], words: str
) -> None:
    with pytest.raises(TaskError, match=words) as caught:
        attempt(task, tmp_path / "run")
    assert caught.value.fix


class Blind(Plateau):
    def datasets(self) -> Datasets:
        return Datasets(super().datasets().train)


def test_a_scheduler_by_metric_without_validation_data_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"(?s)\bscheduler\b.*\bdatasets\(\)"):
        attempt(Blind, tmp_path / "run")


class Wrapped(Toy):
    def model(self) -> nn.Module:
        return nn.DataParallel(super().model())


def test_a_model_that_distributes_itself_is_refused() -> None:
    with pytest.raises(TaskError, match=r"model\(\) .*DataParallel"):
        lockstep.plan(Wrapped(), devices="cpu")
