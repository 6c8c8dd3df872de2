"""Small tasks for tests: real data sets, models and metrics, in seconds on one core."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep import ArrayDataset, Datasets, Loss, Task, TaskConfig

FEATURES, CLASSES = 12, 3


def arrays(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    rule = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs @ rule).argmax(1)


class Accuracy:
    """The share of rows whose largest score is their label's. (torchmetrics takes a second to import, in each rank.)"""

    def __init__(self) -> None:
        self.right = self.rows = 0

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.right += int((scores.argmax(1) == labels).sum())
        self.rows += len(labels)

    def compute(self) -> dict[str, float]:
        return {"accuracy": self.right / self.rows}


class SampleBySample:
    """The slow way, as most users' data sets are."""

    def __init__(self, inputs: Tensor, labels: Tensor, pause_s: float = 0.0) -> None:
        self.inputs, self.labels, self.pause_s = inputs, labels, pause_s

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.pause_s)
        return self.inputs[index], self.labels[index]


class Augmented(SampleBySample):
    def sample(self, index: int, rng: Any) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.from_numpy(rng.standard_normal(FEATURES)).float(), self.labels[index]


class Toy(Task):
    class Config(TaskConfig):
        samples: int = 200
        dropout: float = 0.0
        batchnorm: bool = False
        dataset: str = "arrays"
        pause_s: float = 0.0
        fail_at: int | None = None
        fail_rank: int = 1
        kill: bool = False
        nan_at: int | None = None

    defaults: ClassVar[Any] = {"training": {"epochs": 2, "batch_size": 16}, "optimizer": {"lr": 0.01}}
    monitor = ("val_accuracy", "max")
    calls = 0

    def datasets(self) -> Datasets:
        kind = {"arrays": ArrayDataset, "plain": SampleBySample, "augmented": Augmented}[self.config.dataset]
        extra = {} if self.config.dataset == "arrays" else {"pause_s": self.config.pause_s}
        return Datasets(
            kind(*arrays(self.config.samples, 1), **extra), ArrayDataset(*arrays(53, 2)), ArrayDataset(*arrays(31, 3))
        )

    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(16) if self.config.batchnorm else nn.Identity()
        return nn.Sequential(
            # A bias before BatchNorm has no gradient but rounding noise, which Adam would blow up.
            nn.Linear(FEATURES, 16, bias=not self.config.batchnorm),
            norm,
            nn.ReLU(),
            nn.Dropout(self.config.dropout),
            nn.Linear(16, CLASSES),
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        if model.training:
            self._misbehave()
        total = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        if model.training and self.calls == self.config.nan_at and os.environ.get("RANK", "0") == "0":
            total = total * float("nan")
        return Loss(total, len(labels))

    def _misbehave(self) -> None:
        self.calls += 1
        time.sleep(self.config.pause_s if self.config.dataset == "arrays" else 0.0)
        if self.calls == self.config.fail_at and int(os.environ.get("RANK", "0")) == self.config.fail_rank:
            if self.config.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the toy broke, as it was told to")

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return model(batch[0]), batch[1]

    def metrics(self) -> Accuracy:
        return Accuracy()

    def remarks(self) -> tuple[str, ...]:
        assert os.environ.get("RANK", "0") == "0", "only the main rank has the metrics that there may be to speak of"
        return ()

    def pictures(self) -> dict[str, Any]:
        self.remarks()
        return {}


class TwoGroups(Toy):
    """An optimizer of the task's own, a hook that logs, and state that a checkpoint keeps."""

    seen = 0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.01}])

    def hooks(self) -> Any:
        def count(result: Any, model: nn.Module) -> dict[str, float]:
            self.seen += 1
            return {"seen": float(self.seen)}

        return [(count, 1)]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Streaming(Toy):
    """An iterable data set without a length."""

    def datasets(self) -> Datasets:
        class Stream(torch.utils.data.IterableDataset[Tensor]):
            def __iter__(self) -> Any:
                return iter(torch.randn(4, 3))

        return Datasets(Stream())


class Nondeterministic(Toy):
    """An operator that has no deterministic kernel on any device."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        return Loss(total + torch.zeros(2).put_(torch.tensor([0]), torch.tensor([0.0])).sum(), count)


class MeanLoss(Toy):
    """What Lockstep refuses: a mean instead of a sum and a count."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
