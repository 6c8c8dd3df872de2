"""Handwritten digits: from the package, or from a file that is downloaded once per node."""

import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from lockstep.data.download import download
from lockstep.hardware import read_world
from lockstep.recipes.autoencoder import SPLITS, load_digits, scale

SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"


def is_main_process() -> bool:
    """Whether this process is rank 0. Right before the process group exists, too: the launcher says who is who.

    `not dist.is_initialized() or dist.get_rank() == 0` is true on *every* rank until the group is there.
    """
    return read_world(os.environ).is_main


def fetch_digits(folder: Path | str, url: str, sha256: str = SHA256) -> Path:
    """The file behind `url`; call it on every rank.

    The first process of a node downloads, the others wait for it and use its file. They wait at a lock of the node's
    file system, not at `dist.barrier()`: it works before the process group exists, and when the download fails, the
    next one tries, so that none waits for ever.
    """
    return download(url, Path(folder) / "digits.csv.gz", sha256)


class DigitsDataset(Dataset):
    """Images (1, 8, 8) with pixels from 0 to 1.

    Args:
        split: train, val or test.
        file: a `digits.csv.gz`; without it, the images come with Lockstep.
    """

    def __init__(self, split: str, file: Path | str | None = None):
        if file is None:
            images = load_digits(split).images
        else:
            table = np.loadtxt(file, delimiter=",")[SPLITS[split]]
            images = scale(table[:, :64], table[:, 64]).images
        self.images = torch.from_numpy(images)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]
