"""What all programs train: the digits, a small network, and the order of the samples."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Order
from lockstep.recipes.autoencoder import load_digits

EPOCHS = 10
BATCH_SIZE = 32  # samples behind one optimizer step, on all devices together; 1400 = 43 × 32 + 24
LEARNING_RATE = 1e-3
SEED = 0


def dataset() -> TensorDataset:
    images, labels = load_digits("train")
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def batches(epoch: int) -> list[list[int]]:
    """Sample indices of each batch of an epoch (from 0), the same in every process.

    Any shuffle that depends on (seed, epoch) alone would do. This is Lockstep's, so that all programs take the same
    steps and their results can be compared.
    """
    indices = Order(len(dataset()), SEED).slice(epoch, 0, len(dataset())).tolist()
    return [indices[start : start + BATCH_SIZE] for start in range(0, len(indices), BATCH_SIZE)]


def report(losses: list[float]) -> None:
    """Print the training loss of each epoch, and write it to the file that the command line names."""
    print("\n".join(f"epoch {epoch}: loss {loss:.4f}" for epoch, loss in enumerate(losses, 1)))
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(losses))
