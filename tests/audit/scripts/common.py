"""Data and models of the scripts beside this file: 64 samples of four numbers, a linear model."""

import random

import torch
from torch.nn import Linear
from torch.utils.data import Dataset, TensorDataset


def samples(size: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True) + torch.randn(size, 1, generator=generator))


def sentences(size: int = 64) -> TensorDataset:
    """Sentences of 1 to 6 tokens; what follows is -100."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 5, (size, 6), generator=generator)
    lengths = 1 + torch.arange(size) ** 2 % 6
    return TensorDataset(tokens, torch.where(torch.arange(6) < lengths[:, None], tokens, -100))


class Noisy(Dataset):
    """Samples with a random shift of each."""

    def __init__(self, size: int = 64) -> None:
        self.samples = samples(size)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = self.samples[index]
        return inputs + random.random() / 10, target


def model() -> Linear:
    torch.manual_seed(0)
    return Linear(4, 1)


def tagger() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(5, 4), Linear(4, 5))
