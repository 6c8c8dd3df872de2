"""Small data and models that need no download: two classes, a ring of points, noisy views, and a toy environment."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

_numbers = torch.Generator().manual_seed(1)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# For the classifier and SimCLR: 8 features, the class is the sign of a product.
_inputs = torch.randn(1200, 8, generator=_numbers)
_labels = (_inputs[:, 0] * _inputs[:, 1] > 0).long()
train_set = TensorDataset(_inputs[:1000], _labels[:1000])
test_inputs, test_labels = _inputs[1000:], _labels[1000:]

# For the GAN: points of a ring, and the noise that goes with each.
_angles = torch.rand(1000, generator=_numbers) * 2 * math.pi
_ring = torch.stack((_angles.cos(), _angles.sin()), 1)
ring_set = TensorDataset(_ring, torch.randn(1000, 4, generator=_numbers))


class Views(Dataset[tuple[Tensor, Tensor]]):
    """Two noisy views of each input. The noise belongs to the sample."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.Generator().manual_seed(index)
        one, two = 0.1 * torch.randn(2, 8, generator=noise)
        return _inputs[index] + one, _inputs[index] + two


def nt_xent(one: Tensor, two: Tensor, temperature: float = 0.5) -> Tensor:
    """The mean NT-Xent loss of two views of a batch (Chen et al. 2020, https://arxiv.org/abs/2002.05709)."""
    z = nn.functional.normalize(torch.cat((one, two)), dim=1)
    similarity = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    partners = torch.arange(len(z)).roll(len(one))
    return nn.functional.cross_entropy(similarity, partners)


def play(policy: nn.Module, seed: int, steps: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """An episode of a walk on a line towards 0: states [t, 1], log-probabilities [t] and returns [t]."""
    random = torch.Generator().manual_seed(seed)
    state = 4 * torch.rand(1, generator=random) - 2
    states, chosen, rewards = [], [], []
    for _ in range(steps):
        logits = policy(state).log_softmax(0)
        action = int(torch.rand((), generator=random) < logits[1].exp())
        states.append(state)
        chosen.append(logits[action])
        state = state + (0.3 if action else -0.3)
        rewards.append(-state.abs())
    returns = torch.cat(rewards).flip(0).cumsum(0).flip(0)
    return torch.stack(states), torch.stack(chosen), returns
