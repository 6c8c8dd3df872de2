"""How far reconstructions are from their images, and a picture of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: How many images a picture shows.
EXAMPLES = 12


class PixelErrors:
    """Mean squared error of a pixel, and the peak signal-to-noise ratio in decibels, of images from 0 to 1."""

    def __init__(self) -> None:
        #: The first :data:`EXAMPLES` images with their reconstructions.
        self.examples: list[tuple[Tensor, Tensor]] = []
        self._squares, self._pixels = torch.zeros((), dtype=torch.float64), 0

    def update(self, reconstructions: Tensor, images: Tensor) -> None:
        """Take rows: ``reconstructions`` and ``images``, both (rows, …)."""
        self._squares = self._squares + (reconstructions - images).square().sum(dtype=torch.float64)
        self._pixels += images.numel()
        missing = EXAMPLES - len(self.examples)
        self.examples += zip(images[:missing], reconstructions[:missing], strict=True)

    def compute(self) -> dict[str, Tensor]:
        """``mse``, and ``psnr`` = 10·log₁₀(1 / mse); NaN before the first row."""
        mse = self._squares / self._pixels
        return {"mse": mse.float(), "psnr": -10 * mse.log10().float()}


def draw(images: Any, reconstructions: Any, zoom: int = 8) -> npt.NDArray[np.uint8]:
    """Two rows of ``n`` images as grey pixels: (2 · 8 · ``zoom``, n · 8 · ``zoom``).

    Args:
        images: (n, 1, 8, 8), from 0 to 1; tensors on the CPU, or arrays.
        reconstructions: the same.
        zoom: screen pixels to a pixel.
    """
    rows = [np.concatenate(list(np.asarray(part)[:, 0]), axis=1) for part in (images, reconstructions)]
    pixels: npt.NDArray[np.uint8] = np.rint(np.nan_to_num(np.concatenate(rows)).clip(0, 1) * 255).astype(np.uint8)
    return np.repeat(np.repeat(pixels, zoom, axis=0), zoom, axis=1)
