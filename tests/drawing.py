"""A task that draws wherever ordinary PyTorch code does, without a generator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import random_split

from lockstep import Datasets
from tests.toys import Toy, arrays


class Augmenting:
    """Draws for each sample from Python's, NumPy's and torch's global generators."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = random.random() + float(np.random.rand()) + torch.rand(())
        return self.inputs[index] + shift - 1.5, self.labels[index]


class Unseeded(Augmenting):
    """Noise that differs each time."""

    scale = 1.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = np.random.default_rng().normal(size=self.inputs.shape[1:]).astype(np.float32)
        return self.inputs[index] + torch.from_numpy(noise), self.labels[index] * int(self.scale)


class Noisy(Toy):
    def datasets(self) -> Datasets:
        return Datasets(Unseeded(*arrays(40, 1)))


class Drawing(Toy):
    """Splits, augments, mixes batches in ``collate`` and makes its model from the global generators."""

    class Config(Toy.Config):
        mixes: bool = True

    def prepare(self) -> None:
        self.prepared = random.random()

    def datasets(self) -> Datasets:
        inputs, labels = arrays(120, 1)
        self.split = random_split(range(120), [0.6, 0.2, 0.2])  # type: ignore[arg-type]
        train, val, test = (list(part.indices) for part in self.split)
        return Datasets(
            torch.utils.data.Subset(Augmenting(inputs, labels), train),  # type: ignore[arg-type]
            torch.utils.data.TensorDataset(inputs[val], labels[val]),
            torch.utils.data.TensorDataset(inputs[test], labels[test]),
        )

    def collate(self, samples: Sequence[Any]) -> Any:
        inputs, labels = super().collate(samples)
        return inputs + (np.random.normal() * 1e-3 if self.config.mixes else 0), labels

    def model(self) -> nn.Module:
        model = super().model()
        next(model.parameters()).data.mul_(1 + random.random())
        return model
