"""The data for Lightning: which data sets, and how they are loaded."""

import random

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from src.data.pytorch_dataset import DigitsDataset, fetch_digits


def seed_worker(worker_id):
    """NumPy and Python's own generator in a loader's worker: torch seeds only its own."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


class DigitsDataModule(L.LightningDataModule):
    """Images of handwritten digits.

    Args:
        data_dir: folder for the download.
        url: where to download from; without it, the images come with Lockstep.
        batch_size: images per device.
        num_workers: loader processes per device.
        seed: of the order.
    """

    def __init__(
        self,
        data_dir: str = "data",
        url: str | None = None,
        batch_size: int = 32,
        num_workers: int = 0,
        seed: int = 13,
    ):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        # On every rank. `prepare_data` runs on one of them while the others wait at a barrier, which they would
        # do for ever if that one failed.
        options = self.hparams
        file = fetch_digits(options.data_dir, options.url) if options.url else None
        self.train_set, self.val_set, self.test_set = (DigitsDataset(split, file) for split in ("train", "val", "test"))

    def train_dataloader(self):
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self):
        return self._loader(self.val_set)

    def test_dataloader(self):
        return self._loader(self.test_set)

    def predict_dataloader(self):
        return self._loader(self.test_set)

    def _loader(self, dataset, shuffle=False):
        return DataLoader(
            dataset,
            batch_size=self.hparams.batch_size,
            shuffle=shuffle,
            num_workers=self.hparams.num_workers,
            worker_init_fn=seed_worker,
            generator=torch.Generator().manual_seed(self.hparams.seed),
        )
