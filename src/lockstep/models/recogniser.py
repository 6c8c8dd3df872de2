"""A speech recogniser of self-attention and Legendre memory units; its output is meant for CTC."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.lmu import LMU

Frames = TypeVar("Frames", int, Tensor)


def output_lengths(lengths: Frames, downsample: int) -> Frames:
    """Output frames of utterances with ``lengths`` feature frames."""
    return (lengths + downsample - 1) // downsample


class Recogniser(nn.Module):
    """Log-mel frames → linear → blocks of attention and LMU → linear → log-probabilities of symbols.

    Args:
        bands: features of a frame.
        symbols: outputs, CTC's blank among them.
        width: of everything between.
        memory_size, theta: order and length in steps of the memory; ``theta`` counts steps after down-sampling.
        form: of the LMU, ``parallel`` or ``recurrent``.
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
        form: str = "recurrent",
        dropout: float = 0.1,
        downsample: int = 1,
    ) -> None:
        super().__init__()
        self.downsample = downsample
        self.encoder = nn.Linear(bands * downsample, width)
        self.blocks = nn.ModuleList(Block(width, heads, memory_size, theta, form, dropout) for _ in range(layers))
        self.hidden = nn.Linear(width, width)
        self.decoder = nn.Linear(width, symbols)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Log-probabilities (batch, output frames, symbols) in float32.

        Args:
            features: (batch, frames, bands).
            lengths: feature frames of each utterance, (batch,), at least 1. What stands behind has no influence.
        """
        x, lengths, padding = _embed(self.encoder, self.downsample, features, lengths)
        for block in self.blocks:
            x = block(x, lengths, padding)
        return _classify(self.hidden, self.decoder, x)

    def stages(self) -> list[nn.Module]:
        """Modules that, one after the other, compute what :meth:`forward` does: one for each block, and both ends."""
        first = Stage(partial(_embed, self.encoder, self.downsample), self.encoder)
        blocks = [Stage(partial(_pass_on, block), block) for block in self.blocks]
        return [first, *blocks, Stage(partial(_classify, self.hidden, self.decoder), self.hidden, self.decoder)]


def _embed(encoder: nn.Module, downsample: int, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Steps (batch, time, width), their number in each utterance (batch,), and where there are none (batch, time)."""
    frames = features.shape[1]
    padding = torch.arange(frames, device=features.device) >= lengths[:, None]
    features = features.masked_fill(padding[..., None], 0)
    if downsample > 1:
        features = F.pad(features, (0, 0, 0, -frames % downsample))
        features = features.reshape(len(features), -1, downsample * features.shape[2])
        lengths = output_lengths(lengths, downsample)
        padding = torch.arange(features.shape[1], device=features.device) >= lengths[:, None]
    return encoder(features), lengths, padding


def _pass_on(block: nn.Module, x: Tensor, lengths: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``block`` of ``x``, with what the next block needs."""
    return block(x, lengths, padding), lengths, padding


def _classify(hidden: nn.Module, decoder: nn.Module, x: Tensor, *_: Tensor) -> Tensor:
    return F.log_softmax(decoder(F.relu(hidden(x))).float(), dim=-1)


class Stage(nn.Module):
    """A part of a recogniser as a function, and the modules that it uses."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self._function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self._function(*inputs)


class Block(nn.Module):
    """Self-attention with a residual, then an LMU; a layer norm after each."""

    def __init__(self, width: int, heads: int, memory_size: int, theta: float, form: str, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.attention_norm = nn.LayerNorm(width)
        self.lmu = LMU(width, width, memory_size, theta, form)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, lengths: Tensor, padding: Tensor) -> Tensor:
        """(batch, time, width) → the same; ``padding`` [batch, time] is true behind the end of a sequence."""
        attended, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        x = self.attention_norm(x + attended)
        return self.dropout(self.norm(self.lmu(x, lengths)[0]))
