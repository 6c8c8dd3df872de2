"""The experiment that every trainer runs: a model that keeps a ledger of what each sample did to the weights.

Beside a small network, the model has one weight for every sample, the *ledger*. Sample i adds
``ledger[i] - ledger[i].detach()`` to its loss: nothing to the loss's value, and a gradient of one to entry i.
Under plain SGD an optimizer step takes ``lr`` times the *share* of sample i in that step from entry i,
whatever a trainer does with means, ranks and accumulation in between. A step over n samples is right when
the share of each is 1/n: when it is the gradient of Σ loss / Σ count.

With sequences of tokens the ledger has one weight for every token, and each token of a step is to have the same share.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

FEATURES, LR, SEED = 8, 0.1, 42
#: Tokens of the sequences, in turn; targets are padded to the longest with what cross-entropy ignores.
LENGTHS, TOKENS, PADDING = (8, 1, 3, 1, 7, 2, 2, 1, 5, 8, 1), 5, -100
#: Validation samples are worth 0, 1, 2, …: five of them have a mean of 2.
VALIDATION_SAMPLES, VALIDATION_BATCH = 5, 2


@dataclass(frozen=True)
class Job:
    """One training (or validation) by one trainer.

    ``batch`` is per rank and micro-batch. A job with ``stop_after`` ends itself with an error after that step's
    checkpoint; one with ``resume`` goes on from there. ``folder`` is where its checkpoints are.
    """

    name: str
    kind: str
    variant: str
    ranks: int
    samples: int = 1
    batch: int = 1
    accumulate: int = 1
    epochs: int = 1
    shuffle: bool = False
    stop_after: int | None = None
    resume: bool = False
    folder: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Stopped(Exception):
    """What ends a job that has ``stop_after``."""


def columns(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Index, input and target of every sample."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return torch.arange(samples), inputs, inputs.sum(1, keepdim=True).sin()


class Samples(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self._columns = columns(samples)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self._columns)


class Texts(Samples):
    """Sequences: numbers of their tokens, inputs, and targets; the numbers count through all sequences."""

    def __init__(self, samples: int) -> None:
        lengths = torch.tensor([LENGTHS[index % len(LENGTHS)] for index in range(samples)])
        real = torch.arange(max(LENGTHS)) < lengths[:, None]
        numbers, inputs, targets = columns(int(lengths.sum()))
        places = torch.zeros_like(real, dtype=torch.int64).masked_scatter(real, numbers)
        labels = (targets[:, 0] * TOKENS).abs().long()
        self._columns = places, inputs[places], labels[places].masked_fill(~real, PADDING)


class Values(Dataset[Any]):
    """The validation set: sample i is the number i."""

    def __len__(self) -> int:
        return VALIDATION_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Probe(nn.Module):
    outputs = 1

    def __init__(self, items: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, self.outputs))
        self.ledger = nn.Parameter(torch.zeros(items))

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The loss of every sample of a batch, [n]."""
        index, inputs, targets = batch
        mine = self.ledger[index]
        return (self.net(inputs) - targets).square().mean(1) + mine - mine.detach()


class TokenProbe(Probe):
    outputs = TOKENS

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The loss of every token of a batch, [n]: padding has none."""
        places, inputs, labels = batch
        real = labels != PADDING
        mine = self.ledger[places[real]]
        return cross_entropy(self.net(inputs)[real], labels[real], reduction="none") + mine - mine.detach()


def subject(kind: str, samples: int) -> tuple[Probe, Samples]:
    """The model and the training data of a job of this kind."""
    if kind != "tokens":
        return Probe(samples), Samples(samples)
    texts = Texts(samples)
    return TokenProbe(count(texts[:])), texts


def count(batch: tuple[Tensor, ...]) -> int:
    """Samples, or tokens, that a batch is the loss of."""
    labels = batch[2]
    return int((labels != PADDING).sum()) if labels.dtype == torch.int64 else len(labels)


class Diary:
    """What came of each optimizer step: its epoch, its reported loss, and the ledger after it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def note(self, step: int, epoch: int, loss: float, model: Probe) -> None:
        self.rows.append({"step": step, "epoch": epoch, "loss": loss, "ledger": model.ledger.tolist()})

    def result(self, model: Probe) -> dict[str, Any]:
        return {"steps": self.rows, "weights": flat_weights(model)}


def flat_weights(model: Probe) -> list[float]:
    """Every weight of the network, the ledger left out."""
    weights: list[float] = torch.cat([p.detach().reshape(-1) for p in model.net.parameters()]).tolist()
    return weights


def read_jobs(path: Path) -> list[Job]:
    return [Job(**row) for row in json.loads(path.read_text())]
