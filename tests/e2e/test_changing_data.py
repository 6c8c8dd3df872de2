"""Training data that change between epochs: loader workers read what the rank has, through every face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import lockstep
from lockstep import lightning
from lockstep.errors import DataError
from tests.session.scripts import numbers, run

#: Each epoch is one step of learning rate 1, whose gradient is the factor of the data in that epoch.
WEIGHT = -(1.0 + 10.0 + 100.0)
SETTINGS: dict[str, Any] = {
    "training": {"epochs": 3, "global_batch_size": 8, "max_grad_norm": None},
    "optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0},
    "scheduler": {"name": "constant", "warmup_epochs": 0},
    "data": {"num_workers": 2, "persistent_workers": True},
}
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Factors:
    """Samples that are ``factor``."""

    factor, samples = 1.0, 8

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.factor])


class Announced(Factors):
    def set_epoch(self, epoch: int) -> None:
        self.factor = 10.0**epoch


class Changing(lockstep.Task):
    """Its callback changes the data; ``by``: through the object, or through what the data set calls itself."""

    class Config(lockstep.TaskConfig):
        by: str = "callback"

    def datasets(self) -> lockstep.Datasets:
        self.samples = Announced() if self.config.by == "set_epoch" else Factors()
        return lockstep.Datasets(self.samples if self.config.by == "length" else Subset(self.samples, range(8)))

    def model(self) -> nn.Module:
        return without_weight()

    def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
        return lockstep.Loss(model(batch).sum(), len(batch))

    def callbacks(self) -> list[lockstep.Callback]:
        return [Change(self)]


class Change(lockstep.Callback):
    def __init__(self, task: Changing) -> None:
        self.task = task

    def on_epoch_start(self, context: Any, model: nn.Module) -> None:
        if self.task.config.by == "callback":
            self.task.samples.factor = 10.0**context.epoch

    def on_epoch_end(self, context: Any, model: nn.Module) -> None:
        if self.task.config.by == "length":
            self.task.samples.samples = 9


def without_weight() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


@pytest.mark.parametrize(("by", "devices"), [("callback", "cpu"), ("callback", "cpu,cpu"), ("set_epoch", "cpu,cpu")])
def test_workers_of_a_task_read_the_data_of_their_epoch(by: str, devices: str, tmp_path: Path) -> None:
    """A change by a callback, or by ``set_epoch()`` of a data set behind a ``Subset``, which the run calls."""
    config = {**SETTINGS, "hardware": {"selected_devices": devices}, "save_dir": tmp_path / "run"}
    ended = lockstep.train(Changing(Changing.Config(by=by)), config)
    assert (ended.load_model("last").weight.item()) == WEIGHT
    remarks = [note.text for note in ended.plan.notes if "set_epoch" in note.text]
    assert len(remarks) == (by == "set_epoch")


def test_a_training_set_that_becomes_longer_is_refused(tmp_path: Path) -> None:
    config = {**SETTINGS, "hardware": {"selected_devices": "cpu"}, "save_dir": tmp_path / "run"}
    with pytest.raises(DataError, match=r"\b9 .*\b2\b.*\b8\b"):
        lockstep.train(Changing(Changing.Config(by="length")), config)


SCRIPT = """
import torch
import lockstep
from tests.e2e.test_changing_data import Factors, without_weight

session = lockstep.Session(global_batch_size=8, config={"data.num_workers": 2})
model = without_weight()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer = session.prepare(model, optimizer)
data = Factors()
for epoch in session.epochs(3):
    data.factor = 10.0**epoch
    for batch in session.batches(data):
        session.backward(model(batch).sum(), count=len(batch))
        session.step(optimizer)
session.print("weight", model.weight.item())
"""


@pytest.mark.slow
def test_workers_of_a_session_read_the_data_of_their_epoch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert numbers(run("script.py", cwd=tmp_path), "weight") == [WEIGHT]


class Module(pl.LightningModule):
    """``own_order``: of its loader's sampler, which only one device can keep."""

    def __init__(self, *, own_order: bool) -> None:
        super().__init__()
        self.layer, self.own_order, self.data = without_weight(), own_order, Factors()

    def on_train_epoch_start(self) -> None:
        self.data.factor = 10.0**self.current_epoch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_factor", batch.mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self) -> DataLoader[Any]:
        sampler = Subset(range(8), range(8)) if self.own_order else None
        return DataLoader(self.data, batch_size=8, sampler=sampler, num_workers=1, persistent_workers=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=8, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize("own_order", [False, True])
def test_persistent_workers_of_a_module_read_the_data_of_their_epoch(own_order: bool, tmp_path: Path) -> None:
    module = Module(own_order=own_order)
    ended = lightning.fit(
        module, config={"training": {"epochs": 3, "max_grad_norm": None}, "save_dir": tmp_path / "run"}
    )
    assert module.layer.weight.item() == WEIGHT
    assert [row["val_factor"] for row in ended.history] == [1.0, 10.0, 100.0]
