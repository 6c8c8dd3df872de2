"""The images in the package: 1,797 handwritten digits (see ``digits.txt``)."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Split = Literal["train", "val", "test"]

#: Where each split lies in the source's order.
SPLITS: dict[str, slice] = {"train": slice(0, 1400), "val": slice(1400, 1597), "test": slice(1597, 1797)}
LARGEST_PIXEL = 16


class Digits(NamedTuple):
    """``images`` (n, 1, 8, 8) from 0 to 1, 32-bit floats; ``labels`` (n,) from 0 to 9."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def load_digits(split: Split) -> Digits:
    """One split of the images."""
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as content:
        return scale(content["images"][SPLITS[split]], content["labels"][SPLITS[split]])


def scale(images: npt.NDArray[Any], labels: npt.NDArray[Any]) -> Digits:
    """Pixels from 0 to 16, of shape (n, 8, 8) or (n, 64), as the network wants them."""
    scaled = np.asarray(images, dtype=np.float32).reshape(-1, 1, 8, 8) / np.float32(LARGEST_PIXEL)
    return Digits(scaled, np.asarray(labels, dtype=np.int64))
