"""What a checkpoint keeps of an optimizer's groups, and how it fits an optimizer that was made in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import TaskError
from lockstep.rundir.folder import RunDir
from tests.attempts import attempt
from tests.toys import Toy

CONSTANT: dict[str, Any] = {
    "training": {"epochs": 1, "batch_size": 20, "early_stopping_patience": 0},
    "scheduler": {"name": "constant", "warmup_epochs": 0},
}


def interrupted(task: type[Toy], folder: Path, step: int, **sections: Any) -> dict[str, Tensor]:
    """The weights of a run that was stopped at ``step`` and resumed, with changed ``sections``."""
    training = CONSTANT["training"]
    attempt(task, folder, **{**CONSTANT, "training": {**training, "max_steps": step}})
    sections = {**sections, "training": {**training, "max_steps": None}}
    return attempt(task, folder, resume=True, **{**CONSTANT, **sections})[0]


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


class Growing(Toy):
    """Trains its last layer; a hook adds the first one as a group after two steps."""

    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule("0").requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.made = torch.optim.AdamW(model.get_submodule("4").parameters(), lr=0.1)
        return self.made

    def hooks(self) -> Any:
        def grow(result: Any, model: nn.Module) -> None:
            if result.step == 2:
                self.unfreeze(model)
                self.made.add_param_group({"params": [*model.get_submodule("0").parameters()], "lr": 0.01})

        return [(grow, 1)]

    def unfreeze(self, model: nn.Module) -> None:
        model.get_submodule("0").requires_grad_(True)


class Grown(Growing):
    """Resumes with the first layer trained, which the hook of the attempt before has done."""

    def model(self) -> nn.Module:
        model = super().model()
        self.unfreeze(model)
        return model


def test_a_group_that_a_hook_adds_follows_the_schedule_and_is_restored(tmp_path: Path) -> None:
    whole, _ = attempt(Growing, tmp_path / "whole", **CONSTANT)
    training = CONSTANT["training"]
    attempt(Growing, tmp_path / "parts", **{**CONSTANT, "training": {**training, "max_steps": 4}})
    last = {**CONSTANT, "training": {**training, "max_steps": None}}
    parts, _ = attempt(Grown, tmp_path / "parts", resume=True, **last)
    assert_equal(parts, whole)
    store = CheckpointStore(RunDir(tmp_path / "whole").checkpoints)
    groups = store.load(store.steps()[-1]).trainer["update"]["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.01])
    start = lockstep.Run(tmp_path / "parts").load_model("last", task=Growing).state_dict()
    assert torch.equal(start["0.weight"], whole["0.weight"])


class Foreign(Toy):
    """A hook adds a parameter that is none of the model's."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.made = torch.optim.SGD(model.parameters(), lr=0.1)
        return self.made

    def hooks(self) -> Any:
        def add(result: Any, model: nn.Module) -> None:
            if result.step == 1:
                self.made.add_param_group({"params": [nn.Parameter(torch.ones(7, 5))]})

        return [(add, 1)]


def test_a_group_of_parameters_that_are_not_the_models_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"\(7, 5\) .*\b1\b") as error:
        attempt(Foreign, tmp_path / "run", **CONSTANT)
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


class Prodigy(Toy):
    """A hook changes the decay after three steps; the groups after each step are in ``groups``."""

    lr, weight_decay = 1.0, 0.0
    groups: list[dict[str, Any]]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.made = Estimating(model.parameters(), self.lr, self.weight_decay)
        type(self).groups = []
        return self.made

    def hooks(self) -> Any:
        def look(result: Any, model: nn.Module) -> None:
            [group] = self.made.param_groups
            self.groups.append({key: value for key, value in group.items() if key != "params"})
            if result.step == 3:
                group["weight_decay"] = 0.125

        return [(look, 1)]


class Changed(Prodigy):
    lr, weight_decay = 0.5, 0.25


def test_what_an_optimizer_estimates_in_its_groups_is_restored_and_changed_settings_win(tmp_path: Path) -> None:
    whole, _ = attempt(Prodigy, tmp_path / "whole", **CONSTANT)
    expected = Prodigy.groups
    assert_equal(interrupted(Prodigy, tmp_path / "same", 3), whole)
    assert Prodigy.groups == expected[3:]
    training = CONSTANT["training"]
    attempt(Prodigy, tmp_path / "changed", **{**CONSTANT, "training": {**training, "max_steps": 3}})
    last = {**CONSTANT, "training": {**training, "max_steps": 4}}
    attempt(Changed, tmp_path / "changed", resume=True, **last)
    [group] = Changed.groups
    assert (group["k"], group["lr"], group["weight_decay"]) == (4, 0.5, 0.25)
    assert group["d"] == expected[3]["d"]
