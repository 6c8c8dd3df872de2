"""Images above, their reconstructions below: a picture that shows whether the model has learned anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


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
