"""Inputs above, their reconstructions below: a picture that shows whether the model has learned anything."""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

from src.data.pytorch_dataset import DigitsDataset


class ReconstructionPicture(L.Callback):
    """Writes `reconstructions.png` into the trainer's folder after every validation, and logs it to TensorBoard.

    Args:
        images: how many.
        zoom: screen pixels to a pixel.
    """

    def __init__(self, images: int = 12, zoom: int = 8):
        self.images, self.zoom = images, zoom

    def on_validation_end(self, trainer, pl_module):
        # Rank 0 draws alone, so nothing here may talk to the other ranks.
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        images = DigitsDataset("val").images[: self.images]
        with torch.no_grad():
            reconstructions = pl_module.model(images.to(pl_module.device)).cpu()
        picture = draw(images, reconstructions, self.zoom)
        path = Path(trainer.default_root_dir) / "reconstructions.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
                shape = (picture.height, picture.width)
                logger.experiment.add_image(
                    "reconstructions", pixels.view(shape), trainer.global_step, dataformats="HW"
                )


def draw(images, reconstructions, zoom):
    """Two rows of images (n, 1, 8, 8) with pixels from 0 to 1, as a grey picture."""
    rows = [torch.cat(list(part.squeeze(1)), dim=1) for part in (images, reconstructions)]
    pixels = (torch.cat(rows) * 255).round().to(torch.uint8)
    picture = Image.fromarray(pixels.numpy())
    return picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.NEAREST)
