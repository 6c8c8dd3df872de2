"""Averaged weights: against torch's AveragedModel, over a resume, and on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import lockstep
from lockstep import Loss
from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import UnsupportedError
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.toys import CLASSES, FEATURES, Toy

EMA = {"name": "ema", "decay": 0.9, "warmup": False}
SWA = {"name": "swa", "start_share": 0.5}
RUN: dict[str, Any] = {
    "training": {"epochs": 2, "global_batch_size": 16, "early_stopping_patience": 0},
    "scheduler": {"name": "constant", "warmup_epochs": 0},
    "checkpoint": {"keep_last": 9},
}


class Watched(Toy):
    """Averages its weights with torch, too."""

    reference: AveragedModel
    start, function = 0, staticmethod(get_ema_multi_avg_fn(0.9))

    def model(self) -> nn.Module:
        model = super().model()
        type(self).reference = AveragedModel(model, multi_avg_fn=self.function, use_buffers=True)
        if not self.start:
            type(self).reference.update_parameters(model)
        return model

    def hooks(self) -> Any:
        def average(step: Any, model: nn.Module) -> None:
            if step.step > self.start:
                self.reference.update_parameters(model)

        return [(average, 1)]


class WatchedSwa(Watched):
    function = staticmethod(get_swa_multi_avg_fn())


@pytest.mark.parametrize(("task", "averaging"), [(Watched, EMA), (WatchedSwa, SWA)], ids=["ema", "swa"])
def test_the_averages_are_those_of_torch_and_survive_a_resume(
    tmp_path: Path, task: type[Watched], averaging: dict[str, Any]
) -> None:
    if averaging is SWA:
        task.start = lockstep.plan(task, RUN).total_steps // 2
    saved, _ = attempt(task, tmp_path / "whole", averaging=averaging, **RUN)
    expected = dict(task.reference.module.state_dict())
    torch.testing.assert_close(saved, expected)
    plain, _ = attempt(Toy, tmp_path / "plain", **RUN)
    assert any(not torch.equal(saved[name], value) for name, value in plain.items())
    if averaging is EMA:  # the start of SWA follows from the length of the run
        short = {**RUN, "training": {**RUN["training"], "max_steps": 7}}
        attempt(Toy, tmp_path / "parts", averaging=EMA, **short)
        long = {**RUN, "training": {**RUN["training"], "max_steps": None}}
        resumed, _ = attempt(Toy, tmp_path / "parts", resume=True, averaging=EMA, **long)
        assert all(torch.equal(resumed[name], value) for name, value in saved.items())


class Double(Toy):
    """In float64; keeps the weights after each step."""

    weights: ClassVar[list[Tensor]] = []

    def model(self) -> nn.Module:
        return super().model().double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, (batch[0].double(), batch[1]))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return super().evaluate(model, (batch[0].double(), batch[1]))

    def hooks(self) -> Any:
        return [(lambda _, model: self.weights.append(model[0].weight.detach().clone()), 1)]


def test_the_mean_of_a_float64_model_has_its_precision(tmp_path: Path) -> None:
    Double.weights.clear()
    saved, _ = attempt(Double, tmp_path / "run", averaging=SWA, **RUN)
    mean = torch.stack(Double.weights[len(Double.weights) // 2 :]).mean(0)
    torch.testing.assert_close(saved["0.weight"], mean, rtol=1e-13, atol=1e-13)


class ScheduleFree(torch.optim.SGD):
    """As the package of that name: trains a point between the mean and the newest weights, and evaluates the mean."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.param_groups[0] |= {"train_mode": False, "k": 0}

    def _between(self, train: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != train else ():
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = train

    def train(self) -> None:
        self._between(True, 0.1)

    def eval(self) -> None:
        self._between(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        assert group["train_mode"]
        group["k"] += 1
        for p in group["params"]:
            z = self.state[p].setdefault("z", p.clone())
            p.lerp_(z, 1 - 1 / 0.9)
            z.sub_(p.grad, alpha=group["lr"])
            p.lerp_(z, 1 / group["k"]).lerp_(z, 0.1)


class Free(Toy):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return ScheduleFree(model.parameters())


def test_a_schedule_free_optimizer_is_evaluated_and_saved_with_its_averages(tmp_path: Path) -> None:
    saved, _ = attempt(Free, tmp_path / "whole", **RUN)
    often, _ = attempt(Free, tmp_path / "often", **{**RUN, "validation": {"every_steps": 1}})
    assert all(torch.equal(often[name], value) for name, value in saved.items())  # evaluating changes no weight
    store = CheckpointStore(tmp_path / "whole" / "checkpoints")
    trained = store.load(store.steps()[-1]).trainer["update"]["averages"]["trained"]
    assert trained and any(not torch.equal(saved[name], value) for name, value in trained.items())
    short = {**RUN, "training": {**RUN["training"], "max_steps": 7}}
    attempt(Free, tmp_path / "parts", **short)
    resumed, _ = attempt(
        Free, tmp_path / "parts", resume=True, **{**RUN, "training": {**RUN["training"], "max_steps": None}}
    )
    assert all(torch.equal(resumed[name], value) for name, value in saved.items())


class Layers(nn.Module):
    """Makes its buffer again in each step, and counts the calls of ``state_dict``."""

    buffer_reduction: ClassVar[dict[str, str]] = {"seen": "local"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        self.first.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2))
        self.asked = 0
        self.register_state_dict_pre_hook(lambda *_: setattr(self, "asked", self.asked + 1))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return self.last(self.first(inputs))  # type: ignore[no-any-return]


class Unfreezing(Watched):
    """The first layer is trained from the fourth step on, and its average begins then."""

    layers: Layers

    def model(self) -> nn.Module:
        type(self).layers = Layers()
        type(self).reference = AveragedModel(self.layers, multi_avg_fn=self.function, use_buffers=True)
        self.reference.update_parameters(self.layers)
        return self.layers

    def hooks(self) -> Any:
        def average(step: Any, model: Any) -> None:
            if step.step == 4:
                self.reference.module.first.load_state_dict(model.first.state_dict())
            self.reference.update_parameters(model)
            model.first.requires_grad_(step.step >= 3)

        return [(average, 1)]


def test_replaced_buffers_and_parameters_unfrozen_later_are_averaged_without_a_state_dict_per_step(
    tmp_path: Path,
) -> None:
    asked = []
    for steps in (6, 12):
        short = {**RUN, "training": {**RUN["training"], "max_steps": steps}}
        saved, _ = attempt(Unfreezing, tmp_path / str(steps), averaging=EMA, **short)
        torch.testing.assert_close(saved, dict(Unfreezing.reference.module.state_dict()))
        asked.append(Unfreezing.layers.asked)
    assert asked[0] == asked[1]


class Mask(nn.Module):
    """Has infinite values in a buffer and a parameter, as attention masks have."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.0]))
        self.bias = nn.Parameter(torch.tensor([float("inf"), 1.0, 2.0]))

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.mask.clamp(min=-0.5) + self.bias.clamp(max=3.0)


class Masked(Toy):
    def model(self) -> nn.Module:
        layers = nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3), Mask()
        return nn.Sequential(*layers)


def masked(rank: int, size: int, folder: Path) -> list[dict[str, Tensor]]:
    return [
        attempt(Masked, folder / name, rank, size, averaging=averaging, hardware={"strategy": strategy}, **RUN)[0]
        for name, averaging, strategy in (("ema", EMA, "fsdp"), ("swa", SWA, "fsdp"), ("ddp", EMA, "ddp"))
    ]


@pytest.mark.slow
def test_infinite_values_stay_and_statistics_are_averaged_on_divided_models(tmp_path: Path) -> None:
    (ema, swa, ddp), _ = run_ranks(masked, 2, tmp_path)
    for averaging, results in ((EMA, (ema, ddp)), (SWA, (swa,))):
        alone, _ = attempt(Masked, tmp_path / "alone" / str(averaging["name"]), averaging=averaging, **RUN)
        assert alone["4.mask"].tolist() == [0.0, float("-inf"), 0.0]
        assert alone["4.bias"][0] == float("inf") and torch.isfinite(alone["4.bias"][1:]).all()
        for saved in results:
            torch.testing.assert_close(saved, alone, rtol=1e-4, atol=1e-5)


def on_ranks(rank: int, size: int, folder: Path) -> list[dict[str, Tensor]]:
    exact = {**RUN, "training": {**RUN["training"], "reproducibility": "exact"}}
    sharded: dict[str, Any] = {"averaging": EMA, "hardware": {"strategy": "fsdp"}}
    return [
        attempt(Toy, folder / "exact", rank, size, averaging=EMA, **exact)[0],
        attempt(Toy, folder / "fsdp", rank, size, **sharded, **RUN)[0],
        attempt(Toy, folder / "fsdp", rank, size, resume=True, **sharded, **longer())[0],
    ]


def longer() -> dict[str, Any]:
    return {**RUN, "training": {**RUN["training"], "epochs": 3}}


@pytest.mark.slow
def test_two_ranks_have_the_averages_of_one(tmp_path: Path) -> None:
    (exact, sharded, resumed), _ = run_ranks(on_ranks, 2, tmp_path)
    settings = {**RUN, "training": {**RUN["training"], "reproducibility": "exact"}}
    alone, _ = attempt(Toy, tmp_path / "alone", averaging=EMA, **settings)
    assert all(torch.equal(exact[name], value) for name, value in alone.items())
    torch.testing.assert_close(sharded, attempt(Toy, tmp_path / "fast", averaging=EMA, **RUN)[0], rtol=1e-5, atol=1e-6)
    whole, _ = attempt(Toy, tmp_path / "longer", averaging=EMA, **longer())
    torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-6)


def test_a_pipeline_refuses_them() -> None:
    hardware = {"strategy": "pipeline", "selected_devices": ["cpu", "cpu"]}
    with pytest.raises(UnsupportedError, match=r"=ema\b.*\bpipeline\b"):
        lockstep.plan("autoencoder", {"averaging": EMA, "hardware": hardware})


def test_the_plan_says_what_is_averaged() -> None:
    decision = lockstep.plan(Toy, {"averaging": SWA, **RUN}).decisions["averaging"]
    assert decision.value == "swa" and decision.reason
