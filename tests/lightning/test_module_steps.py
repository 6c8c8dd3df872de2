"""A LightningModule that Lockstep's own loop drives: `lockstep verify` and `lockstep bench`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.cli.main import main
from lockstep.errors import UnsupportedError

MODULES = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel as Boring, ManualOptimBoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning.pytorch as pl

class BoringModel(Boring):
    pass

class Manual(ManualOptimBoringModel):
    pass

class Two(Boring):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

class Net(pl.LightningModule):
    "What an ordinary module uses: setup(), self.log, a schedule that counts the steps, a mapping of settings."

    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))

    def setup(self, stage):
        self.scale = 0.5

    def data(self, samples):
        x = torch.randn(samples, 4)
        return TensorDataset(x, (x[:, 0] > 0).long())

    def train_dataloader(self):
        return DataLoader(self.data(100), batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data(32), batch_size=8)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x * self.scale), y)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch):
        x, y = batch
        out = self.net(x * self.scale)
        self.log_dict({"val_loss": nn.functional.cross_entropy(out, y), "val/acc": (out.argmax(1) == y).float().mean()})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches + 9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
"""


MODULES += """

class Classes(Net):
    def training_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y, weight=torch.tensor([1.0, 9.0]))
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    file = tmp_path / "modules.py"
    file.write_text(MODULES)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("BoringModel", marks=pytest.mark.drill), "Net"])
def test_verify_says_equal(modules: Path, name: str) -> None:
    report = lockstep.verify(f"{modules}:{name}", devices="cpu,cpu", steps=6)
    assert report.outcome in {"identical", "equal"}, report.findings()


@pytest.mark.slow
def test_verify_measures_what_a_mean_of_other_than_samples_changes(modules: Path) -> None:
    """The same is a note of each plan of a module on several ranks."""
    report = lockstep.verify(f"{modules}:Classes", devices="cpu,cpu", steps=4)
    [cause] = report.causes
    assert cause.code == "grouping"
    measured = float(re.search(r"up to ([0-9.e-]+)\)", cause.what)[1])  # type: ignore[index]
    assert measured > 1e-3
    assert "Loss(total, count)" in cause.fix
    plan = lockstep.plan(f"{modules}:Classes", devices="cpu,cpu")
    assert "module_means" in [note.key for note in plan.notes]
    assert "module_means" not in [note.key for note in lockstep.plan(f"{modules}:Classes", devices="cpu").notes]


def test_the_plan_names_settings_and_decisions_of_the_module(modules: Path) -> None:
    used = {"optimizer": {"lr": 0.5}, "scheduler": {"warmup_epochs": 0}, "training": {"batch_size": 7, "epochs": 3}}
    data = {"data": {"num_workers": 2}, "validation": {"batch_size": 9, "every_epochs": 2}}
    plan = lockstep.plan(f"{modules}:Net", {**used, **data}, devices="cpu")
    unused = [note.text.split(" has no effect")[0] for note in plan.notes if note.key == "settings_unused"]
    assert unused == [
        "optimizer.lr, scheduler.warmup_epochs",
        "training.batch_size, data.num_workers, validation.batch_size",
    ]
    decisions = plan.decisions
    assert [decisions[key].value for key in ("batch_size", "order", "monitor")] == [8, "shuffled", "val_loss"]
    assert [decisions[key].value for key in ("lr", "schedule", "workers")] == [None] * 3
    assert not decisions.keys() & {"warmup", "channels_last", "data_device", "one_message", "weight_decay"}
    assert not [note.key for note in lockstep.plan(f"{modules}:Net", devices="cpu").notes]


@pytest.mark.parametrize(
    "settings",
    [
        {"hardware": {"strategy": "fsdp", "selected_devices": ["cpu", "cpu"]}},
        {"hardware": {"strategy": "pipeline", "selected_devices": ["cpu", "cpu"]}},
        {"training": {"reproducibility": "exact"}},
        {"training": {"compile": True}},
        {"debug": {"trace": "on"}},
    ],
)
def test_settings_of_lockstep_s_loop_are_refused(modules: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="LightningModule"):
        lockstep.plan(f"{modules}:Net", settings)


def test_a_module_whose_steps_return_mappings_and_log_nothing_is_trained(modules: Path, tmp_path: Path) -> None:
    settings = {"task.native_steps": 6, "training.max_steps": 6, "save_dir": str(tmp_path / "run")}
    run = lockstep.train(f"{modules}:BoringModel", settings, devices="cpu", epochs=1)
    [row] = run.history
    assert row["train_loss"] > 0


@pytest.mark.parametrize(("name", "reason"), [("Manual", "manually"), ("Two", "2 optimizers")])
def test_what_has_no_single_step_is_refused(modules: Path, name: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        lockstep.verify(f"{modules}:{name}", devices="cpu,cpu", steps=4)


@pytest.mark.slow
def test_bench_measures_a_step(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["bench", "step", f"{modules}:Net", "--devices", "cpu", "--steps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
