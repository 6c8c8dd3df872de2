"""``lockstep.fit``: a task from its parts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
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
    with pytest.raises(RunFolderError, match=r"was made by lockstep\.fit") as caught:
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
    parts: dict[str, Any] = {"model": lambda: nn.Linear(2, 1), "loss": Weighted(), "train": Records(), "lr": 0.05}
    run = lockstep.fit(**parts, devices="cpu", epochs=3, save_dir=tmp_path / "run")
    losses = [row["train_loss"] for row in run.history]
    assert losses[-1] < losses[0]
    again = lockstep.fit(**parts, devices="cpu", epochs=4, save_dir=tmp_path / "run", resume=True)
    assert len(again.history) == 4


def test_each_form_of_a_loss_trains_the_same(tmp_path: Path) -> None:
    losses = [
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        lambda output, target: lockstep.Loss(F.cross_entropy(output, target, reduction="sum"), len(target)),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
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
        ({"train": DataLoader(dataset(8, 1))}, r"train is a DataLoader.*\n.*\n.*train=loader\.dataset"),
        ({"loss": lambda output, target: output}, "the loss returned a tensor of shape"),
        ({"loss": lambda output, target: 1.0}, "the loss returned a float"),
        ({"train": Records()}, "the batch is a dict, not inputs and a target"),
    ],
)
def test_a_wrong_part_is_one_error(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    parts: dict[str, Any] = {"model": net(), "loss": F.cross_entropy, "train": dataset(40, 1)}
    with pytest.raises(TaskError, match=words):
        lockstep.fit(**{**parts, **change}, devices="cpu", save_dir=tmp_path / "run")
