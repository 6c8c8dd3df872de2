"""A speech recogniser of self-attention and Legendre memory units; its output is meant for CTC."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.speech.lmu import LMU

Frames = TypeVar("Frames", int, Tensor)


def output_lengths(lengths: Frames, downsample: int) -> Frames:
    """Count output frames of utterances with ``lengths`` feature frames."""
    return (lengths + downsample - 1) // downsample


class Recogniser(nn.Module):
    """Log-mel frames → linear → blocks of attention and LMU → linear → log-probabilities of symbols.

    Args:
        bands: features of a frame.
        symbols: outputs, CTC's blank among them.
        width: of everything between.
        memory_size, theta: order and length in steps of the memory; ``theta`` counts steps after down-sampling.
        downsample: adjacent frames that are stacked to one step, 1, 2 or 4.
    """

    def __init__(
        self,
        bands: int = 80,
        symbols: int = 29,
        *,
        width: int = 512,
        layers: int = 4,
        heads: int = 8,
        memory_size: int = 256,
        theta: float = 1000.0,
        dropout: float = 0.1,
        downsample: int = 1,
    ) -> None:
        super().__init__()
        self.encoder = _Encoder(bands, width, downsample)
        self.blocks = nn.ModuleList(Block(width, heads, memory_size, theta, dropout) for _ in range(layers))
        self.hidden = nn.Linear(width, width)
        self.decoder = nn.Linear(width, symbols)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Return log-probabilities (batch, output frames, symbols) in float32.

        Args:
            features: (batch, frames, bands).
            lengths: feature frames of each utterance, (batch,), at least 1. What stands behind has no influence.
        """
        steps = self.encoder(features, lengths)
        for block in self.blocks:
            steps = block(*steps)
        return F.log_softmax(self.decoder(F.relu(self.hidden(steps[0]))).float(), dim=-1)

    def stages(self) -> list[nn.Module]:
        """Return modules that compute :meth:`forward` one after the other: one for each block, and both ends."""
        return [self.encoder, *self.blocks, _Head(self.hidden, nn.ReLU(), self.decoder)]


#: Steps (batch, time, width), their number in each utterance (batch,), and the padding (batch, time).
Steps = tuple[Tensor, Tensor, Tensor]


class _Encoder(nn.Linear):
    """Stacked frames → steps."""

    def __init__(self, bands: int, width: int, downsample: int) -> None:
        super().__init__(bands * downsample, width)
        self.downsample = downsample

    def forward(self, features: Tensor, lengths: Tensor) -> Steps:  # type: ignore[override]
        frames = features.shape[1]
        padding = torch.arange(frames, device=features.device) >= lengths[:, None]
        features = features.masked_fill(padding[..., None], 0)
        if self.downsample > 1:
            features = F.pad(features, (0, 0, 0, -frames % self.downsample))
            features = features.reshape(len(features), -1, self.in_features)
            lengths = output_lengths(lengths, self.downsample)
            padding = torch.arange(features.shape[1], device=features.device) >= lengths[:, None]
        return super().forward(features), lengths, padding


class Block(nn.Module):
    """Self-attention with a residual, then an LMU; a layer norm after each."""

    def __init__(self, width: int, heads: int, memory_size: int, theta: float, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.attention_norm = nn.LayerNorm(width)
        self.lmu = LMU(width, width, memory_size, theta)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, lengths: Tensor, padding: Tensor) -> Steps:
        attended, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        x = self.attention_norm(x + attended)
        return self.dropout(self.norm(self.lmu(x, lengths))), lengths, padding


class _Head(nn.Sequential):
    """Layers on steps, and log-probabilities of their outputs."""

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return F.log_softmax(super().forward(x).float(), dim=-1)  # type: ignore[no-untyped-call]
