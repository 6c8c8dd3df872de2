"""A ResNet for small images (He et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


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
            for number in range(depth):
                blocks.append(Residual(before, width, 2 if stage and not number else 1))
                before = width
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean(dim=(2, 3)))

    def stages(self) -> list[nn.Module]:
        """Return stem, blocks and head, to be cut anywhere."""
        return [*self.features, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), self.head)]
