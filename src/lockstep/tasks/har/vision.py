"""Vision transformers over images, and windows drawn as line plots (one image per channel)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.tasks.har.models import pre_norm_encoder


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
        self.height = height
        self.width = width
        self.limit = limit

    def forward(self, windows: Tensor) -> Tensor:
        if self.width is not None and self.width != windows.shape[2]:
            windows = nn.functional.interpolate(windows, self.width, mode="linear", align_corners=True)
        rows = (1 - windows.clamp(-self.limit, self.limit) / self.limit) / 2 * (self.height - 1)
        following = torch.cat([rows[..., 1:], rows[..., -1:]], dim=2)
        top = torch.minimum(rows, following)[:, :, None]
        bottom = torch.maximum(rows, following)[:, :, None]
        pixels = torch.arange(self.height, device=windows.device, dtype=windows.dtype)[:, None]
        return (1 - torch.maximum(top - pixels, pixels - bottom).clamp(min=0)).clamp(min=0)
