"""What both programs train: data, model, settings, and the order of the samples."""

import torch
from torch import Tensor, nn

from lockstep import Order

SAMPLES = 1000
EPOCHS = 3
MICRO_BATCH = 16  # samples that a rank puts through the model at once
EFFECTIVE_BATCH = 128  # samples behind one optimizer step, over all ranks and micro-batches; 1000 = 7 × 128 + 104
LEARNING_RATE = 0.1
MOMENTUM = 0.9
SEED = 0


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(SAMPLES, 20, generator=generator)
    labels = (inputs[:, :10].sum(1) > inputs[:, 10:].sum(1)).long()
    return inputs, labels


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


def order(epoch: int) -> Tensor:
    """Sample indices of an epoch (from 0), the same on every rank.

    Any permutation that depends on (seed, epoch) alone would do, such as ``torch.randperm`` with a generator of
    seed ``SEED + epoch``. This is Lockstep's, so that both programs take the same steps.
    """
    return torch.from_numpy(Order(SAMPLES, SEED).slice(epoch, 0, SAMPLES))
