"""Which losses are told to be means where a sum is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.engine.reduction import is_mean

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
