"""The autoencoder task: settings, the images in the package, model, loss, scores and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data.arrays import ArrayDataset
from lockstep.engine.task import Datasets, Loss, Metrics, Task, TaskConfig
from lockstep.errors import ConfigError
from lockstep.recipes.autoencoder.model import Autoencoder
from lockstep.tasks import DEFAULTS

#: Where each split lies in the source's order of 1,797 digits (see ``digits.txt``).
SPLITS: dict[str, slice] = {"train": slice(0, 1400), "val": slice(1400, 1597), "test": slice(1597, 1797)}
LARGEST_PIXEL = 16
#: How many images a picture shows.
EXAMPLES = 12


class Digits(NamedTuple):
    """``images`` (n, 1, 8, 8) from 0 to 1, 32-bit floats; ``labels`` (n,) from 0 to 9."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def load_digits(split: Literal["train", "val", "test"]) -> Digits:
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as content:
        return scale(content["images"][SPLITS[split]], content["labels"][SPLITS[split]])


def scale(images: NDArray[Any], labels: NDArray[Any]) -> Digits:
    """Scale pixels from 0 to 16, of shape (n, 8, 8) or (n, 64), for the network."""
    scaled = np.asarray(images, dtype=np.float32).reshape(-1, 1, 8, 8) / np.float32(LARGEST_PIXEL)
    return Digits(scaled, np.asarray(labels, dtype=np.int64))


class AutoencoderConfig(TaskConfig):
    """Settings of the autoencoder task (``task.<key>``)."""

    hidden: tuple[PositiveInt, ...] = Field(
        default=(128, 64), description="widths of the layers between image and code"
    )
    code: int = Field(default=16, ge=1, description="numbers that an image is squeezed into")


class PixelErrors:
    """Mean squared error of a pixel, and the peak signal-to-noise ratio in decibels, of images from 0 to 1."""

    def __init__(self) -> None:
        #: The first :data:`EXAMPLES` images with their reconstructions.
        self.examples: list[tuple[Tensor, Tensor]] = []
        self._squares = torch.zeros((), dtype=torch.float64)
        self._pixels = 0

    def update(self, reconstructions: Tensor, images: Tensor) -> None:
        """Take rows: ``reconstructions`` and ``images``, both (rows, …)."""
        self._squares = self._squares + (reconstructions - images).square().sum(dtype=torch.float64)
        self._pixels += images.numel()
        missing = EXAMPLES - len(self.examples)
        self.examples += zip(images[:missing], reconstructions[:missing], strict=True)

    def compute(self) -> dict[str, Tensor]:
        """Compute ``mse``, and ``psnr`` = 10·log₁₀(1 / mse); NaN before the first row."""
        mse = self._squares / self._pixels
        return {"mse": mse.float(), "psnr": -10 * mse.log10().float()}


class AutoencoderTask(Task):
    """Reconstruct images of handwritten digits, which are in the package, from a short code."""

    Config = AutoencoderConfig
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS["autoencoder"]
    monitor = ("val_loss", "min")
    config: AutoencoderConfig
    #: Scores of the last evaluation.
    _scores: PixelErrors | None = None

    def datasets(self) -> Datasets:
        """Return images ``(1, 8, 8)`` from 0 to 1."""
        if self.data.data_dir is not None or self.data.download:
            raise ConfigError(
                "the autoencoder task reads no folder and downloads nothing: its images are in the package",
                fix="leave --data-dir and --download out",
            )
        train, val, test = (ArrayDataset(load_digits(split).images) for split in ("train", "val", "test"))
        return Datasets(train, val, test)

    def model(self) -> nn.Module:
        return Autoencoder(hidden=self.config.hidden, code=self.config.code)

    def stages(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return encoder, then decoder."""
        assert isinstance(model, Autoencoder)
        return [model.encoder, model.decoder]

    # A batch: a tuple of one tensor, images (n, 1, 8, 8).

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Sum the squared error over pixels; the items are pixels."""
        return self.validate(model, batch)[0]

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        (images,) = batch
        return model(images).float(), images

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Tensor, ...]]:
        rows = self.evaluate(model, batch)
        return self._loss(*rows), rows

    def _loss(self, reconstructions: Tensor, images: Tensor) -> Loss:
        return Loss(F.mse_loss(reconstructions.float(), images, reduction="sum"), images.numel())

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the code of each image, and the mean squared error of its pixels."""
        (images,) = batch
        assert isinstance(model, Autoencoder)
        code = model.encoder(images)
        return {"code": code, "mse": (model.decoder(code).float() - images).square().flatten(1).mean(1)}

    def metrics(self) -> Metrics:
        self._scores = PixelErrors()
        return self._scores

    def pictures(self) -> dict[str, NDArray[np.uint8]]:
        """Return the first images of the last evaluation, and their reconstructions below."""
        if self._scores is None or not self._scores.examples:
            return {}
        images, reconstructions = map(torch.stack, zip(*self._scores.examples, strict=True))
        return {"reconstructions": draw(images, reconstructions)}


def draw(images: Any, reconstructions: Any, zoom: int = 8) -> NDArray[np.uint8]:
    """Draw two rows of ``n`` images as grey pixels: (2 · 8 · ``zoom``, n · 8 · ``zoom``).

    Args:
        images, reconstructions: (n, 1, 8, 8), from 0 to 1; tensors on the CPU, or arrays.
        zoom: screen pixels to a pixel.
    """
    rows = [np.concatenate(list(np.asarray(part)[:, 0]), axis=1) for part in (images, reconstructions)]
    pixels: NDArray[np.uint8] = np.rint(np.nan_to_num(np.concatenate(rows)).clip(0, 1) * 255).astype(np.uint8)
    return np.repeat(np.repeat(pixels, zoom, axis=0), zoom, axis=1)
