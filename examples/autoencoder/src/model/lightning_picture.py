"""Inputs above, their reconstructions below: a picture that shows whether the model has learned anything."""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

from lockstep.recipes.autoencoder import draw
from src.data.pytorch_dataset import DigitsDataset


class ReconstructionPicture(L.Callback):
    """Writes `reconstructions.png` into the trainer's folder after every validation in a fit; TensorBoard has it, too.

    Args:
        images: how many.
        zoom: screen pixels to a pixel.
    """

    def __init__(self, images: int = 12, zoom: int = 8):
        self.images, self.zoom = images, zoom

    def on_validation_end(self, trainer, pl_module):
        # Rank 0 draws alone, so nothing here may talk to the other ranks.
        if not trainer.is_global_zero or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        images = DigitsDataset("val").images[: self.images]
        with torch.no_grad():
            reconstructions = pl_module.model(images.to(pl_module.device)).cpu()
        pixels = draw(images, reconstructions, self.zoom)
        path = Path(trainer.default_root_dir) / "reconstructions.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("reconstructions", pixels, trainer.global_step, dataformats="HW")
