"""Which parameters a step trains: frozen, unfrozen and unused ones, on any number of ranks as in a plain loop."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from lockstep import ArrayDataset, Datasets, Loss
from lockstep.engine.loss import is_mean
from lockstep.errors import TaskError
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.toys import CLASSES, FEATURES, Toy, arrays

SAMPLES, STEPS = 48, 10
#: Every step takes all samples, so that their order does not matter.
SETTINGS: dict[str, Any] = {
    "training": {"epochs": STEPS, "max_grad_norm": 0.5, "early_stopping_patience": 0},
    "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "scheduler": {"name": "constant", "warmup_epochs": 0},
}
KINDS: dict[str, dict[str, Any]] = {
    "one all-reduce": {},
    "ddp": {"distributed": {"bucket_cap_mb": 1, "find_unused_parameters": True}},
    "exact": {"training": {"reproducibility": "exact"}},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8).requires_grad_(False)
        self.head = nn.Linear(8, CLASSES)
        self.some = nn.Linear(FEATURES, 1)
        self.idle = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(inputs)))  # type: ignore[no-any-return]


def set_flags(model: Any, steps: int) -> None:
    """After ``steps`` steps: the body trains from the fourth to the seventh, the head not in the seventh."""
    model.body.requires_grad_(3 <= steps < 7)
    model.head.requires_grad_(steps != 6)


class Thawing(Toy):
    """``some`` is used for few samples only, ``idle`` for none."""

    net: Net
    steps = 0

    def datasets(self) -> Datasets:
        return Datasets(ArrayDataset(*arrays(SAMPLES, 1)), ArrayDataset(*arrays(4, 2)))

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        self.net = Net()
        return self.net

    def loss(self, model: Any, batch: Any) -> Loss:
        inputs, labels = batch
        total = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        few = inputs[inputs[:, 0] > 2.0]
        if len(few):
            total = total + model.some(few).square().sum()
        return Loss(total, len(labels))

    def hooks(self) -> Any:
        def change(result: Any, model: nn.Module) -> None:
            self.steps = result.step
            set_flags(model, result.step)

        return [(change, 1)]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_flags(self.net, state["steps"])


class Forgetful(Thawing):
    """Its flags are right only from the first hook on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Lone(Thawing):
    """One rank alone unfreezes a layer."""

    def hooks(self) -> Any:
        return super().hooks() if os.environ.get("RANK") == "1" else ()


def plain_loop() -> dict[str, Tensor]:
    task = Thawing()
    model: Any = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    batch = arrays(SAMPLES, 1)
    for step in range(STEPS):
        set_flags(model, step)
        model.zero_grad()
        loss = task.loss(model, batch)
        (loss.total / loss.count).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()  # type: ignore[no-any-return]


def settings(ranks: int, **more: Any) -> dict[str, Any]:
    training = {**SETTINGS["training"], "batch_size": SAMPLES // ranks, **more.pop("training", {})}
    return {**SETTINGS, **more, "training": training}


def on_ranks(rank: int, ranks: int, folder: Path) -> Any:
    found = {
        name: attempt(Thawing, folder / name, rank, ranks, **settings(ranks, **kind))[0] for name, kind in KINDS.items()
    }
    refused = []
    for name in ("one all-reduce", "exact"):
        with pytest.raises(TaskError) as error:
            attempt(Lone, folder / f"lone {name}", rank, ranks, **settings(ranks, **KINDS[name]))
        refused.append(str(error.value))
    for name in ("stopped", "forgetful"):
        kind = Thawing if name == "stopped" else Forgetful
        more = {"training": {"max_steps": None, "epochs": STEPS}}
        found[name], _ = attempt(kind, folder / name, rank, ranks, resume=True, **more)
    return found, refused


@pytest.mark.slow
def test_freezing_and_unfreezing_on_any_ranks_is_what_a_plain_loop_does(tmp_path: Path) -> None:
    start, expected = Thawing().model().state_dict(), plain_loop()
    for name in ("stopped", "forgetful"):
        attempt(Thawing, tmp_path / name, **settings(1, training={"max_steps": 5}))
    alone = {
        "alone": attempt(Thawing, tmp_path / "alone", **settings(1))[0],
        "alone, exact": attempt(Thawing, tmp_path / "alone exact", **settings(1, **KINDS["exact"]))[0],
    }
    found, refused = run_ranks(on_ranks, 2, tmp_path)[0]
    forgetful = found.pop("forgetful")
    for name, weights in {**alone, **found}.items():
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, msg=lambda text, at=f"{name}: {key}": f"{at}: {text}")
        assert torch.equal(weights["idle.weight"], start["idle.weight"]), "an unused layer is not decayed"
    assert all(torch.equal(alone["alone, exact"][key], found["exact"][key]) for key in expected)
    assert not torch.equal(forgetful["body.weight"], start["body.weight"])
    for message in refused:
        assert re.search(r"\bfrozen\b.*\b1 of 2 ranks", message, re.DOTALL)


N = 4
_generator = torch.Generator().manual_seed(0)
OUT = torch.randn(N, 3, generator=_generator, requires_grad=True) * 2
TARGET = torch.randn(N, 3, generator=_generator)
LABELS = torch.tensor([0, 1, 2, -100])
WEIGHT = torch.randn(3, 3, generator=_generator, requires_grad=True)

MEANS: dict[str, Callable[[], Tensor]] = {
    "cross entropy": lambda: F.cross_entropy(OUT, LABELS),
    "smoothed labels": lambda: F.cross_entropy(OUT, LABELS, label_smoothing=0.1),
    "soft targets": lambda: F.cross_entropy(OUT, TARGET.softmax(1)),
    "weighted": lambda: 0.5 * F.cross_entropy(OUT, LABELS),
    "over accumulation": lambda: F.cross_entropy(OUT, LABELS) / 2,
    "sum divided by the count": lambda: F.cross_entropy(OUT, LABELS, reduction="sum") / N,
    "own mean": lambda: F.cross_entropy(OUT, LABELS, reduction="none").mean(),
    "own mean, negative": lambda: -OUT.log_softmax(1)[:, 0].mean(),
    "one minus a score": lambda: 1 - OUT.sigmoid().mean(),
    "mse": lambda: F.mse_loss(OUT, TARGET),
    "l1": lambda: F.l1_loss(OUT, TARGET),
    "kl": lambda: F.kl_div(OUT.log_softmax(1), TARGET.softmax(1), reduction="batchmean"),
    "two means": lambda: F.cross_entropy(OUT, LABELS) + 0.4 * F.mse_loss(OUT, TARGET),
    "vae": lambda: F.mse_loss(OUT, TARGET) + 0.1 * (OUT.pow(2) - 1).sum(1).mean(),
    "contrastive": lambda: F.cross_entropy(OUT @ OUT.T, torch.arange(N)),
    "cast": lambda: F.cross_entropy(OUT.double(), LABELS).float(),
}
SUMS: dict[str, Callable[[], Tensor]] = {
    "sum": lambda: F.cross_entropy(OUT, LABELS, reduction="sum"),
    "smoothed labels": lambda: F.cross_entropy(OUT, LABELS, label_smoothing=0.1, reduction="sum"),
    "mean times count": lambda: F.cross_entropy(OUT, LABELS) * N,
    "count times means": lambda: N * (F.cross_entropy(OUT, LABELS) + F.mse_loss(OUT, TARGET)),
    "mean times a tensor": lambda: OUT.mean() * torch.tensor(float(N)),
    "mean over features of sums over items": lambda: (OUT - TARGET).pow(2).sum(0).mean(),
    "sum over items of means over features": lambda: OUT.mean(1).sum(),
    "loop over items": lambda: sum((F.mse_loss(OUT[i], TARGET[i]) for i in range(N)), torch.zeros(())),
    "stacked items": lambda: torch.stack([OUT[i].mean() for i in range(N)]).sum(),
    "regularised": lambda: F.cross_entropy(OUT, LABELS, reduction="sum") + 0.01 * WEIGHT.pow(2).sum(),
    "with an auxiliary mean": lambda: OUT.sum() + OUT.softmax(1).mean(0).pow(2).mean(),
    "no gradient": lambda: OUT.mean().detach(),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_are_told_from_their_graph(name: str) -> None:
    assert is_mean(MEANS[name](), N)
    assert not is_mean(MEANS[name](), 1), "equal weight for each micro-batch"


@pytest.mark.parametrize("name", SUMS)
def test_sums_and_what_may_be_one_pass(name: str) -> None:
    assert not is_mean(SUMS[name](), N)


def test_a_long_sum_of_means_is_followed_to_its_end() -> None:
    """A loop over thousands of samples, each one's mean."""
    assert not is_mean(sum((OUT.mean() for _ in range(3000)), torch.zeros(())), 5000)
