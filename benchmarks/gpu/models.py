"""The models, as plain torch: GPT-2, ViT-S/16, ResNet-50, a large MLP. No device code in them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm attention and MLP (GPT-2; Vaswani et al. 2017 with Xiong et al. 2020's order)."""

    def __init__(self, width: int, heads: int, *, causal: bool, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) → the same."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2 with tied embeddings; 124,475,904 parameters with a vocabulary padded to 50,304 (Radford et al. 2019)."""

    def __init__(self, vocabulary: int = 50304, length: int = 1024, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64), causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.register_buffer("place", torch.arange(length), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross-entropy; tokens and targets: (batch, time)."""
        x = self.tokens(tokens) + self.positions(self.place[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class ViT(nn.Module):
    """ViT-S/16 by its defaults: 22 M parameters (Dosovitskiy et al. 2021; Touvron et al. 2021 for S)."""

    def __init__(self, size: int = 224, patch: int = 16, width: int = 384, layers: int = 12, classes: int = 1000):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64), causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Sum of the cross-entropy; images: (batch, 3, size, size), uint8."""
        x = self.patches(images.float() / 255).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])).float(), labels, reduction="sum")


class Bottleneck(nn.Module):
    """1×1, 3×3 (which strides: v1.5), 1×1, with a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            conv = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50 v1.5 by its defaults: 25.6 M parameters."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)]
        layers.append(nn.MaxPool2d(3, 2, 1))
        inputs = width
        for stage, number in enumerate(blocks):
            for place in range(number):
                layers.append(Bottleneck(inputs, width << stage, 2 if stage and not place else 1))
                inputs = 4 * (width << stage)
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        images = (images.float() / 255).contiguous(memory_format=torch.channels_last)
        return F.cross_entropy(self.head(self.body(images)).float(), labels, reduction="sum")


class Classified(nn.Module):
    """A classifier with its loss, as the others have it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(inputs), labels, reduction="sum")


class Transcribed(nn.Module):
    """A speech recogniser with CTC: (batch, frames, bands) and (batch, symbols)."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, features: Tensor, symbols: Tensor) -> Tensor:
        frames = torch.full((len(features),), features.shape[1], device=features.device)
        scores = self.body(features, frames).transpose(0, 1)
        return _ctc(scores, symbols, features.shape[1])


@torch.compiler.disable  # it reads lengths on the host, which a CUDA graph of compiled code cannot
def _ctc(scores: Tensor, symbols: Tensor, frames: int) -> Tensor:
    lengths = [(number,) * len(symbols) for number in (frames, symbols.shape[1])]
    return F.ctc_loss(scores, symbols, *lengths, blank=0, reduction="sum", zero_infinity=True)


class Wide(nn.Module):
    """Residual linear layers: as many parameters as wanted, little arithmetic."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        inputs = F.pad(inputs, (0, self.width - inputs.shape[1]))
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return F.cross_entropy(inputs[:, :8], labels, reduction="sum")
