"""The configured optimizers: which parameters they train and decay, their state, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.config import OptimizerConfig, RunConfig
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.errors import ConfigError, UnsupportedError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    torch.manual_seed(1)
    inputs, labels = torch.randint(0, 5, (32,)), torch.randint(0, 3, (32,))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "torch.optim.RAdam"])
def test_they_learn_leave_norms_undecayed_and_resume_from_their_state(name: str) -> None:
    config = OptimizerConfig(name=name, weight_decay=0.1, weight_decay_on="matrices")
    model = network()
    optimizer = build_optimizer(config, model, 1e-2)
    first = train(model, optimizer, 1)
    train(model, optimizer, 4)
    undecayed = [p for g in optimizer.param_groups if not g["weight_decay"] for p in g["params"]]
    assert [p.dim() for p in undecayed] == [1, 1, 1, 1]
    assert len([p for g in optimizer.param_groups for p in g["params"]]) == len(list(model.parameters()))
    other = copy.deepcopy(model)
    resumed = build_optimizer(config, other, 1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, 5) == train(other, resumed, 5) < first


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_take_the_step_of_float32_to_rounding(name: str, dtype: torch.dtype) -> None:
    model = nn.Linear(64, 64).to(dtype)
    optimizer = build_optimizer(OptimizerConfig(name=name), model, 0.1)
    wide = copy.deepcopy(model).float()
    reference = build_optimizer(OptimizerConfig(name=name), wide, 0.1)
    for weight, other in zip(model.parameters(), wide.parameters(), strict=True):
        weight.grad = torch.randn_like(weight)
        other.grad = weight.grad.float()
    optimizer.step()
    reference.step()
    torch.testing.assert_close(model.weight.float(), wide.weight.detach(), rtol=0.01, atol=0.01, check_dtype=False)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"name": "torch.optim.LBFGS"}, UnsupportedError, "needs a closure"),
        ({"name": "torch.optim.LBFGS", "weight_decay_on": "matrices"}, UnsupportedError, "needs a closure"),
        ({"name": "no_such.package:Best"}, ConfigError, "there is no optimizer"),
        ({"name": "torch.nn:Linear"}, ConfigError, "not an optimizer"),
        ({"options": {"wrong": 1}}, ConfigError, "wrong"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        build_optimizer(OptimizerConfig(**settings), network(), 1e-2)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="adamw, adam, sgd, adafactor"):
        RunConfig.model_validate({"optimizer": {"name": "best"}})
