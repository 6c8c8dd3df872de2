"""A task of sequences of different lengths, padded where they are collated: as speech and text have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import MeanMetric, MetricCollection

from lockstep import Datasets, Loss, Task, TaskConfig

FEATURES = 3


class Recordings:
    """Frames, shape [length, features], each with a label; a few are long and most are short."""

    def __init__(self, samples: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.lengths = draw.lognormal(2.0, 0.7, samples).astype(np.int64).clip(2, 60)
        self.frames = [torch.from_numpy(draw.standard_normal((length, FEATURES))) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        frames = self.frames[index]
        return frames, (frames.sum(1).cumsum(0) > 0).long()


def pad(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Frames [samples, longest, features] and labels [samples, longest]; labels of padding are -1."""
    frames, labels = zip(*samples, strict=True)
    return pad_sequence(frames, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-1)


class Tagger(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.memory = nn.GRU(FEATURES, 6, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 2)

    def forward(self, frames: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.memory(frames)[0]))
        return logits


class Sequences(Task):
    """In float64; a loss counts frames, not samples."""

    class Config(TaskConfig):
        samples: int = 150
        dropout: float = 0.0
        data_seed: int = 1
        give_lengths: bool = True

    defaults: ClassVar[Any] = {"training": {"epochs": 2, "global_batch_size": 24}, "optimizer": {"lr": 0.02}}

    def datasets(self) -> Datasets:
        self.train_data = Recordings(self.config.samples, self.config.data_seed)
        return Datasets(self.train_data, Recordings(17, 2))

    def lengths(self) -> Any:
        return self.train_data.lengths if self.config.give_lengths else None

    def collate(self, samples: Sequence[Any]) -> Any:
        return pad(samples)

    def model(self) -> nn.Module:
        return Tagger(self.config.dropout).double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        frames, labels = batch
        total = nn.functional.cross_entropy(
            model(frames).flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum"
        )
        return Loss(total, (labels >= 0).sum())

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        frames, labels = batch
        counted = labels >= 0
        correct = (model(frames).argmax(2) == labels) & counted
        return correct.sum(1) / counted.sum(1), counted.sum(1)

    def metrics(self) -> MetricCollection:
        return MetricCollection({"accuracy": MeanMetric()})
