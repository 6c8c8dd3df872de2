"""A LightningModule that Lockstep's own loop drives: `lockstep verify` and `lockstep bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    file = tmp_path / "modules.py"
    file.write_text(MODULES)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BoringModel", "Net"])
def test_verify_says_equal(run_cli: Any, modules: Path, name: str) -> None:
    done = run_cli("verify", f"{modules}:{name}", "--devices", "cpu,cpu", "--steps", "6", timeout_s=110)
    assert done.code == 0, done.err + done.out
    assert "EQUAL" in done.out or "IDENTICAL" in done.out


@pytest.mark.parametrize(("name", "reason"), [("Manual", "optimizes manually"), ("Two", "2 optimizers")])
def test_what_has_no_single_step_is_refused(run_cli: Any, modules: Path, name: str, reason: str) -> None:
    done = run_cli("verify", f"{modules}:{name}", "--devices", "cpu,cpu", "--steps", "4")
    assert done.code == 2
    assert reason in done.err


@pytest.mark.slow
def test_bench_measures_a_step(run_cli: Any, modules: Path) -> None:
    done = run_cli("bench", "step", f"{modules}:Net", "--devices", "cpu", "--steps", "5", "--json", timeout_s=110)
    assert done.code == 0, done.err
    assert json.loads(done.out)
