"""A fully connected autoencoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class Encoder(nn.Module):
    """Images ``(batch, *shape)`` → codes ``(batch, code)``; ``hidden`` are the widths of the layers between."""

    def __init__(self, shape: Sequence[int], hidden: Sequence[int], code: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), *_layers([math.prod(shape), *hidden, code]))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Decoder(nn.Module):
    """Codes ``(batch, code)`` → images ``(batch, *shape)`` with pixels from 0 to 1. The encoder's mirror image."""

    def __init__(self, shape: Sequence[int], hidden: Sequence[int], code: int) -> None:
        super().__init__()
        widths = [code, *reversed(hidden), math.prod(shape)]
        self.layers = nn.Sequential(*_layers(widths), nn.Sigmoid(), nn.Unflatten(1, tuple(shape)))

    def forward(self, codes: Tensor) -> Tensor:
        return self.layers(codes)


class Autoencoder(nn.Module):
    """Encoder and decoder; ``forward`` gives the reconstruction of ``(batch, *shape)``."""

    def __init__(self, shape: Sequence[int] = (1, 8, 8), hidden: Sequence[int] = (128, 64), code: int = 16) -> None:
        super().__init__()
        self.encoder = Encoder(shape, hidden, code)
        self.decoder = Decoder(shape, hidden, code)

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    """Make linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]
