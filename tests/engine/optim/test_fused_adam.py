"""The direct call of the fused kernels must be what ``optimizer.step()`` is, bit for bit."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep._compat.torch import compiler_not_imported
from lockstep.engine.optim.fused_adam import AdamKernel


def model_and_optimizer(kind: type[Optimizer], **settings: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "weight_decay": 0.3}]
    return model, kind(groups, **{"lr": 0.01, "fused": True, **settings})  # type: ignore[call-arg]


def give(model: nn.Module, seed: int, *, leave_out: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    if leave_out:
        next(model.parameters()).grad = None


def content(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    moments = [value for key in sorted(state) for _, value in sorted(state[key].items())]
    return [*(p.detach() for p in model.parameters()), *moments]


def assert_same(ours: tuple[nn.Module, Optimizer], torchs: tuple[nn.Module, Optimizer]) -> None:
    for one, other in zip(content(*ours), content(*torchs), strict=True):
        assert torch.equal(one, other)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([Adam, AdamW, SGD]),
    amsgrad=st.booleans(),
    steps=st.lists(st.tuples(st.floats(1e-5, 1.0), st.booleans(), st.booleans()), min_size=1, max_size=4),
)
def test_any_steps_leave_what_torch_leaves(
    kind: type[Optimizer], amsgrad: bool, steps: list[tuple[float, bool, bool]]
) -> None:
    special: dict[str, Any] = {} if kind is SGD else {"amsgrad": amsgrad, "weight_decay": 0.1}
    ours, torchs = model_and_optimizer(kind, **special), model_and_optimizer(kind, **special)
    step = AdamKernel(ours[1])
    for number, (lr, leave_out, reload) in enumerate(steps):
        for model, optimizer in (ours, torchs):
            give(model, number, leave_out=leave_out)
            optimizer.param_groups[0]["lr"] = lr
            if reload and number:
                optimizer.load_state_dict(optimizer.state_dict())
        step()
        torchs[1].step()
        assert_same(ours, torchs)


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_step_that_is_left_out_on_the_device_counts_for_nothing(kind: type[Optimizer], found: float) -> None:
    ours, torchs = model_and_optimizer(kind), model_and_optimizer(kind)
    step = AdamKernel(ours[1])
    for number, found_inf in enumerate((torch.tensor(0.0), torch.tensor(found), torch.tensor(0.0))):
        give(ours[0], number)
        give(torchs[0], number)
        step(found_inf)
        torchs[1].found_inf, torchs[1].grad_scale = found_inf, None  # type: ignore[attr-defined]
        torchs[1].step()
    assert_same(ours, torchs)


def test_hooks_of_the_optimizer_are_heard() -> None:
    model, optimizer = model_and_optimizer(AdamW)
    step, heard = AdamKernel(optimizer), []
    give(model, 0)
    step()
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    step()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step()
    assert heard == ["after", "after"]


def test_a_group_that_is_added_later_is_trained() -> None:
    model, optimizer = model_and_optimizer(AdamW)
    step = AdamKernel(optimizer)
    give(model, 0)
    step()
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(2)
    step()
    assert (late < 1).all()


def clear(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def forget_one(model: nn.Module, optimizer: Optimizer) -> None:
    del optimizer.state[next(model.parameters())]


def empty_one(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[next(model.parameters())].clear()


def replace_moments(model: nn.Module, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def thaw(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def freeze(model: nn.Module, optimizer: Optimizer) -> None:
    next(model.parameters()).requires_grad_(False)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_what_a_hook_changes_between_steps_takes_effect(kind: type[Optimizer]) -> None:
    ours, torchs = model_and_optimizer(kind), model_and_optimizer(kind)
    step = AdamKernel(ours[1])
    changes = (freeze, clear, thaw, forget_one, freeze, thaw, empty_one, replace_moments)
    for number, change in enumerate(changes):
        for model, optimizer in (ours, torchs):
            change(model, optimizer)
            for again in (0, 1):
                give(model, 2 * number + again)
                for parameter in model.parameters():
                    parameter.grad = parameter.grad if parameter.requires_grad else None
                (step if optimizer is ours[1] else optimizer.step)()
        assert_same(ours, torchs)


def run(script: str, folder: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=240, check=True
    ).stdout


@pytest.mark.slow
def test_the_compiler_is_imported_neither_for_optimizers_and_their_steps_nor_for_determinism(tmp_path: Path) -> None:
    script = """
import sys, torch
from lockstep._compat.torch import compiler_not_imported, use_deterministic_algorithms
from lockstep.engine.optim.fused_adam import AdamKernel
from torch.optim import SGD, AdamW, Optimizer
def methods():
    return [(name, vars(getattr(value, "__wrapped__", value)).copy()) for name, value in vars(Optimizer).items()
            if callable(value)]
before = methods()
weight = torch.nn.Parameter(torch.ones(2))
with compiler_not_imported():
    optimizer = AdamW([weight])
    optimizer.load_state_dict(optimizer.state_dict())
    plain = SGD([weight], lr=0.5)
weight.grad = torch.ones(2)
AdamKernel(plain)()
assert weight.tolist() == [0.5, 0.5]
use_deterministic_algorithms(True)
print({"torch._dynamo", "torch._inductor"} & sys.modules.keys(), methods() == before,
      torch.are_deterministic_algorithms_enabled())
"""
    assert run(script, tmp_path).split() == ["set()", "True", "True"]  # and afterwards torch is as it was


def test_inside_a_process_that_compiles_nothing_is_touched() -> None:
    importlib.import_module("torch._dynamo")  # as torch.compile does
    method = vars(Optimizer)["add_param_group"].__wrapped__
    before = dict(vars(method))
    with compiler_not_imported():
        assert vars(method) == before
