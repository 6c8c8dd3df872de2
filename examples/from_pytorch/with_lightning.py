"""The same as a LightningModule, with Lockstep's devices: `python with_lightning.py [RESULT [cpu,cpu]]`."""

import sys

import lightning as L
import problem
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lockstep
from lockstep.lightning import fit


class Classifier(L.LightningModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size
        self.model = problem.model()

    def training_step(self, batch, batch_idx):
        data, target = batch
        loss = F.cross_entropy(self.model(data), target)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(data))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=problem.LEARNING_RATE)

    def train_dataloader(self):
        return DataLoader(problem.dataset(), batch_size=self.batch_size, shuffle=True)


devices = (sys.argv[2] if sys.argv[2:] else "cpu").split(",")
torch.manual_seed(problem.SEED)
result = fit(
    Classifier(problem.BATCH_SIZE // len(devices)),  # per device
    hardware={"selected_devices": devices},
    config={"training": {"epochs": problem.EPOCHS, "seed": problem.SEED, "max_grad_norm": None}},
)
problem.report([row["train_loss"] for row in lockstep.Run(result.run_dir).history])
