"""Every sample counts once, on any number of ranks."""

from __future__ import annotations

import random
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryF1Score, ConfusionMatrix, MulticlassAccuracy

from lockstep import ArrayDataset, Loss, Task
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.evaluate import Evaluator, evaluate, evaluating
from lockstep.engine.optim.precision import Precision
from lockstep.engine.trained import train_mode
from lockstep.errors import TaskError
from lockstep.hardware.world import World
from lockstep.planning import LoaderPlan
from tests.gloo import run_ranks

CPU = torch.device("cpu")


class Scores(Task):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        scores, labels = batch
        return Loss((model(scores).squeeze(1) - labels).abs().sum(), len(labels))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return batch[0].squeeze(1).sigmoid(), batch[1].long()

    def metrics(self) -> MetricCollection:
        return MetricCollection(
            {"auroc": BinaryAUROC(), "confusion": ConfusionMatrix(task="binary")}, compute_groups=False
        )


class Bare(Task):
    """Neither rows nor metrics."""

    loss = Scores.loss


class Shuffled(Scores):
    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return (batch[1][:1],)


class Drawing(Scores):
    """Draws in evaluation, as Monte Carlo dropout and the sampling of a VAE do, and where its numbers are shown."""

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        scores, labels = super().evaluate(model, batch)
        noise = torch.rand(len(scores)) + random.random() + float(np.random.rand())
        return (scores + noise) / 4, labels


def run(rank: int, ranks: int, samples: int, batch_size: int, task: Task, step: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(samples)
    scores = torch.randn(samples, 1, generator=generator)
    labels = (torch.arange(samples) % 2).float()
    torch.manual_seed(0)
    loader = LoaderPlan(num_workers=0, prefetch_factor=2, pin_memory=False)
    collectives = Collectives(World(rank, ranks, rank, ranks))
    evaluator = Evaluator(collectives, CPU, Precision("32", CPU, 1.0), loader, batch_size, seed=0, step=step)
    return evaluate(evaluator, task, nn.Linear(1, 1), ArrayDataset(scores, labels))


def sizes(rank: int, ranks: int, cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    random.seed(rank)
    np.random.seed(rank)
    return [run(rank, ranks, samples, batch, task) for samples, batch in cases for task in (Scores(), Drawing())]


CASES = [(5, 1), (5, 2), (5, 32), (37, 4), (64, 4)]


def everything(rank: int, ranks: int) -> tuple[Any, ...]:
    return sizes(rank, ranks, CASES), of_own_types(rank, ranks)


@pytest.fixture(scope="module")
def of_three() -> tuple[tuple[Any, ...], ...]:
    """What each of three ranks finds: of the metrics, and of rows of any type."""
    return tuple(zip(*run_ranks(everything, 3), strict=True))


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(8, marks=pytest.mark.drill)])
def test_metrics_equal_those_of_one_process_bit_for_bit(of_three: tuple[Any, ...], ranks: int) -> None:
    alone = sizes(0, 1, CASES)
    found = [*of_three[0]] if ranks == 3 else run_ranks(sizes, ranks, CASES)
    assert found == [alone] * ranks
    assert [sum(map(sum, result["confusion"])) for result in alone[::2]] == [5, 5, 5, 37, 64]


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_evaluation_draws_by_step_and_leaves_the_generators_as_they_were() -> None:
    first = run(0, 1, 37, 4, Drawing())  # seeds torch's generator at its beginning
    random.random(), np.random.rand()
    before = states()
    assert run(0, 1, 37, 4, Drawing()) == first
    assert run(0, 1, 37, 4, Drawing(), step=1) != first
    assert states() == before


def test_each_module_has_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Dropout())
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_training_begins_with_what_the_task_froze_in_evaluation_mode() -> None:
    backbone = nn.Sequential(nn.Linear(1, 1), nn.Dropout()).eval().requires_grad_(False)
    pretrained = nn.Sequential(nn.Linear(1, 1), nn.Dropout()).eval()
    model = nn.ModuleDict({"backbone": backbone, "norm": nn.BatchNorm1d(1).eval(), "pretrained": pretrained})
    train_mode(model)
    modes = {name for name, module in model.named_modules() if module.training}
    assert modes == {"", "pretrained", "pretrained.0", "pretrained.1"}
    train_mode(model.eval())
    assert model["norm"].training and not backbone.training, "a whole model in evaluation mode is trained"


def test_rows_that_are_not_one_per_sample_are_refused() -> None:
    with pytest.raises(TaskError, match=r"fix: .*\(logits, "):
        run(0, 1, 5, 4, Shuffled())


class Rows:
    """Metrics that know nothing of torchmetrics."""

    def __init__(self) -> None:
        self.rows = 0

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.rows += len(labels)

    def compute(self) -> dict[str, Any]:
        return {"rows": self.rows, "twice": torch.tensor([self.rows, self.rows])}


class Counted(Scores):
    def metrics(self) -> Rows:
        return Rows()


class Wrapped:
    """An object of one's own with torchmetrics inside, one made before and one for each batch."""

    def __init__(self) -> None:
        self.metrics, self.batches = {"auroc": [BinaryAUROC()]}, list[float]()

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.metrics["auroc"][0].update(scores, labels)
        self.batches.append(float(BinaryAccuracy()(scores, labels)))

    def compute(self) -> dict[str, Any]:
        return {"auroc": self.metrics["auroc"][0].compute(), "accuracy": sum(self.batches) / len(self.batches)}


class WithWrapped(Scores):
    def metrics(self) -> Any:
        return Wrapped()


class Boxes(Scores):
    """Rows that are no tensors; some metrics of every kind of number."""

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        inputs = batch[0].squeeze(1)
        return inputs, [f"{value:.3f}" for value in inputs.tolist()], [{"box": value} for value in inputs]

    def metrics(self) -> Any:
        return Gathered()


class Gathered:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.boxes: list[Any] = []

    def update(self, inputs: Tensor, texts: list[str], boxes: list[Any]) -> None:
        assert len(inputs) == len(texts) == len(boxes)
        self.texts += texts
        self.boxes += boxes

    def compute(self) -> dict[str, Any]:
        values = [f"{float(box['box']):.3f}" for box in self.boxes]
        known = {"agree": values == self.texts, "nothing": float("nan"), "half": np.float32(0.5)}
        return {**known, "flag": torch.tensor([True]), "first": self.texts[0]}


class Merged(Boxes):
    """Returns an object of its own for each batch."""

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        return SimpleNamespace(rows=super().evaluate(model, batch))

    def merge(self, rows: Any) -> tuple[Any, ...]:
        inputs, texts, boxes = zip(*(row.rows for row in rows), strict=True)
        return torch.cat(inputs), [*chain.from_iterable(texts)], [*chain.from_iterable(boxes)]


class LossAlone(Task):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total = (model(batch[0]).squeeze(1) - batch[1]).abs().sum()
        return Loss(total, torch.tensor([len(batch[1])]))


def of_own_types(rank: int, ranks: int) -> list[dict[str, Any]]:
    """With as many ranks as three, one of them has no chunk."""
    torch.set_num_threads(1)
    return [run(rank, ranks, 7, 4, task) for task in (Boxes(), Merged(), LossAlone(), WithWrapped())]


def test_rows_of_any_type_come_in_index_order(of_three: tuple[Any, ...]) -> None:
    alone = of_own_types(0, 1)
    boxes, merged, loss, wrapped = alone
    assert wrapped.keys() == {"loss", "auroc", "accuracy"}
    assert isinstance(boxes["agree"], float) and isinstance(boxes["flag"], float) and type(boxes["half"]) is float
    assert (boxes["agree"], boxes["flag"], boxes["half"]) == (1.0, 1.0, 0.5) and boxes["nothing"] != boxes["nothing"]
    assert repr(merged) == repr(boxes)
    assert loss == {"loss": boxes["loss"]}, "a count of shape (1,) is one number"
    assert repr([*of_three[1]]) == repr([alone] * 3)


@pytest.mark.parametrize("rows", [torch.zeros(4, 2), ("text",), (torch.tensor(1.0),), ([1, 2],)])
def test_rows_that_are_not_one_entry_per_sample_are_refused(rows: Any) -> None:
    task = Scores()
    task.evaluate = lambda model, batch: rows  # type: ignore[method-assign]
    with pytest.raises(TaskError, match=r"fix: .*\(logits, "):
        run(0, 1, 3, 3, task)


class Nameless(Scores):
    def metrics(self) -> Any:
        return BinaryAUROC()


def test_metrics_are_whatever_updates_and_computes() -> None:
    found = run(0, 1, 5, 2, Counted())
    assert {name: value for name, value in found.items() if name != "loss"} == {"rows": 5, "twice": [5, 5]}


def test_a_single_metric_has_the_name_of_its_class() -> None:
    assert run(0, 1, 5, 4, Nameless()).keys() == {"loss", "BinaryAUROC"}


class Named(Scores):
    def metrics(self) -> Any:
        return {"one": BinaryAUROC(), "two": BinaryF1Score()}


def test_a_dict_of_metrics_is_a_collection() -> None:
    assert run(0, 1, 5, 4, Named()).keys() == {"loss", "one", "two"}


def test_a_task_without_metrics_is_evaluated_by_its_loss() -> None:
    assert run(0, 1, 7, 3, Bare()) == {"loss": run(0, 1, 7, 3, Scores())["loss"]}


class Misfit(Scores):
    def __init__(self, merges: bool) -> None:
        super().__init__()
        self.merges = merges

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return batch[0].repeat(1, 7), batch[1].long()

    def metrics(self) -> Any:
        accuracy = MulticlassAccuracy(4)
        return MetricCollection([accuracy]) if self.merges else accuracy


@pytest.mark.parametrize("merges", [True, False])
def test_an_error_of_metrics_says_what_they_were_given(merges: bool) -> None:
    with pytest.raises(ValueError, match="dimension") as caught:
        run(0, 1, 5, 4, Misfit(merges))
    assert any("Task.metrics()" in note and "[4] torch.int64" in note for note in caught.value.__notes__)
