"""Finishing a step: denominator, finiteness, clipping, on the host's path and on the device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint.writer import HostBuffers
from lockstep.config import OptimizerConfig
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision
from lockstep.engine.optim.step import Update
from lockstep.engine.resume import load_weights
from lockstep.engine.session.stepper import SharedPrecision
from lockstep.planning import Schedule
from tests.updates import update_for_model

CPU = torch.device("cpu")


def update_of(
    name: str = "sgd", max_norm: float | None = None, *, on_host: bool = True, weight_decay: float = 0.0
) -> tuple[nn.Module, Update]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    update = update_for(model, name, max_norm, weight_decay)
    update._on_host = on_host
    return model, update


def update_for(model: nn.Module, name: str, max_norm: float | None = None, weight_decay: float = 0.0) -> Update:
    config = OptimizerConfig(name=name, lr=0.1, weight_decay=weight_decay)
    schedule = Schedule(name="constant", lr=0.1, total_steps=10, steps_per_epoch=10)
    return update_for_model(model, build_optimizer(config, model, 0.1), schedule, Precision("32", CPU, 0.125), max_norm)


def give(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


paths = pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
norms = pytest.mark.parametrize("max_norm", [None, 1.0])


@paths
@norms
@pytest.mark.parametrize(("gradient", "count"), [(0.0, 0), (float("nan"), 4), (float("inf"), 4)])
def test_a_step_without_a_finite_gradient_leaves_the_weights(
    on_host: bool, max_norm: float | None, gradient: float, count: int
) -> None:
    model, update = update_of("adamw", max_norm, on_host=on_host)
    before = [p.detach().clone() for p in model.parameters()]
    give(model, gradient)
    update.apply(0, count, 1.0, want_norm=False)
    assert update.skipped == (1 if count else 0), "a step without items has nothing that could be finite"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@paths
@norms
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_step_without_items_leaves_the_loss_scale_and_reports_no_nan(
    on_host: bool, max_norm: float | None, kind: Any
) -> None:
    model = nn.Linear(3, 1)
    precision = Precision("16-mixed", CPU, 0.125)
    schedule = Schedule(name="constant", lr=0.1, total_steps=10, steps_per_epoch=10)
    update = update_for_model(model, torch.optim.SGD(model.parameters(), 0.1), schedule, precision, max_norm)
    update._on_host = on_host
    give(model, 0.125)
    update.apply(0, kind(2.0), 1.0, want_norm=True)
    before = precision.state_dict()
    give(model, 0.0)
    update.apply(1, kind(0.0), 1.0, want_norm=True)
    assert precision.state_dict() == before == {"scale": 2.0**16, "good_steps": 1}
    assert float(update.grad_norm or 0.0) == 0.0


@paths
@norms
def test_sparse_and_complex_gradients_are_those_of_a_plain_loop(on_host: bool, max_norm: float | None) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(5, 3, sparse=True)
            self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return (self.table(index) * self.phase).abs().square().sum()  # type: ignore[no-any-return]

    ours, plain = Mixed(), Mixed()
    config = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.0, momentum=0.9)
    schedule = Schedule(name="constant", lr=0.1, total_steps=10, steps_per_epoch=10)
    update = update_for_model(ours, build_optimizer(config, ours, 0.1), schedule, Precision("32", CPU, 0.125), max_norm)
    update._on_host = on_host
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    index = torch.tensor([1, 3, 3])
    for step in range(3):
        for model in (ours, plain):
            model.zero_grad()
        (ours(index) * 0.125).backward()
        update.apply(step, 3, 1.0, want_norm=False)
        (plain(index) / 3).backward()
        if max_norm is not None:
            plain.table.weight.grad = plain.table.weight.grad.coalesce()  # type: ignore[union-attr]
            norm = sum(g.abs().square().sum() for g in (plain.table.weight.grad.values(), plain.phase.grad)) ** 0.5
            for parameter in plain.parameters():
                parameter.grad = parameter.grad * min(1.0, max_norm / (float(norm) + 1e-6))
        optimizer.step()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@paths
def test_the_gradient_is_the_sum_over_the_count(on_host: bool) -> None:
    model, update = update_of(on_host=on_host)
    before = model.weight.detach().clone()
    give(model, 0.125 * 6.0)  # a sum of 6, times the pre-scale
    update.apply(0, 3, 1.0, want_norm=False)
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * 2.0)


@paths
def test_clipping_sees_the_true_norm_after_the_count(on_host: bool) -> None:
    model, update = update_of(max_norm=1.0, on_host=on_host)
    before = model.weight.detach().clone()
    give(model, 0.125 * 6.0)
    update.apply(0, 3, 1.0, want_norm=False)
    assert float(update.grad_norm or 0) == pytest.approx(4.0)  # four parameters of gradient 2
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * 0.5, rtol=1e-5, atol=1e-6)


@paths
def test_momentum_is_sound_after_a_skipped_first_step(on_host: bool) -> None:
    model, update = update_of(on_host=on_host)
    give(model, float("nan"))
    update.apply(0, 1, 1.0, want_norm=False)
    before = model.weight.detach().clone()
    give(model, 0.125)
    update.apply(1, 1, 1.0, want_norm=False)
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_a_resume_takes_moments_from_the_checkpoint_and_settings_from_the_configuration() -> None:
    model, update = update_of("adamw")
    give(model, 0.125)
    update.apply(0, 1, 1.0, want_norm=False)
    state = update.state_dict()
    _, fresh = update_of("adamw", weight_decay=0.5)
    fresh.load_state_dict(state)
    assert fresh.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert all("exp_avg" in moments for moments in fresh.optimizer.state.values())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_resume_goes_on_bit_for_bit_with_weights_that_are_not_row_major(name: str) -> None:
    """A checkpoint holds values row by row; the fused kernels walk weights and moments through memory side by side."""

    def channels_last() -> tuple[nn.Module, Update]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, update_for(model, name)

    def take_steps(model: nn.Module, update: Update, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))
            update.apply(step, 1, 1.0, want_norm=False)

    (model, update), (again, resumed) = channels_last(), channels_last()
    take_steps(model, update, range(3))
    weights, state = HostBuffers().copy(model.state_dict()), HostBuffers().copy(update.state_dict())
    take_steps(model, update, range(3, 6))
    load_weights(again, weights, "a checkpoint")
    resumed.load_state_dict(state)
    take_steps(again, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_rate_that_is_told_is_that_of_a_group_that_has_one() -> None:
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight], "lr": 0.0}, {"params": [model.bias], "lr": 0.1}]
    schedule = Schedule(name="constant", lr=0.1, total_steps=4, steps_per_epoch=1)
    update = update_for_model(model, torch.optim.SGD(groups), schedule, Precision("32", CPU, 0.125), None)
    assert (update.rates.lr, update.optimizer.param_groups[0]["lr"]) == (pytest.approx(0.1), 0.0)


def test_the_rates_of_all_groups_follow_the_schedule_and_its_scale_also_after_a_resume() -> None:
    schedule = Schedule(name="step", lr=0.2, scale=2.0, gamma=0.5, step_epochs=1, total_steps=4, steps_per_epoch=1)

    def two_groups() -> Update:
        model = nn.Linear(3, 1)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.01}]
        give(model, 0.125)
        return update_for_model(model, torch.optim.SGD(groups, lr=9.0), schedule, Precision("32", CPU, 0.125), None)

    def take(update: Update, step: int) -> list[float]:
        update.apply(step, 1, 1.0, want_norm=False)
        assert update.rates.lr == update.optimizer.param_groups[0]["lr"], "what is told is what runs"
        return [group["lr"] for group in update.optimizer.param_groups]

    update, resumed = two_groups(), two_groups()
    assert take(update, 0) == pytest.approx([0.2, 0.02])
    resumed.load_state_dict(update.state_dict())
    for one in (update, resumed):
        assert take(one, 1) == pytest.approx([0.1, 0.01])


def test_plateau_lowers_the_rate_of_its_schedule_and_resumes() -> None:
    def made() -> Update:
        model = nn.Linear(3, 1)
        plateau = Schedule(
            name="plateau", lr=0.1, total_steps=100, steps_per_epoch=10, warmup_steps=2, gamma=0.5, patience=1
        )
        optimizer = build_optimizer(OptimizerConfig(), model, 0.1)
        return update_for_model(model, optimizer, plateau, Precision("32", CPU, 0.125), None, mode="max")

    def rates(update: Update, values: list[float]) -> list[float]:
        found = []
        for value in values:
            update.rates.advance("metric", value)
            update.rates.set(50)
            found.append(update.rates.lr)
        return found

    update = made()
    update.rates.set(0)
    assert update.rates.lr == pytest.approx(0.05)  # warm-up
    assert rates(update, [0.5, 0.6, 0.6]) == pytest.approx([0.1] * 3)
    resumed = made()
    resumed.load_state_dict(update.state_dict())
    assert rates(resumed, [0.6, 0.6, 0.6, 0.7]) == rates(update, [0.6, 0.6, 0.6, 0.7])
    assert update.rates.lr == pytest.approx(0.025)


@pytest.mark.parametrize(("name", "value"), [("betas", (0.9,)), ("eps", None), ("fused", "x"), ("initial_lr", "x")])
def test_settings_of_another_kind_in_a_checkpoint_are_refused(name: str, value: Any) -> None:
    model = nn.Linear(3, 1)
    schedule = Schedule(name="constant", lr=0.1, total_steps=10, steps_per_epoch=10)
    update = update_for_model(
        model, torch.optim.AdamW(model.parameters(), 0.1), schedule, Precision("32", CPU, 1.0), None
    )
    give(model, 1.0)
    update.apply(0, 1.0, 1.0, want_norm=False)
    state = update.state_dict()
    update.load_state_dict(state)
    (group,) = state["optimizer"]["param_groups"]
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        update.load_state_dict({**state, "optimizer": {**state["optimizer"], "param_groups": [{**group, name: value}]}})


@paths
def test_a_norm_that_is_only_logged_skips_no_step(on_host: bool) -> None:
    """Gradients are finite, and their norm is not."""
    results = []
    for want_norm in (False, True):
        model = nn.Linear(3, 1)
        update = update_for_model(
            *(model, torch.optim.SGD(model.parameters(), lr=1e-30), None, Precision("32", CPU, 1.0)),
            max_norm=None,
        )
        update._on_host = on_host
        for parameter in model.parameters():
            parameter.data.zero_()
            parameter.grad = torch.full_like(parameter, 3e38)
        update.apply(0, 1, 1.0, want_norm=want_norm)
        results.append((update.skipped, model.weight.detach().clone()))
    assert results[0][0] == results[1][0] == 0 and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("found", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_an_overflow_of_any_optimizer_halves_the_scale_once_after_the_window(found: tuple[float, float]) -> None:
    precision = SharedPrecision("16-mixed", CPU, 1.0)
    before = precision.seed_value()
    for value in found:
        precision.update(torch.tensor([value]))
        assert precision.seed_value() == before, "the window's other backward passes have the same scale"
    precision.settle()
    assert precision.seed_value() == before / 2
