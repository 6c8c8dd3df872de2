"""A task's metrics have the values that each of them has alone, on any number of ranks, and names of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics import classification as scores_of
from torchmetrics.wrappers import BootStrapper

import lockstep
from lockstep import ArrayDataset, Loss, Task
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.evaluate import Evaluator, evaluate
from lockstep.engine.optim.precision import Precision
from lockstep.errors import ConfigError, TaskError
from lockstep.hardware.world import World
from lockstep.planning import LoaderPlan
from tests.gloo import run_ranks
from tests.toys import Toy

CPU = torch.device("cpu")
SAMPLES, CLASSES = 8, 4

#: States that are summed, whole numbers and others; lists; states that are equal after one sample, or after a few.
CATALOGUE: dict[str, Callable[[], Metric]] = {
    "top1": lambda: scores_of.MulticlassAccuracy(CLASSES, average="micro"),
    "top2": lambda: scores_of.MulticlassAccuracy(CLASSES, average="micro", top_k=2),
    "macro": lambda: scores_of.MulticlassAccuracy(CLASSES),
    "ignoring": lambda: scores_of.MulticlassAccuracy(CLASSES, ignore_index=3),
    "specificity": lambda: scores_of.MulticlassSpecificity(CLASSES),
    "f1": lambda: scores_of.MulticlassF1Score(CLASSES, ignore_index=2),
    "confusion": lambda: scores_of.MulticlassConfusionMatrix(CLASSES),
    "auroc": lambda: scores_of.MulticlassAUROC(CLASSES),
    "auroc_binned": lambda: scores_of.MulticlassAUROC(CLASSES, thresholds=5),
    "calibration": lambda: scores_of.MulticlassCalibrationError(CLASSES, n_bins=3),
    "hinge": lambda: scores_of.MulticlassHingeLoss(CLASSES),
}


class Scored(Task):
    """Rows are the samples themselves."""

    def __init__(self, metrics: Callable[[], Any]) -> None:
        super().__init__()
        self.make_metrics = metrics

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).sum(), len(batch[0]))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return batch[0], batch[1]

    def metrics(self) -> Any:
        return self.make_metrics()


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, CLASSES, generator=generator).softmax(1), torch.arange(SAMPLES) % CLASSES


def evaluated(metrics: Callable[[], Any], chunk: int, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    torch.manual_seed(0)  # of the model
    loader = LoaderPlan(num_workers=0, prefetch_factor=2, pin_memory=False)
    collectives = Collectives(World(rank, ranks, rank, ranks))
    evaluator = Evaluator(collectives, CPU, Precision("32", CPU, 1.0), loader, chunk, seed=0)
    return evaluate(evaluator, Scored(metrics), nn.Linear(CLASSES, 1), ArrayDataset(*rows()))


def test_a_module_dict_of_metrics_is_a_dict() -> None:
    made = {name: CATALOGUE[name]() for name in ("top1", "top2")}
    assert evaluated(lambda: nn.ModuleDict(made), 1) == evaluated(lambda: made, 1)


def drawing() -> dict[str, Any]:
    return {"bootstrap": BootStrapper(CATALOGUE["macro"](), num_bootstraps=3, raw=True)}


def of_pairs(rank: int, ranks: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    torch.set_num_threads(1)
    pairs = [
        evaluated(lambda pair=pair: {name: CATALOGUE[name]() for name in pair}, chunk, rank, ranks)
        for chunk in (1, 5, SAMPLES)
        for pair in combinations(CATALOGUE, 2)
    ]
    return pairs, [evaluated(drawing, chunk, rank, ranks) for chunk in (1, 5)]


@pytest.mark.slow
def test_every_pair_of_metrics_has_the_values_of_each_alone() -> None:
    alone = {name: make() for name, make in CATALOGUE.items()}
    for metric in alone.values():
        metric.update(*rows())
    pairs, draws = of_pairs(0, 1)
    for found, pair in zip(pairs, 3 * [*combinations(CATALOGUE, 2)], strict=True):
        for name in pair:
            assert np.allclose(found[name], alone[name].compute(), atol=1e-6), (name, pair)
    for ranks in (2, 3):
        assert run_ranks(of_pairs, ranks) == [(pairs, draws)] * ranks
    assert draws[0]["raw"] != draws[1]["raw"], "which rows are drawn depends on the chunks"


class Pairs(Toy):
    """Values that are a pair of numbers, a curve, and a dictionary, from all scores of class 0."""

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return model(batch[0]).softmax(1)[:, 0], (batch[1] == 0).long()

    def metrics(self) -> Any:
        return {"recall": scores_of.BinaryRecallAtFixedPrecision(0.5), "roc": scores_of.BinaryROC(thresholds=3)}


def test_pairs_are_numbers_of_a_row_and_curves_are_tables(tmp_path: Path) -> None:
    common: dict[str, Any] = {"devices": "cpu", "training": {"epochs": 1}}
    run = lockstep.train(Pairs(), save_dir=tmp_path / "run", checkpoint={"monitor": "val_recall_0"}, **common)
    assert {"val_recall_0", "val_recall_1", "test_recall_0", "test_recall_1"} <= run.metrics.keys()
    tables = json.loads((tmp_path / "run" / "tables.json").read_text())
    assert [len(curve) for curve in tables["test_roc"]] == [3, 3, 3]


class Named(Toy):
    def __init__(self, metrics: Callable[[], Any]) -> None:
        super().__init__()
        self.make_metrics = metrics

    def metrics(self) -> Any:
        return self.make_metrics()


class Distance(scores_of.MulticlassAccuracy):
    """By its name, lower is better; it states the opposite."""


def test_the_best_checkpoint_is_that_of_the_metrics_own_direction(tmp_path: Path) -> None:
    common: dict[str, Any] = {"devices": "cpu", "training": {"epochs": 3}, "save_dir": tmp_path / "run"}
    task = Named(lambda: {"distance": Distance(3), "margin": scores_of.MulticlassConfusionMatrix(3)})
    plan = lockstep.plan(task, checkpoint={"monitor": "val_distance"})
    assert (plan.monitor, plan.mode) == ("val_distance", "max")
    with pytest.raises(ConfigError, match="val_margin") as caught:
        lockstep.train(task, checkpoint={"monitor": "val_margin"}, **common)
    assert "checkpoint.mode" in caught.value.fix
    run = lockstep.train(task, checkpoint={"monitor": "val_distance"}, **common)
    assert run.metrics["val_distance"] == max(row["val_distance"] for row in run.history)


@pytest.mark.parametrize(
    "metrics",
    [
        lambda: {"loss": CATALOGUE["top1"]()},
        lambda: MetricCollection({"loss": CATALOGUE["top1"]()}),
        lambda: [CATALOGUE["top1"]()],
        lambda: None,
        lambda: scores_of.MulticlassAccuracy,
        lambda: {"top1": scores_of.MulticlassAccuracy},
    ],
)
def test_metrics_that_cannot_be_used_are_refused_by_the_plan(metrics: Callable[[], Any]) -> None:
    with pytest.raises(TaskError, match="metric"):
        lockstep.plan(Named(metrics))


class Own:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def update(self, *rows: Any) -> None:
        pass

    def compute(self) -> dict[str, Any]:
        return self.values


@pytest.mark.parametrize(
    "value", [{"loss": 1.0}, {"model": nn.Linear(1, 1)}, {"many": {1, 2}}, {"pair_0": 1.0, "pair": (2.0, 3.0)}]
)
def test_values_without_a_place_in_a_run_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=next(iter(value))):
        evaluated(lambda: Own(**value), SAMPLES)


@pytest.mark.parametrize(
    ("names", "options", "is_noted"),
    [
        (("top1", "top2"), {}, True),
        (("top1", "ignoring"), {}, True),
        (("top1", "top2"), {"compute_groups": False}, False),
        (("macro", "specificity"), {}, False),
        (("confusion", "auroc"), {}, False),
        (("top1", "auroc"), {}, False),
    ],
)
def test_a_collection_that_may_share_states_by_chance_has_a_note(
    names: tuple[str, ...], options: dict[str, Any], is_noted: bool
) -> None:
    plan = lockstep.plan(Named(lambda: MetricCollection({name: CATALOGUE[name]() for name in names}, **options)))
    assert ("compute_groups" in [note.key for note in plan.notes]) is is_noted
