"""``lockstep.fit``: a task from its parts."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lockstep
from lockstep.errors import RunFolderError, TaskError
from tests.toys import arrays


def dataset(samples: int, seed: int) -> TensorDataset:
    return TensorDataset(*arrays(samples, seed))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(12, 3)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.slow
def test_parts_train_alike_on_one_and_two_ranks_and_resume_with_the_same_objects(tmp_path: Path) -> None:
    runs = {}
    for devices in ("cpu", "cpu,cpu"):
        model = net()
        run = lockstep.fit(
            model=model,
            loss=lambda output, target: F.cross_entropy(output, target),
            train=dataset(90, 1),
            val=dataset(30, 2),
            metrics={"accuracy": MulticlassAccuracy(3)},
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            devices=devices,
            epochs=2,
            global_batch_size=16,
            save_dir=tmp_path / devices,
        )
        assert {"val_loss", "val_accuracy"} <= run.metrics.keys()
        assert torch.equal(weights(run.load_model("last")), weights(model)), "the module has the trained weights"
        assert not torch.equal(weights(net()), weights(model))
        assert run.evaluate(split="val")["val_loss"] == pytest.approx(run.metrics["val_loss"])
        runs[devices] = model, run
    torch.testing.assert_close(weights(runs["cpu"][0]), weights(runs["cpu,cpu"][0]))

    _, run = runs["cpu,cpu"]
    assert len(run.resume(devices="cpu", epochs=3).history) == 3
    with pytest.raises(RunFolderError, match=r"\blockstep\.fit\b") as caught:
        lockstep.Run(run.run_dir).resume(epochs=4)
    assert "resume=True" in caught.value.fix


class Weighted(nn.Module):
    """A loss with a parameter and the other signature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"]) * self.scale, batch["y"], reduction="none").flatten()


class Records:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((2,), index / 40), "y": torch.full((1,), index / 20)}


def test_a_loss_of_model_and_batch_and_its_parameters(tmp_path: Path) -> None:
    loss = Weighted()
    parts: dict[str, Any] = {"model": lambda: nn.Linear(2, 1), "loss": loss, "train": Records(), "lr": 0.05}
    run = lockstep.fit(**parts, devices="cpu", epochs=3, save_dir=tmp_path / "run")
    losses = [row["train_loss"] for row in run.history]
    assert losses[-1] < losses[0]
    assert loss.scale != 1.0
    again = lockstep.fit(**parts, devices="cpu", epochs=4, save_dir=tmp_path / "run", resume=True)
    assert len(again.history) == 4


@pytest.mark.slow
def test_each_form_of_a_loss_trains_the_same(tmp_path: Path) -> None:
    losses = [
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        lambda output, target: lockstep.Loss(F.cross_entropy(output, target, reduction="sum"), len(target)),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda model, batch: lockstep.Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])),
    ]
    common: dict[str, Any] = {"train": dataset(40, 1), "devices": "cpu", "epochs": 1, "batch_size": 16}
    models = [net() for _ in losses]
    for number, (model, loss) in enumerate(zip(models, losses, strict=True)):
        lockstep.fit(model=model, loss=loss, save_dir=tmp_path / str(number), **common)
    for model, loss in zip(models, losses, strict=True):
        assert torch.allclose(weights(model), weights(models[0]), rtol=1.3e-6, atol=1e-5), loss


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": DataLoader(dataset(8, 1))}, r"DataLoader.*\n.*\n.*train=loader\.dataset"),
        ({"loss": lambda output, target: output}, "tensor"),
        ({"loss": lambda output, target: 1.0}, r"\bfloat\b"),
        (
            {"loss": lambda o, t: (F.cross_entropy(o, t), (o.argmax(1) == t).float().mean())},
            r"\btuple\b",
        ),
        ({"train": Records()}, r"\bdict\b"),
        ({"model": prune.l1_unstructured(net(), "weight", 0.5)}, r"\bmodel=lambda\b"),
        ({"optimizer": torch.optim.SGD(net().parameters(), lr=0.1)}, r"\bSGD\(parameters\b"),
        ({"metrics": [MulticlassAccuracy(3)]}, r"\ba list\b"),
        ({"metrics": "accuracy"}, r"\ba str\b"),
    ],
)
def test_a_wrong_part_is_one_error(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    parts: dict[str, Any] = {"model": net(), "loss": F.cross_entropy, "train": dataset(40, 1)}
    with pytest.raises(TaskError, match=words):
        lockstep.fit(**{**parts, **change}, devices="cpu", save_dir=tmp_path / "run")


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0])
LENGTHS = torch.tensor([4, 2, 3])


def partly_ignored(samples: int, seed: int) -> TensorDataset:
    inputs, labels = arrays(samples, seed)
    labels[torch.arange(samples) % 3 == 0] = -100
    return TensorDataset(inputs, labels)


def several_targets(samples: int, seed: int) -> TensorDataset:
    inputs, labels = arrays(samples, seed)
    labels = torch.stack([labels, torch.where(inputs[:, 0] > 0, labels, -100)], 1)
    return TensorDataset(inputs, labels)


def rare(samples: int, seed: int) -> TensorDataset:
    inputs, labels = arrays(samples, seed)
    return TensorDataset(inputs, labels.where(torch.arange(samples) < 3, 0))


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    mask = target == 1
    return (output.square().mean(1) * mask).sum() / mask.sum()


def loss_of_each(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def dice(probability: Tensor, is_positive: Tensor) -> Tensor:
    return 1 - 2 * (probability * is_positive).sum() / (probability.sum() + is_positive.sum())


class SumOfFewPositives:
    """A sum, unless a batch has more positive targets than the first one."""

    most: Tensor | None = None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        positives = (target == 1).sum()
        self.most = positives if self.most is None else self.most
        return loss_of_each(output, target).sum() / (positives - self.most).clamp(min=1)


#: Data, and a loss that is a mean over something else than rows, or not the mean that it looks like.
MEANS: dict[str, tuple[Any, Any]] = {
    "class weights": (dataset, nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)),
    "weights and smoothing": (partly_ignored, nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1)),
    "ignored targets": (partly_ignored, F.cross_entropy),
    "several targets": (several_targets, lambda o, t: F.cross_entropy(o[:, :, None].expand(-1, -1, 2), t)),
    "nll": (partly_ignored, lambda o, t: F.nll_loss(o.log_softmax(1), t, weight=CLASS_WEIGHTS)),
    "batchmean": (
        dataset,
        lambda o, t: F.kl_div(o.log_softmax(1), F.one_hot(t, 3) * 0.8 + 0.1, reduction="batchmean"),
    ),
    "ctc": (
        dataset,
        lambda o, t: F.ctc_loss(
            *(o[None].expand(9, -1, -1).log_softmax(2), t[:, None].expand(-1, 4) % 2 + 1, 0 * t + 9, LENGTHS[t])
        ),
    ),
    "masked mean": (dataset, masked_mean),
    "masked mean of few": (rare, lambda o, t: (loss_of_each(o, t) * (t > 0)).sum() / (t > 0).sum().clamp(min=1)),
    "weights as a product": (dataset, lambda o, t: loss_of_each(o, t) @ CLASS_WEIGHTS[t] / CLASS_WEIGHTS[t].sum()),
    "mean without NaN": (dataset, lambda o, t: loss_of_each(o, t).masked_fill(t == 1, torch.nan).nanmean()),
    "model and weights": (
        dataset,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS),
    ),
    "model and mask": (dataset, lambda model, batch: loss_of_each(model(batch[0]), batch[1])[batch[1] == 1].mean()),
    "mean over rows first": (dataset, lambda o, t: (o - F.one_hot(t, 3)).square().mean(0).mean()),
    "mask as index": (dataset, lambda o, t: F.mse_loss(o[t == 1], torch.ones_like(o[t == 1]))),
    "cosine": (dataset, lambda o, t: F.cosine_embedding_loss(o, o.roll(1, 1), t.clamp(max=1) * 2 - 1)),
    "triplet": (dataset, lambda o, t: F.triplet_margin_loss(o, o.roll(1, 1), o.roll(2, 1))),
}


def fit_in_one_step(model: nn.Module, loss: Any, train: TensorDataset, folder: Path, **data: Any) -> lockstep.Run:
    """A step over 40 samples in five micro-batches."""
    return lockstep.fit(
        model=model,
        loss=loss,
        train=train,
        optimizer=functools.partial(torch.optim.SGD, lr=0.5),
        config={"scheduler.name": "constant", "training.max_grad_norm": None},
        devices="cpu",
        epochs=1,
        batch_size=8,
        grad_accum_steps=5,
        save_dir=folder,
        **data,
    )


@pytest.mark.slow
def test_means_over_something_else_than_rows_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    for name, (data, loss) in MEANS.items():
        model, plain, train, val = net(), net(), data(40, 1), data(30, 2)
        of_model = "model" in name

        def value(data: TensorDataset, plain: Any = plain, loss: Any = loss, of_model: bool = of_model) -> Tensor:
            return loss(plain, data.tensors) if of_model else loss(plain(data.tensors[0]), data.tensors[1])

        value(train).backward()
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
        run = fit_in_one_step(model, loss, train, tmp_path / name, val=val)
        torch.testing.assert_close(weights(model), weights(plain), msg=lambda text, name=name: f"{name}: {text}")
        expected = value(val).item()
        assert run.metrics["val_loss"] == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
def test_a_weighted_mean_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    models = {devices: net() for devices in ("cpu", "cpu,cpu")}
    data, loss = MEANS["weights and smoothing"]
    for devices, model in models.items():
        lockstep.fit(
            model=model,
            loss=loss,
            train=data(40, 1),
            devices=devices,
            epochs=1,
            global_batch_size=16,
            save_dir=tmp_path / devices,
        )
    torch.testing.assert_close(weights(models["cpu"]), weights(models["cpu,cpu"]))


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: F.cross_entropy(o, t, weight=CLASS_WEIGHTS) + F.mse_loss(o, F.one_hot(t, 3).float()),
        lambda o, t: F.mse_loss(o, F.one_hot(t, 3).float()).sqrt(),
        lambda o, t: 1 - (o.sigmoid() * F.one_hot(t, 3)).sum() / (o.sigmoid().sum() + len(t)),
        lambda o, t: F.cross_entropy(o @ o.T, torch.arange(len(o))),
        lambda model, batch: F.mse_loss(model(batch[0]), F.one_hot(batch[1], 3).float(), reduction="sum"),
        lambda model, batch: F.mse_loss(model(batch[0]), F.one_hot(batch[1], 3).float()).sqrt(),
        lambda model, batch: F.cross_entropy(model(batch[0]) @ model(batch[0]).T, torch.arange(len(batch[0]))),
        lambda model, batch: dice(model(batch[0]).softmax(1)[:, 1], (batch[1] == 1).float()),
        SumOfFewPositives(),
    ],
)
def test_what_no_count_makes_a_sum_over_rows_is_refused(tmp_path: Path, loss: Any) -> None:
    with pytest.raises(TaskError) as caught:
        lockstep.fit(model=net(), loss=loss, train=dataset(40, 1), devices="cpu", save_dir=tmp_path / "run")
    assert "lockstep.Loss(total" in caught.value.fix


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: torch.stack([loss_of_each(o, t)[t == label].mean() for label in t.unique()]).mean(),
        lambda o, t: F.cross_entropy(o, t, weight=len(t) / torch.bincount(t, minlength=3).clamp(min=1)),
        lambda o, t: F.cross_entropy(o, t, weight=CLASS_WEIGHTS) + 0.1 * o.square().mean(),
    ],
)
def test_a_layer_of_zeros_hides_no_loss_of_the_whole_batch(tmp_path: Path, loss: Any) -> None:
    model = net()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(TaskError) as caught:
        lockstep.fit(model=model, loss=loss, train=dataset(40, 1), devices="cpu", save_dir=tmp_path / "run")
    assert "lockstep.Loss(total" in caught.value.fix


class Drawing(nn.Module):
    """Of a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(12, 6)
        self.decoder = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        mean, spread = self.encoder(inputs).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * spread)


def mixing() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize(
    "model", [Drawing, mixing, pytest.param(lambda: torch.compile(net()), id="compiled", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: F.mse_loss(model(batch[0]), F.one_hot(batch[1], 3).float()).sqrt(),
        lambda model, batch: F.mse_loss(model(batch[0]), F.one_hot(batch[1], 3).float(), reduction="sum") * 0.1,
        lambda model, batch: dice(model(batch[0]).softmax(1)[:, 1], (batch[1] == 1).float()),
    ],
)
def test_models_that_draw_or_mix_rows_hide_no_loss_of_the_whole_batch(tmp_path: Path, model: Any, loss: Any) -> None:
    with pytest.raises(TaskError) as caught:
        lockstep.fit(model=model(), loss=loss, train=dataset(40, 1), devices="cpu", save_dir=tmp_path / "run")
    assert "lockstep.Loss(total" in caught.value.fix


OWN = np.random.default_rng(0)
#: Draws for outputs of shape [rows, 3], and whether batches can be compared with their parts.
DRAWS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "gumbel_softmax": (lambda o: F.gumbel_softmax(o, hard=True), True),
    "multinomial": (lambda o: torch.multinomial(o.softmax(1), 1), True),
    "beta": (lambda o: torch.distributions.Beta(o.exp(), o.exp()).rsample(), True),
    "rrelu": (lambda o: F.rrelu(o, training=True), True),
    "masked tokens": (lambda o: o.masked_fill(torch.rand_like(o) < 0.4, 0.0), True),
    "numpy, a batch": (lambda o: np.random.beta(1, 1), True),
    "numpy, a row": (lambda o: torch.from_numpy(np.random.rand(len(o), 1)).float(), True),
    "python": (lambda o: random.random(), True),
    "numpy, two a row": (
        lambda o: torch.as_tensor(np.random.rand(len(o), 1) * np.random.rand(len(o), 1)).float(),
        False,
    ),
    "own": (lambda o: OWN.random(), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_losses_that_draw_are_compared_with_their_parts_or_named(tmp_path: Path, name: str) -> None:
    train, plain = dataset(40, 1), net()
    draw, is_compared = DRAWS[name]
    F.cross_entropy(plain(train.tensors[0]), train.tensors[1], weight=CLASS_WEIGHTS).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()

    def weighted(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o * (1 + 0.05 * draw(o)), t, weight=CLASS_WEIGHTS)

    def of_model(model: nn.Module, batch: Any) -> Tensor:
        return weighted(model(batch[0]), batch[1])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss in (weighted, of_model):
            model = net()
            fit_in_one_step(model, loss, train, tmp_path / loss.__name__)
            torch.testing.assert_close(weights(model), weights(plain), atol=0.02, rtol=0)
    assert any("draws" in str(warning.message) for warning in caught) is not is_compared
    with pytest.raises(TaskError) as refused:
        fit_in_one_step(net(), lambda o, t: weighted(o, t).sqrt(), train, tmp_path / "root")
    assert "lockstep.Loss(total" in refused.value.fix


class FirstCalls(nn.Module):
    """The loss of the first five batches; counts them in a buffer, an attribute, or in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("calls", torch.zeros(()))
        self.number = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.kind == "buffer":
            self.calls += 1
        else:
            self.number += 1
        return F.cross_entropy(output, target) * (max(float(self.calls), self.number) <= 5)


class FirstCallsOfModel(FirstCalls):
    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return super().forward(model(batch[0]), batch[1])


class FirstCallsInPlace:
    def __init__(self) -> None:
        self.calls = torch.zeros(())

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) * (float(self.calls) <= 5)


def test_a_comparison_does_not_change_the_state_of_a_loss(tmp_path: Path) -> None:
    train, plain = dataset(40, 1), net()
    F.cross_entropy(plain(train.tensors[0]), train.tensors[1]).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    modules = [kind(count) for kind in (FirstCalls, FirstCallsOfModel) for count in ("buffer", "attribute")]
    for number, loss in enumerate((*modules, FirstCallsInPlace(), FirstCallsInPlace().__call__)):
        model = net()
        fit_in_one_step(model, loss, train, tmp_path / str(number))
        torch.testing.assert_close(weights(model), weights(plain))


@pytest.mark.slow
def test_a_divided_model_with_a_loss_of_model_and_batch(tmp_path: Path) -> None:
    model, plain = mixing(), mixing()
    train, val = dataset(40, 1), dataset(8, 2)
    common: dict[str, Any] = {
        "train": train,
        "val": val,  # one chunk for two ranks, which BatchNorm cannot divide further
        "optimizer": functools.partial(torch.optim.SGD, lr=0.5),
        "config": {"scheduler.name": "constant", "training.max_grad_norm": None},
        "devices": "cpu,cpu",
        "strategy": "fsdp",
        "epochs": 1,
        "global_batch_size": 40,
    }

    def weighted(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS)

    weighted(plain, train.tensors).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    run = lockstep.fit(model=model, loss=weighted, save_dir=tmp_path / "weighted", **common)
    torch.testing.assert_close(weights(model), weights(plain))
    assert run.metrics["val_loss"] == pytest.approx(weighted(plain, val.tensors).item(), rel=1e-5)

    def root(model: nn.Module, batch: Any) -> Tensor:
        return weighted(model, batch).sqrt()

    with pytest.raises(TaskError) as caught:
        lockstep.fit(model=mixing(), loss=root, save_dir=tmp_path / "root", **common)
    assert "lockstep.Loss(total" in caught.value.fix


def test_a_compiled_module_has_the_trained_weights_afterwards(tmp_path: Path) -> None:
    model: Any = torch.compile(net(), backend="eager")
    before = weights(model)
    parts: dict[str, Any] = {"model": model, "loss": F.cross_entropy, "train": dataset(40, 1)}
    run = lockstep.fit(**parts, devices="cpu", epochs=1, save_dir=tmp_path / "run")
    assert not torch.equal(weights(model), before)
    assert torch.equal(weights(model), weights(run.load_model("last")))
