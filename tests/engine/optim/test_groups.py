"""What a checkpoint keeps of an optimizer's groups, and how it fits an optimizer that was made in another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.writer import HostBuffers
from lockstep.config import OptimizerConfig
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision
from lockstep.engine.optim.step import Update
from lockstep.errors import TaskError
from lockstep.planning import Schedule

CPU = torch.device("cpu")


def model_of(*, frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(not frozen)
    return model


def update_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, lr: float = 0.1) -> Update:
    schedule = Schedule(name="constant", lr=lr, total_steps=9, steps_per_epoch=9)
    if optimizer is None:
        optimizer = build_optimizer(OptimizerConfig(name="adamw", lr=lr), model, lr)
    return Update(model, optimizer, schedule, Precision("32", CPU, 1.0), None)


def take(model: nn.Module, update: Update, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient if parameter.requires_grad else None
        update.apply(step, 1, 1.0, want_norm=False)


def moments(model: nn.Module, update: Update) -> dict[str, Tensor]:
    state = update.optimizer.state
    return {name: state[p]["exp_avg"] for name, p in model.named_parameters() if "exp_avg" in state.get(p, {})}


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_checkpoint_of_trainable_parameters_alone_fits_the_optimizer_of_all() -> None:
    """Earlier versions left frozen parameters out of the built-in optimizer."""
    model, again = model_of(frozen=True), model_of(frozen=True)
    decay = OptimizerConfig(name="adamw").weight_decay
    old = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1, weight_decay=decay, fused=True)
    update = update_of(model, old)
    take(model, update, range(2))
    state = {
        key: value for key, value in HostBuffers().copy(update.state_dict()).items() if key not in {"names", "settings"}
    }
    resumed = update_of(again)
    resumed.load_state_dict(state)
    assert moments(again, resumed).keys() == {"1.weight", "1.bias"}
    again.load_state_dict(model.state_dict())
    take(model, update, range(2, 4))
    take(again, resumed, range(2, 4))
    assert_equal(model, again)


def test_a_group_that_a_hook_adds_follows_the_schedule_and_is_restored() -> None:
    def new() -> tuple[nn.Sequential, Update]:
        model = model_of(frozen=True)
        return model, update_of(model, torch.optim.AdamW(model[1].parameters(), lr=0.1))

    (model, update), (again, resumed) = new(), new()
    take(model, update, range(2))
    model[0].requires_grad_(True)
    update.optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.01})
    take(model, update, range(2, 4))
    assert [group["lr"] for group in update.optimizer.param_groups] == pytest.approx([0.1, 0.01])
    resumed.load_state_dict(HostBuffers().copy(update.state_dict()))
    again.load_state_dict(model.state_dict())
    again[0].requires_grad_(True)
    take(model, update, range(4, 6))
    take(again, resumed, range(4, 6))
    assert_equal(model, again)


def test_a_group_of_parameters_that_are_not_the_models_is_refused_by_name() -> None:
    model = model_of()
    update = update_of(model)
    update.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7, 5))]})
    with pytest.raises(TaskError, match=r"\(7, 5\) in group 1") as error:
        take(model, update, range(1))
    assert "Task.modules()" in str(error.value)


class Estimating(torch.optim.Optimizer):
    """In the manner of Prodigy: the step size is estimated, and kept in the groups beside the settings."""

    def __init__(self, parameters: Any, lr: float = 1.0, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "d": 1e-3, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    group["d"] += 0.01 * float(parameter.grad.norm())
                    parameter.mul_(1 - group["weight_decay"])
                    parameter.sub_(parameter.grad, alpha=group["lr"] * group["d"])


def test_what_an_optimizer_estimates_in_its_groups_is_restored_and_changed_settings_win() -> None:
    def new(lr: float, weight_decay: float) -> tuple[nn.Module, Update]:
        model = model_of()
        return model, update_of(model, Estimating(model.parameters(), lr, weight_decay), lr)

    model, update = new(1.0, 0.0)
    take(model, update, range(3))
    update.optimizer.param_groups[0]["weight_decay"] = 0.5  # as a hook may
    state = HostBuffers().copy(update.state_dict())
    (same, resumed), (other, changed) = new(1.0, 0.0), new(0.5, 0.25)
    for one, its in ((same, resumed), (other, changed)):
        one.load_state_dict(model.state_dict())
        its.load_state_dict(HostBuffers().copy(state))
    kept, given = resumed.optimizer.param_groups[0], changed.optimizer.param_groups[0]
    assert (kept["d"], kept["k"], kept["weight_decay"]) == (update.optimizer.param_groups[0]["d"], 3, 0.5)
    assert (given["d"], given["k"], given["weight_decay"]) == (kept["d"], 3, 0.25)
    take(model, update, range(3, 5))
    take(same, resumed, range(3, 5))
    assert_equal(model, same)
    take(other, changed, range(3, 4))
    assert given["lr"] == 0.5
