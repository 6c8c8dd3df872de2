"""The configured optimizers: which parameters they train and decay, their state, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep import Task
from lockstep.config import OptimizerConfig, RunConfig
from lockstep.engine.optim.optimizers import Several, build_optimizer
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


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "adafactor", "lion", "torch.optim.RAdam"])
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


def test_muon_trains_the_matrices_of_hidden_layers_alone() -> None:
    model = network()
    optimizer = build_optimizer(OptimizerConfig(name="muon"), model, 1e-2)
    assert isinstance(optimizer, Several)
    assert optimizer.param_groups[0]["params"] == [model[1].weight]
    added = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [added], "lr": 0.1})
    added.grad = torch.ones(3)
    optimizer.step()
    assert bool((added < 0.95).all()), "a group that is added is trained"


class Blocks(Task):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self._blocks = blocks

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return self._blocks


@pytest.mark.parametrize("name", ["adamw", "muon", "lion"])
def test_rates_fall_by_depth_from_the_output_to_the_input(name: str) -> None:
    model = network()
    config = OptimizerConfig(name=name, layer_decay=0.5, weight_decay=0.1, weight_decay_on="matrices")
    optimizer = build_optimizer(config, model, 0.08, Blocks(model[1], model[2]))
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    expected = {0: 0.01, 1: 0.02, 2: 0.04, 3: 0.08}
    assert {n: rates[id(p)] for n, p in model.named_parameters()} == pytest.approx(
        {n: expected[int(n[0])] for n, _ in model.named_parameters()}
    )
    undecayed = [p for g in optimizer.param_groups if not g["weight_decay"] for p in g["params"]]
    assert [p.dim() for p in undecayed] == [1, 1, 1, 1]
    first = train(model, optimizer, 1)
    assert train(model, optimizer, 5) < first


def test_rates_by_depth_need_several_blocks() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="needs a model of several blocks"):
        build_optimizer(OptimizerConfig(layer_decay=0.5), model, 0.1, Blocks())


def test_lion_as_its_paper_writes_it() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = build_optimizer(
        OptimizerConfig(name="lion", betas=(0.9, 0.99), weight_decay=0.5), nn.ParameterList([parameter]), 0.1
    )
    expected, momentum = parameter.detach().clone(), torch.zeros(2)
    for gradient in (torch.tensor([1.0, 3.0]), torch.tensor([-0.05, 1.0])):
        parameter.grad = gradient
        optimizer.step()
        expected = expected - 0.1 * ((0.9 * momentum + 0.1 * gradient).sign() + 0.5 * expected)
        momentum = 0.99 * momentum + 0.01 * gradient
    torch.testing.assert_close(parameter.detach(), expected)


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
    with pytest.raises(ValueError, match="adamw, adam, sgd, muon, adafactor, lion"):
        RunConfig.model_validate({"optimizer": {"name": "best"}})
