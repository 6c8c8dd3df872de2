"""The same model for Lightning: what a step is, and what is logged."""

import lightning as L
import torch
from torch.nn import functional as F

from src.model.pytorch_model import Autoencoder


class AutoencoderModule(L.LightningModule):
    """Mean squared error of the pixels.

    Args:
        hidden: widths of the two layers between image and code.
        code: numbers that an image is squeezed into.
        lr: learning rate, where the optimizer is not given on the command line.
    """

    def __init__(self, hidden: tuple[int, int] = (128, 64), code: int = 16, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = Autoencoder(tuple(hidden), code)

    def forward(self, images):
        return self.model(images)

    def training_step(self, batch, batch_idx):
        return self._loss(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._loss(batch, "val")

    def test_step(self, batch, batch_idx):
        self._loss(batch, "test")

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def _loss(self, images, split):
        loss = F.mse_loss(self(images), images)
        # The mean over ranks, too: by default each rank would log its own.
        self.log(f"{split}_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(images))
        return loss

    def configure_optimizers(self):
        """Used unless the configuration has the sections `optimizer` and `lr_scheduler`."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        # Optimizer steps of the whole training, with the number of devices and the accumulation counted in.
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
