"""Dropout and batch statistics can be switched off wherever they come from, and random draws are noted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Loss, Task
from lockstep.engine.ablation import Watched


class Summing(Task):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch).sum(), len(batch))


class Functional(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self._function(inputs)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.inner(inputs, inputs, inputs)[0]
        return output


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.inner(inputs)[0]
        return output


SOURCES: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.Dropout(0.5),
    "layer of channels": lambda: nn.Dropout1d(0.5),
    "function": lambda: Functional(lambda x: F.dropout(x, 0.5)),
    "function in place": lambda: Functional(lambda x: F.alpha_dropout(x.clone(), p=0.5, training=True)),
    "attention": Attention,
    "scaled dot product": lambda: Functional(lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5)),
    "scaled dot product by name": lambda: Functional(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
    "recurrent": Recurrent,
}


def losses(model: nn.Module, off: tuple[str, ...]) -> tuple[set[float], set[str]]:
    watched = Watched(Summing(), model.train(), off)
    inputs = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    found = set()
    for seed in range(4):
        torch.manual_seed(seed)
        found.add(watched.loss(model, inputs).total.item())
    return found, watched.draws


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_dropout_is_noted_and_can_be_switched_off(source: Callable[[], nn.Module]) -> None:
    found, draws = losses(source(), ())
    assert (len(found), draws) == (4, {"dropout"})
    found, draws = losses(source(), ("dropout",))
    assert (len(found), draws) == (1, set())


def test_dropout_in_evaluation_is_not_a_draw() -> None:
    assert losses(Functional(lambda x: F.dropout(x, 0.5, training=False)), ())[1] == set()


def test_other_draws_are_named() -> None:
    found, draws = losses(Functional(lambda x: x * torch.rand_like(x)), ("dropout",))
    assert (len(found), draws) == (4, {"rand_like"})


@pytest.mark.parametrize(("draw", "name"), [(random.random, "random"), (np.random.rand, "numpy.random")])
def test_draws_from_other_libraries_are_named(draw: Callable[[], float], name: str) -> None:
    assert losses(Functional(lambda x: x * draw()), ())[1] == {name}


def test_functional_batch_statistics_can_be_switched_off() -> None:
    class Own(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return F.batch_norm(inputs, torch.zeros(5), torch.ones(5), training=True)

    watched = Watched(Summing(), Own(), ("batchnorm",))
    inputs = torch.randn(6, 5, 4) + 3
    assert watched.loss(Own(), inputs).total.item() == pytest.approx(inputs.sum().item(), rel=1e-4)


def test_batch_statistics_can_be_switched_off() -> None:
    model = nn.Sequential(nn.BatchNorm1d(5), nn.ReLU())
    watched = Watched(Summing(), model.train(), ("batchnorm",))
    inputs = torch.randn(6, 5, 4)
    whole = watched.loss(model, inputs).total
    apart = sum(watched.loss(model, inputs[i : i + 2]).total for i in (0, 2, 4))
    assert torch.allclose(whole, torch.as_tensor(apart))
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 0
