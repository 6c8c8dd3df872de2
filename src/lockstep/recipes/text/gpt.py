"""A small decoder-only transformer: token ids (batch, time) to logits (batch, time, vocabulary)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention to the past, then a feed-forward layer of four times the width."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor, angles: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, time, width = hidden.shape
        parts = self.qkv(self.norm_attention(hidden)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        query = rotated(query, angles)
        key = rotated(key, angles)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, is_causal=mask is None)
        hidden = hidden + F.dropout(self.out(attended.transpose(1, 2).reshape(batch, time, width)), dropout)
        return hidden + F.dropout(self.mlp(self.norm_mlp(hidden)), dropout)


def rotated(values: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021, arXiv 2104.09864); ``angles``: (…, time, half the width)."""
    first, second = values.chunk(2, dim=-1)
    cosine = angles.cos().to(values.dtype)
    sine = angles.sin().to(values.dtype)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


class Gpt(nn.Module):
    """After Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", with tied embeddings.

    Args:
        vocabulary: number of tokens.
        context: longest sequence.
        width: features of a token; a multiple of ``heads``, with an even quotient.
    """

    angles: Tensor

    def __init__(
        self,
        vocabulary: int,
        context: int,
        *,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"the width {width} must be a multiple of twice the {heads} heads")
        self.context = context
        self.dropout = dropout
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        half = width // heads // 2
        rates = 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("angles", torch.arange(context)[:, None] * rates, persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "mlp.2.weight")):  # added to the residual stream
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        """Return logits.

        Args:
            attention_mask: which positions each position attends to, boolean, (batch, 1, time, time); ``None``: to
                itself and those before.
            position_ids: (batch, time); ``None``: from 0.
        """
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
        angles = self.angles[position_ids].unsqueeze(1)
        hidden = F.dropout(self.tokens(ids), self.dropout, self.training)
        for block in self.blocks:
            hidden = block(hidden, angles, attention_mask)
        return F.linear(self.norm(hidden), self.tokens.weight)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    tokens: int,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    end: int | None = None,
) -> list[int]:
    """Generate ``tokens`` ids that follow ``prompt``; fewer where ``end`` is drawn.

    Args:
        model: in evaluation mode: a :class:`Gpt`, or one whose ``forward(ids)`` returns logits.
        prompt: at least one id.
        context: longest sequence that the model takes; of a longer one the second half is kept.
        temperature: 0 takes the most probable token.
        top_k: draw from the most probable ones only.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    sequence = list(prompt)
    for _ in range(tokens):
        logits = model(torch.tensor([sequence[-context:]], device=device))
        scores = logits[0, -1].float().cpu()
        if top_k is not None:
            scores[scores < scores.topk(min(top_k, len(scores))).values[-1]] = -torch.inf
        probabilities = (scores / temperature).softmax(0) if temperature else None
        drawn = int(scores.argmax() if probabilities is None else probabilities.multinomial(1, generator=generator))
        if drawn == end:
            break
        sequence.append(drawn)
    return sequence[len(prompt) :]
