"""Classifiers of short sensor windows. Each maps ``(batch, channels, time)`` to logits ``(batch, classes)``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class Cnn(nn.Module):
    """Convolution blocks over time that halve it, then mean and maximum over time, then a linear layer.

    Args:
        widths: output channels of each block.
        kernels: kernel size of each block (odd); ``None``: 7, 5, then 3.
        length: time steps of a window; it must be at least ``2 ** len(widths)``.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        length: int,
        *,
        widths: Sequence[int] = (64, 128, 128),
        kernels: Sequence[int] | None = None,
        dropout: float = 0.3,
    ) -> None:
        super().__init__()
        if length < 2 ** len(widths):
            raise ValueError(f"{len(widths)} blocks halve the time axis to nothing: windows have only {length} steps")
        kernels = (7, 5, *[3] * len(widths))[: len(widths)] if kernels is None else kernels
        blocks: list[nn.Module] = []
        for width, kernel in zip(widths, kernels, strict=True):
            blocks += [
                # Batch normalisation has its bias.
                nn.Conv1d(channels, width, kernel, padding=kernel // 2, bias=False),
                nn.BatchNorm1d(width),
                nn.ReLU(),
                nn.MaxPool1d(2),
            ]
            channels = width
        self.features = nn.Sequential(*blocks)
        self.head = _MeanAndMaximum(nn.Dropout(dropout), nn.Linear(2 * channels, classes))

    def forward(self, samples: Tensor) -> Tensor:
        return self.head(self.features(samples))

    def stages(self) -> list[nn.Module]:
        """Return the model in order, to be cut anywhere: its blocks, and the head."""
        return [*(self.features[start : start + 4] for start in range(0, len(self.features), 4)), self.head]


class _MeanAndMaximum(nn.Sequential):
    """Layers on mean and maximum over time of (batch, channels, time)."""

    def forward(self, features: Tensor) -> Tensor:
        pooled = torch.cat([features.mean(dim=2), features.amax(dim=2)], dim=1)
        return super().forward(pooled)  # type: ignore[no-untyped-call]


class Mlp(nn.Module):
    """Fully connected layers over the flattened window: ``channels·length`` → hidden layers → classes.

    With one channel of 561 features and ``hidden=(128,)`` it is the classic 561-128-6 network.
    """

    def __init__(
        self, channels: int, classes: int, length: int, *, hidden: Sequence[int] = (128,), dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        width = channels * length
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []  # a dropout of 0 would still cost a call per step
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, classes))

    def forward(self, samples: Tensor) -> Tensor:
        return self.layers(samples)

    def stages(self) -> list[nn.Module]:
        """Return one for each linear layer, with its activation and dropout."""
        cuts = [index for index, layer in enumerate(self.layers) if isinstance(layer, nn.Linear)]
        return [self.layers[start:stop] for start, stop in pairwise([0, *cuts[1:], len(self.layers)])]


def pre_norm_encoder(width: int, heads: int, hidden: int, depth: int, dropout: float) -> nn.TransformerEncoder:
    """Build pre-norm layers, and a norm at their end."""
    layer = nn.TransformerEncoderLayer(
        width, heads, hidden, dropout, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
