"""Models of images (batch, channels, height, width): classifiers to logits (batch, classes), and an autoencoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from lockstep.tasks.har.models import pre_norm_encoder


class Residual(nn.Module):
    """Two 3×3 convolutions beside a shortcut, the basic block of He et al. 2016, https://arxiv.org/abs/1512.03385."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images) + self.shortcut(images)
        return features.relu()


class ResNet(nn.Module):
    """A ResNet for small images: a 3×3 stem, stages of basic blocks, the mean, a linear head.

    With ``widths=(64, 128, 256, 512)`` and ``depth=2`` it has the blocks of ResNet-18.
    """

    def __init__(self, channels: int, classes: int, *, widths: Sequence[int] = (32, 64, 128), depth: int = 1) -> None:
        super().__init__()
        stem = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        blocks: list[nn.Module] = [nn.Sequential(stem, nn.BatchNorm2d(widths[0]), nn.ReLU())]
        before = widths[0]
        for stage, width in enumerate(widths):
            for place in range(depth):
                blocks.append(Residual(before, width, 2 if stage and not place else 1))
                before = width
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean(dim=(2, 3)))

    def stages(self) -> list[nn.Module]:
        """Stem, blocks and head, to be cut anywhere."""
        return [*self.features, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), self.head)]


class Vit(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929) that classifies the mean patch.

    Args:
        size: height and width of an image; each a multiple of those of a patch.
        patch: height and width of a patch.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        size: tuple[int, int],
        *,
        patch: tuple[int, int] = (4, 4),
        width: int = 64,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if size[0] % patch[0] or size[1] % patch[1]:
            raise ValueError(f"images of {size[0]}×{size[1]} cannot be cut into patches of {patch[0]}×{patch[1]}")
        if width % heads:
            raise ValueError(f"the width {width} must be a multiple of the {heads} heads")
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(size[0] // patch[0] * (size[1] // patch[1]), width))
        self.encoder = pre_norm_encoder(width, heads, 4 * width, depth, dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(patches).mean(dim=1))


class LinePlots(nn.Module):
    """Draws windows (batch, channels, time) as line plots (batch, channels, height, width), one for each channel.

    A pixel is 1 on the line and falls to 0 within one pixel of it. Values beyond ``limit`` are drawn at the edge.
    """

    def __init__(self, height: int = 32, width: int | None = None, limit: float = 3.0) -> None:
        super().__init__()
        self.height, self.width, self.limit = height, width, limit

    def forward(self, windows: Tensor) -> Tensor:
        if self.width is not None and self.width != windows.shape[2]:
            windows = nn.functional.interpolate(windows, self.width, mode="linear", align_corners=True)
        rows = (1 - windows.clamp(-self.limit, self.limit) / self.limit) / 2 * (self.height - 1)
        following = torch.cat([rows[..., 1:], rows[..., -1:]], dim=2)
        top, bottom = torch.minimum(rows, following)[:, :, None], torch.maximum(rows, following)[:, :, None]
        pixels = torch.arange(self.height, device=windows.device, dtype=windows.dtype)[:, None]
        return (1 - torch.maximum(top - pixels, pixels - bottom).clamp(min=0)).clamp(min=0)


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
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]
