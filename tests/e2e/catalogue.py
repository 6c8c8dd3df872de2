"""A catalogue of ordinary PyTorch: models, losses, optimizers and data sets as people write them, each as a small task.

``test_ordinary_pytorch.py`` trains every entry on one, two and three ranks against a plain PyTorch loop, and prints the
table of ``docs/ordinary-pytorch.md`` from it.
"""

from __future__ import annotations

import io
import math
import random
import sqlite3
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

import lockstep
from lockstep import Datasets, Loss, Task

SAMPLES, FEATURES, CLASSES = 22, 6, 3


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue.

    Attributes:
        refused: words of the error with which a run is refused before its first step, by mode (``fast``, ``exact``)
            and number of ranks (``one``, ``many``); a key of ``""`` is all of them.
        draws: the forward pass draws random numbers, so in fast mode ranks draw their own: from ``torch``, or from
            ``python`` or NumPy, whose generators the plain loop of the test does not follow.
        batch_statistics: a sample's output depends on its batch, so exact mode (per lane) is not the plain loop.
        depends_on_cut: a sample's output depends on its micro-batch, so fast mode differs with the number of ranks.
        tolerance: largest difference of a weight between runs that are equal to rounding.
        settings: of the run, beside the common ones.
    """

    name: str
    group: str
    task: type[Task]
    refused: Mapping[str, str] = field(default_factory=dict)
    draws: str = ""
    batch_statistics: bool = False
    depends_on_cut: bool = False
    tolerance: float = 2e-5
    settings: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""

    def refusal(self, mode: str, where: str) -> str | None:
        return self.refused.get("") or self.refused.get(mode) or self.refused.get(where)


CATALOGUE: list[Entry] = []


def entry(name: str, group: str, **traits: Any) -> Callable[[type[Task]], type[Task]]:
    def add(task: type[Task]) -> type[Task]:
        CATALOGUE.append(Entry(name, group, task, **traits))
        return task

    return add


def points(samples: int = SAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs [samples, features] and classes [samples]."""
    inputs = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))
    rule = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(99))
    return inputs, (inputs @ rule).argmax(1)


def images(samples: int = SAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images [samples, 2, 6, 6] and classes [samples]."""
    inputs = torch.randn(samples, 2, 6, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs.mean((2, 3)).argmax(1) + (inputs[:, 0, 0, 0] > 0)).long()


def sentences(samples: int = SAMPLES, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Tokens [2 to 7] from 12 words, each with the next one as its label."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 8, (samples,), generator=draw).tolist()
    lines = [torch.randint(0, 12, (length + 1,), generator=draw) for length in lengths]
    return [(line[:-1], line[1:]) for line in lines]


class Classifier(Task):
    """The start of most entries: a small network over :func:`points`."""

    def datasets(self) -> Datasets:
        return Datasets(train=TensorDataset(*points()), val=TensorDataset(*points(7, 1)))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        return Loss(F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return model(batch[0]), batch[1]

    def metrics(self) -> Any:
        return Accuracy()


class Accuracy:
    def __init__(self) -> None:
        self.right = self.seen = 0

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.right += int((scores.argmax(-1) == labels).sum())
        self.seen += labels.numel()

    def compute(self) -> dict[str, float]:
        return {"accuracy": self.right / self.seen}


class ImageClassifier(Classifier):
    def datasets(self) -> Datasets:
        return Datasets(train=TensorDataset(*images()), val=TensorDataset(*images(7, 1)))


class Tagger(Classifier):
    """Sentences, padded where they are collated; the loss counts tokens."""

    def datasets(self) -> Datasets:
        return Datasets(train=sentences(), val=sentences(7, 1))

    def collate(self, samples: Sequence[Any]) -> Any:
        words, labels = zip(*samples, strict=True)
        return pad_sequence(words, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, labels = batch
        scores = model(words)
        return Loss(F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum())

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        words, labels = batch
        scores = F.pad(model(words), (0, 0, 0, 8 - words.shape[1]))
        return scores, F.pad(labels, (0, 8 - words.shape[1]), value=-100)


# Models


@entry("multi-layer perceptron", "models")
class Perceptron(Classifier):
    pass


@entry("CNN with GroupNorm", "models")
class GroupNormCnn(ImageClassifier):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
        )


@entry("CNN in channels_last", "models")
class ChannelsLast(GroupNormCnn):
    def model(self) -> nn.Module:
        return super().model().to(memory_format=torch.channels_last)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, [batch[0].contiguous(memory_format=torch.channels_last), batch[1]])


class Encoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(8, 12)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        scores: Tensor = self.head(self.body(self.words(words), mask=mask, is_causal=True))
        return scores


@entry("nn.TransformerEncoder, causal", "models")
class Transformer(Tagger):
    def model(self) -> nn.Module:
        return Encoder(dropout=0.0)


@entry("nn.TransformerEncoder with dropout", "models", draws="torch")
class TransformerDropout(Tagger):
    def model(self) -> nn.Module:
        return Encoder(dropout=0.2)


@entry("Lightning's demo Transformer (code of a package)", "models", draws="torch")
class LightningTransformer(Task):
    def datasets(self) -> Datasets:
        words = torch.randint(0, 12, (SAMPLES, 7), generator=torch.Generator().manual_seed(0))
        data = TensorDataset(words[:, :-1], words[:, 1:])
        return Datasets(train=data, val=Subset(data, range(5)))

    def model(self) -> nn.Module:
        from lightning.pytorch.demos import Transformer as Demo

        return Demo(vocab_size=12, ninp=8, nhead=2, nhid=16, nlayers=1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, labels = batch
        return Loss(F.nll_loss(model(words, labels), labels.flatten(), reduction="sum"), labels.numel())


class WithPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.memory, self.head = nn.Embedding(12, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 12)

    def forward(self, words: PackedSequence) -> Tensor:
        inputs = words._replace(data=self.words(words.data))
        scores: Tensor = self.head(self.memory(inputs)[0].data)
        return scores


@entry("LSTM over a PackedSequence", "models")
class Packed(Tagger):
    def model(self) -> nn.Module:
        return WithPacked()

    def collate(self, samples: Sequence[Any]) -> Any:
        words, labels = zip(*samples, strict=True)
        return pack_sequence(words, enforce_sorted=False), pack_sequence(labels, enforce_sorted=False)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, labels = batch
        return Loss(F.cross_entropy(model(words), labels.data, reduction="sum"), len(labels.data))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        words, labels = batch
        pairs = words._replace(data=model(words)), labels
        return tuple(pad_packed_sequence(packed, True, total_length=8)[0] for packed in pairs)


@entry("bidirectional GRU, padded", "models", depends_on_cut=True,
       remark="the reverse direction reads the padding: pack the sequences")  # fmt: skip
class Gru(Tagger):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(12, 6, padding_idx=0)
            self.memory, self.head = nn.GRU(6, 5, batch_first=True, bidirectional=True), nn.Linear(10, 12)

        def forward(self, words: Tensor) -> Tensor:
            scores: Tensor = self.head(self.memory(self.words(words))[0])
            return scores

    def model(self) -> nn.Module:
        return self.Net()


@entry("tied weights (embedding and output)", "models")
class Tied(Tagger):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
            self.head.weight = self.words.weight

        def forward(self, words: Tensor) -> Tensor:
            scores: Tensor = self.head(torch.tanh(self.body(self.words(words))))
            return scores

    def model(self) -> nn.Module:
        return self.Net()


@entry("one module used twice", "models")
class UsedTwice(Classifier):
    def model(self) -> nn.Module:
        shared = nn.Linear(8, 8)
        return nn.Sequential(nn.Linear(FEATURES, 8), shared, nn.Tanh(), shared, nn.Linear(8, CLASSES))


@entry("activation checkpointing (torch.utils.checkpoint)", "models")
class Checkpointed(Classifier):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            scores: Tensor = self.last(checkpoint(lambda x: torch.tanh(self.first(x)), inputs, use_reentrant=False))
            return scores

    def model(self) -> nn.Module:
        return self.Net()


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


@entry("a custom autograd.Function", "models")
class CustomFunction(Classifier):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(FEATURES, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            scores: Tensor = _Scaled.apply(self.body(inputs))
            return scores

    def model(self) -> nn.Module:
        return self.Net()


@entry("complex parameters", "models", settings={"optimizer": {"name": "sgd", "momentum": 0.0}})
class Complex(Classifier):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex64) * 0.3)

        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs.to(torch.complex64) @ self.mix).abs()

    def model(self) -> nn.Module:
        return self.Net()


@entry("complex parameters without clipping", "models", settings={"training": {"max_grad_norm": None}})
class ComplexUnclipped(Complex):
    pass


@entry("lazy layers (nn.LazyLinear)", "models", refused={"": "lazy"},
       remark="run one batch through the model in model()")  # fmt: skip
class Lazy(Classifier):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, CLASSES))


@entry("lazy layers initialised in model()", "models")
class LazyDone(Classifier):
    def model(self) -> nn.Module:
        net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, CLASSES))
        net(torch.zeros(2, FEATURES))
        return net


@entry("a model that the task keeps", "models")
class Cached(Classifier):
    net: nn.Module | None = None

    def model(self) -> nn.Module:
        if self.net is None:
            self.net = super().model()
        return self.net


@entry("float64 model", "models")
class Double(Classifier):
    def model(self) -> nn.Module:
        return super().model().double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, [batch[0].double(), batch[1]])

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return super().evaluate(model, [batch[0].double(), batch[1]])


@entry("variational autoencoder (draws in forward and in evaluation)", "models", draws="torch")
class Vae(Classifier):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(FEATURES, 6), nn.Linear(3, FEATURES)

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_var = self.encode(inputs).chunk(2, 1)
            return self.decode(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var

    def model(self) -> nn.Module:
        return self.Net()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        again, mean, log_var = model(batch[0])
        divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum()
        return Loss(F.mse_loss(again, batch[0], reduction="sum") + divergence, len(batch[0]))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return model(batch[0])[0].argmax(1, keepdim=True), batch[1]


# Fine-tuning: what is trained, and when


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.backbone(inputs))
        return scores


@entry("frozen backbone", "fine-tuning")
class Frozen(Classifier):
    def model(self) -> nn.Module:
        net = Backbone()
        net.backbone.requires_grad_(False)
        return net


@entry("frozen backbone, AdamW over model.parameters()", "fine-tuning", tolerance=2e-4)
class FrozenAdamW(Frozen):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Freezing(lockstep.Callback):
    """Unfreezes the backbone when epoch 1 begins."""

    def on_epoch_start(self, context: Any, model: nn.Module) -> None:
        model.backbone.requires_grad_(context.epoch >= 1)  # type: ignore[union-attr]


@entry("backbone unfrozen at epoch 1 (callback)", "fine-tuning")
class Unfrozen(Frozen):
    def callbacks(self) -> Sequence[Any]:
        return [Freezing()]


@entry("backbone unfrozen by a hook after step 2, resumed behind it", "fine-tuning")
class UnfrozenByHook(Frozen):
    def hooks(self) -> Any:
        def unfreeze(result: Any, model: Any) -> None:
            if result.step == 2:
                model.backbone.requires_grad_(True)

        return [(unfreeze, 1)]


@entry("backbone unfrozen at epoch 1, BatchNorm and Adam", "fine-tuning", tolerance=2e-4, batch_statistics=True)
class UnfrozenBatchNorm(Unfrozen):
    def model(self) -> nn.Module:
        net = Backbone()
        net.backbone = nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())
        net.backbone.requires_grad_(False)
        return net

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2)


class _FixedNorm(Backbone):
    """As fine-tuning recipes do: BatchNorm stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.backbone[1].eval()
        return self


@entry("BatchNorm kept in evaluation mode", "fine-tuning")
class FixedNorm(Classifier):
    def model(self) -> nn.Module:
        return _FixedNorm()


@entry("LoRA: low-rank additions to a frozen layer", "fine-tuning")
class Lora(Classifier):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
            self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, inputs: Tensor) -> Tensor:
            scores: Tensor = self.base(inputs) + self.up(self.down(inputs))
            return scores

    def model(self) -> nn.Module:
        return self.Net()


# Normalisation


@entry("CNN with BatchNorm2d", "normalisation", batch_statistics=True)
class BatchNormCnn(ImageClassifier):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 3),
        )  # fmt: skip


@entry("BatchNorm where one sample is left over", "normalisation", batch_statistics=True)
class BatchNormTail(BatchNormCnn):
    def datasets(self) -> Datasets:
        return Datasets(train=TensorDataset(*images(25)), val=TensorDataset(*images(7, 1)))


@entry("BatchNorm with momentum=None and no running statistics", "normalisation", batch_statistics=True)
class OddBatchNorm(ImageClassifier):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4, momentum=None), nn.ReLU(),
            nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4, track_running_stats=False, affine=False), nn.ReLU(),
            nn.Flatten(), nn.Linear(16, 3),
        )  # fmt: skip


@entry("InstanceNorm with running statistics beside BatchNorm", "normalisation", batch_statistics=True)
class Instance(ImageClassifier):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ReLU(),
            nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3),
        )  # fmt: skip


@entry("spectral_norm (parametrization)", "normalisation")
class Spectral(Classifier):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES)
        )


@entry("weight_norm (parametrization)", "normalisation")
class WeightNorm(Classifier):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES)
        )


# Buffers


class _Rotary(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.body = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.body(inputs * self.table))


@entry("one buffer registered by several layers (rotary table)", "buffers")
class SharedBuffer(Classifier):
    def model(self) -> nn.Module:
        table = torch.linspace(0.5, 1.5, FEATURES)
        return nn.Sequential(_Rotary(table), _Rotary(table), nn.Linear(FEATURES, CLASSES))


class _Cache(nn.Module):
    """A position table that is made again when a longer input comes."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1, 8), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.shape[1] > len(self.table):
            self.table = torch.arange(inputs.shape[1] * 8, dtype=inputs.dtype).view(-1, 8).sin()
        return inputs + self.table[: inputs.shape[1]]


@entry("a position table that grows with the input", "buffers")
class GrowingTable(Tagger):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(12, 8), _Cache(), nn.Linear(8, 12))


@entry("a buffer removed in the first forward pass", "buffers")
class RemovedBuffer(Classifier):
    class Net(Backbone):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            if "scale" in self._buffers:
                del self.scale
            return super().forward(inputs)

    def model(self) -> nn.Module:
        return self.Net()


@entry("a buffer of int16, and one made by expand()", "buffers")
class RareBuffers(Classifier):
    class Net(Backbone):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("numbers", torch.tensor([3, 5], dtype=torch.int16))
            self.register_buffer("wide", torch.tensor([[1.5], [2.5]]).expand(2, 4))

    def model(self) -> nn.Module:
        return self.Net()


class _Counted(nn.Module):
    buffer_reduction: ClassVar[dict[str, str]] = {"seen": "sum"}
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += len(inputs)
        return inputs


@entry("a declared counter beside BatchNorm", "buffers", batch_statistics=True, refused={"exact": "seen"})
class Counter(Classifier):
    def model(self) -> nn.Module:
        return nn.Sequential(
            _Counted(), nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)
        )


class _Undeclared(_Counted):
    buffer_reduction: ClassVar[dict[str, str]] = {}


@entry("an undeclared counter", "buffers", refused={"many": "seen", "exact": "seen"})
class UndeclaredCounter(Classifier):
    def model(self) -> nn.Module:
        return nn.Sequential(_Undeclared(), nn.Linear(FEATURES, CLASSES))


# Losses


@entry("loss per token, lines of different lengths", "losses")
class Tokens(Tagger):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12))


@entry("steps whose labels are all ignored", "losses")
class Ignored(Classifier):
    def datasets(self) -> Datasets:
        inputs, labels = points()
        return Datasets(train=TensorDataset(inputs, torch.where(torch.arange(SAMPLES) % 4 == 0, labels, -100)))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        return Loss(F.cross_entropy(model(inputs), labels, reduction="sum"), (labels >= 0).sum())


@entry("class weights: Σ weight as the count", "losses")
class Weighted(Classifier):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        weights = torch.tensor([1.0, 2.0, 0.5])
        return Loss(F.cross_entropy(model(inputs), labels, weight=weights, reduction="sum"), weights[labels].sum())


@entry("count of shape (1,)", "losses")
class CountOfOne(Classifier):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        return Loss(total, torch.tensor([count]))


@entry("a mean instead of a sum", "losses", refused={"": "not a lockstep.Loss"}, remark="return Loss(sum, count)")
class Mean(Classifier):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])


@entry("CTC loss", "losses", tolerance=5e-5)
class Ctc(Tagger):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 13))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, labels = batch
        lengths = (labels != -100).sum(1)
        scores = model(words).log_softmax(2).transpose(0, 1)
        spoken = labels[:, :1] + 1
        return Loss(F.ctc_loss(scores, spoken, lengths, torch.ones_like(lengths), reduction="sum"), len(words))


@entry("criterion with parameters (ArcFace) by Task.modules()", "losses")
class ArcFace(Classifier):
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(CLASSES, 8))

        def forward(self, features: Tensor, labels: Tensor) -> Tensor:
            cosine = F.linear(F.normalize(features), F.normalize(self.weight)).clamp(-0.99, 0.99)
            margin = F.one_hot(labels, CLASSES) * 0.1
            return F.cross_entropy(8 * torch.cos(torch.acos(cosine) + margin), labels, reduction="sum")

    def model(self) -> nn.Module:
        self.head = self.Head()
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8))

    def modules(self) -> Mapping[str, nn.Module]:
        return {"head": self.head}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(self.head(model(batch[0]), batch[1]), len(batch[1]))


@entry("optimizer with a parameter outside the model (learned temperature)", "losses", refused={"": "modules"},
       remark="return it from Task.modules()")  # fmt: skip
class Stray(Classifier):
    def model(self) -> nn.Module:
        self.temperature = nn.Parameter(torch.ones(()))
        return super().model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), self.temperature], lr=0.05)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        return Loss(F.cross_entropy(model(inputs) * self.temperature, labels, reduction="sum"), len(labels))


@entry("mixup drawn by NumPy in the loss", "losses", draws="python")
class Mixup(Classifier):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        if model.training:
            share = float(np.random.beta(2.0, 2.0))
            inputs = share * inputs + (1 - share) * inputs.flip(0)
        return super().loss(model, [inputs, labels])


@entry("loss scheduled by step and epoch (Task.context)", "losses")
class Scheduled(Classifier):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        if self.context.is_training:
            total = total * (0.5 + 0.1 * self.context.step + self.context.epoch)
        return Loss(total, count)


# Optimizers and schedules


def with_optimizer(make: Callable[[nn.Module], torch.optim.Optimizer], base: type[Task] = Classifier) -> type[Task]:
    return type("WithOptimizer", (base,), {"optimizer": lambda self, model: make(model), "__module__": __name__})


for _name, _make, _traits in (
    ("SGD with Nesterov momentum", lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9, nesterov=True), {}),
    ("Adam", lambda m: torch.optim.Adam(m.parameters(), 1e-2), {"tolerance": 2e-4}),
    ("AdamW, amsgrad", lambda m: torch.optim.AdamW(m.parameters(), 1e-2, amsgrad=True), {"tolerance": 2e-4}),
    ("RAdam", lambda m: torch.optim.RAdam(m.parameters(), 1e-2), {"tolerance": 2e-4}),
    ("NAdam", lambda m: torch.optim.NAdam(m.parameters(), 1e-2), {"tolerance": 2e-4}),
    ("Adagrad", lambda m: torch.optim.Adagrad(m.parameters(), 1e-2), {"tolerance": 2e-4}),
    ("RMSprop", lambda m: torch.optim.RMSprop(m.parameters(), 1e-3), {"tolerance": 2e-4}),
    ("Adafactor", lambda m: torch.optim.Adafactor(m.parameters(), 1e-2), {"tolerance": 2e-4}),
    ("ASGD", lambda m: torch.optim.ASGD(m.parameters(), 1e-2), {}),
):
    entry(_name, "optimizers", **_traits)(with_optimizer(_make))


@entry("parameter groups with rates and decays of their own", "optimizers")
class Groups(Classifier):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.01}], lr=0.05)


@entry("only a part of the model in the optimizer", "optimizers")
class PartOfModel(Classifier):
    def model(self) -> nn.Module:
        return Backbone()

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.head.parameters(), lr=0.05)


class DAdapted(torch.optim.Optimizer):
    """State in ``param_groups``, as Prodigy, D-Adaptation and Schedule-Free keep it."""

    def __init__(self, parameters: Any, lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr, "d": 1e-2, "k": 0, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    group["numerator"] += float((p.grad**2).sum())
                    p.sub_(p.grad, alpha=group["lr"] * group["d"])
            group["k"] += 1
            group["d"] = max(group["d"], 0.02 * math.sqrt(group["numerator"]) / group["k"])


entry("state in param_groups (Prodigy, D-Adaptation, Schedule-Free)", "optimizers")(
    with_optimizer(lambda m: DAdapted(m.parameters()))
)


entry("L-BFGS", "optimizers", refused={"": "closure"})(
    with_optimizer(lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1))
)


@entry(
    "sparse embedding gradients, without clipping",
    "optimizers",
    refused={"many": "sparse", "exact": "sparse"},
    settings={"training": {"max_grad_norm": None}},
    remark="one device in fast mode; else nn.Embedding(sparse=False)",
)
class Sparse(Tagger):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(12, 8, sparse=True), nn.Linear(8, 12))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)


@entry(
    "nn.Embedding(max_norm=…)",
    "optimizers",
    refused={"many": "max_norm", "exact": "max_norm"},
    remark="one device in fast mode; else shorten the rows in a hook",
)
class MaxNorm(Tagger):
    def datasets(self) -> Datasets:
        return Datasets(train=sentences())  # a forward pass of an evaluation would shorten rows, too

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(12, 8, max_norm=1.0), nn.Linear(8, 12))


@entry(
    "nn.Embedding(scale_grad_by_freq=True)",
    "optimizers",
    depends_on_cut=True,
    remark="the frequencies are those of a micro-batch",
)
class ScaledByFrequency(Tagger):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(12, 8, scale_grad_by_freq=True), nn.Linear(8, 12))


class _Sometimes(Backbone):
    """A branch that takes part only where a sample asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.backbone(inputs)
        scores: Tensor = self.head(features)
        chosen = inputs[:, 0] > 0.8
        if chosen.any():
            scores = scores + chosen[:, None] * self.rare(features)
        return scores


@entry("a branch used in some steps only, with weight decay", "optimizers", tolerance=2e-4,
       settings={"distributed": {"find_unused_parameters": True}})  # fmt: skip
class Branch(Classifier):
    def model(self) -> nn.Module:
        return _Sometimes()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)


@entry("a layer that is never used, with weight decay", "optimizers",
       settings={"distributed": {"find_unused_parameters": True}})  # fmt: skip
class NeverUsed(Classifier):
    """The last step has one sample: all ranks but one are empty, and gradients are reduced by hand."""

    def datasets(self) -> Datasets:
        return Datasets(train=TensorDataset(*points(19)), val=TensorDataset(*points(7, 1)))

    def model(self) -> nn.Module:
        net = Backbone()
        net.spare = nn.Linear(2, 2)
        return net

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.5)


@entry("add_param_group in a callback", "optimizers")
class AddedGroup(Classifier):
    def model(self) -> nn.Module:
        return Backbone()

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        self.made = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
        return self.made

    def callbacks(self) -> Sequence[Any]:
        task = self

        class Adding(lockstep.Callback):
            def on_epoch_start(self, context: Any, model: Any) -> None:
                if context.epoch == 1 and len(task.made.param_groups) == 1:
                    task.made.add_param_group({"params": list(model.backbone.parameters()), "lr": 0.02})

        return [Adding()]


@entry("Adam's state reset in a callback", "optimizers", tolerance=2e-4)
class ResetState(Classifier):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.made = torch.optim.Adam(model.parameters(), lr=1e-2)
        return self.made

    def callbacks(self) -> Sequence[Any]:
        task = self

        class Resetting(lockstep.Callback):
            def on_step_start(self, context: Any, model: Any) -> None:
                if context.step == 2:
                    task.made.state.clear()

        return [Resetting()]


@entry("exponential moving average of weights (callback)", "optimizers")
class Ema(Classifier):
    def model(self) -> nn.Module:
        net = super().model()
        self.average = {name: p.detach().clone() for name, p in net.named_parameters()}
        return net

    def callbacks(self) -> Sequence[Any]:
        task = self

        class Averaging(lockstep.Callback):
            def on_step_end(self, context: Any, model: nn.Module) -> None:
                for name, p in model.named_parameters():
                    task.average[name].lerp_(p.detach(), 0.1)

        return [Averaging()]

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


def with_scheduler(make: Callable[[torch.optim.Optimizer], Any]) -> type[Task]:
    base = with_optimizer(lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9))
    members = {"scheduler": lambda self, optimizer: make(optimizer), "__module__": __name__}
    return type("WithScheduler", (base,), members)


lr_scheduler = torch.optim.lr_scheduler
entry("OneCycleLR (momentum too) from Task.scheduler", "optimizers")(
    with_scheduler(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20))
)
entry("StepLR by epoch from Task.scheduler", "optimizers")(
    with_scheduler(lambda o: lockstep.Scheduler(lr_scheduler.StepLR(o, 1, gamma=0.5), interval="epoch"))
)
entry("ReduceLROnPlateau from Task.scheduler", "optimizers")(
    with_scheduler(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0, factor=0.5))
)


# Data sets


class ByItem(Dataset[Any]):
    """A class with ``__len__`` and ``__getitem__``, as most are."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda inputs: inputs, samples: int = SAMPLES) -> None:
        self.inputs, self.labels = points(samples)
        self.change = change

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.change(self.inputs[index]), self.labels[index]


def with_data(make: Callable[[], Any], base: type[Task] = Classifier, **members: Any) -> type[Task]:
    def datasets(self: Any) -> Datasets:
        return Datasets(train=make(), val=TensorDataset(*points(7, 1)))

    return type("WithData", (base,), {"datasets": datasets, "__module__": __name__, **members})


for _name, _change in (
    ("augmentation drawn from random", lambda x: x * random.uniform(0.5, 1.5)),
    ("augmentation drawn from numpy.random", lambda x: x * float(np.random.uniform(0.5, 1.5))),
    ("augmentation drawn from torch", lambda x: x + 0.3 * torch.randn(FEATURES)),
):
    entry(_name, "data sets")(with_data(lambda change=_change: ByItem(change)))

entry("class with __getitem__", "data sets")(with_data(ByItem))
entry("Subset of a class with __getitem__", "data sets")(with_data(lambda: Subset(ByItem(samples=40), range(3, 25))))
entry("ConcatDataset", "data sets")(
    with_data(lambda: ConcatDataset([TensorDataset(*points(9, 2)), ByItem(samples=13)]))
)
entry("a list of tuples", "data sets")(with_data(lambda: list(zip(*points(), strict=True))))


class Keyed(ByItem):
    def sample(self, index: int, rng: np.random.Generator) -> Any:
        return self.inputs[index] * float(rng.uniform(0.5, 1.5)), self.labels[index]


entry("Subset of a data set with sample(index, rng)", "data sets")(
    with_data(lambda: Subset(Keyed(samples=40), range(3, 25)))
)


class Scaling(lockstep.Callback):
    def __init__(self, samples: ByItem) -> None:
        self.samples = samples

    def on_epoch_start(self, context: Any, model: nn.Module) -> None:
        self.samples.change = lambda inputs: inputs * (1 + context.epoch)


@entry("a data set that a callback changes in each epoch", "data sets")
class ChangingData(Classifier):
    def datasets(self) -> Datasets:
        self.samples = ByItem()
        return Datasets(train=self.samples, val=TensorDataset(*points(7, 1)))

    def callbacks(self) -> Sequence[Any]:
        return [Scaling(self.samples)]


@entry("random_split without a generator", "data sets")
class RandomSplit(Classifier):
    def datasets(self) -> Datasets:
        train, val = random_split(TensorDataset(*points(30)), [SAMPLES, 8])
        return Datasets(train=train, val=val)


class Records(NamedTuple):
    inputs: Tensor
    labels: Tensor


@entry("dictionaries of tensors, with strings", "data sets")
class Dictionaries(Classifier):
    class Data(ByItem):
        def __getitem__(self, index: int) -> Any:
            return {"x": self.inputs[index], "y": self.labels[index], "name": f"sample {index}"}

    def datasets(self) -> Datasets:
        return Datasets(train=self.Data(), val=self.Data())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, [batch["x"], batch["y"]])

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return super().evaluate(model, [batch["x"], batch["y"]])


@entry("named tuples", "data sets")
class NamedTuples(Classifier):
    class Data(ByItem):
        def __getitem__(self, index: int) -> Any:
            return Records(self.inputs[index], self.labels[index])

    def datasets(self) -> Datasets:
        return Datasets(train=self.Data(), val=self.Data())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, (batch.inputs, batch.labels))


class Graph:
    """A batch class of a package's own, with ``to`` and ``pin_memory``."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        return Graph(self.inputs.to(device), self.labels.to(device))

    def pin_memory(self) -> Graph:
        return Graph(self.inputs.pin_memory(), self.labels.pin_memory())


@entry("a custom batch class", "data sets")
class CustomBatch(Classifier):
    def collate(self, samples: Sequence[Any]) -> Any:
        return Graph(*(torch.stack(column) for column in zip(*samples, strict=True)))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, (batch.inputs, batch.labels))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return model(batch.inputs), batch.labels


class FileBacked(Dataset[Any]):
    """One open file for all reads: seek, then read."""

    def __init__(self) -> None:
        inputs, self.labels = points()
        self.file: Any = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the data set
        self.file.write(inputs.numpy().tobytes())

    def __del__(self) -> None:
        self.file.close()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.file.seek(index * FEATURES * 4)
        return torch.frombuffer(bytearray(self.file.read(FEATURES * 4)), dtype=torch.float32), self.labels[index]


@entry("one open file for training and validation", "data sets")
class OneFile(Classifier):
    def datasets(self) -> Datasets:
        data = FileBacked()
        return Datasets(train=data, val=data)


class Table(Dataset[Any]):
    """Rows of an SQLite database, whose connection belongs to the thread that opened it."""

    def __init__(self) -> None:
        inputs, labels = points()
        self.base = sqlite3.connect(":memory:")
        self.base.execute("create table points (id integer primary key, x blob, y integer)")
        rows = [(i, x.numpy().tobytes(), int(y)) for i, (x, y) in enumerate(zip(inputs, labels, strict=True))]
        self.base.executemany("insert into points values (?, ?, ?)", rows)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = self.base.execute("select x, y from points where id = ?", (index,)).fetchone()
        return torch.frombuffer(bytearray(x), dtype=torch.float32), y


entry("an SQLite table", "data sets")(with_data(Table))


class Mapped(ByItem):
    def __init__(self) -> None:
        super().__init__()
        file = Path(tempfile.mkstemp(suffix=".npy")[1])
        np.save(file, self.inputs.numpy())
        self.rows = np.load(file, mmap_mode="r")
        file.unlink()

    def __getitem__(self, index: int) -> Any:
        return np.array(self.rows[index]), self.labels[index]


entry("a NumPy memory map", "data sets")(with_data(Mapped))


@entry("images decoded from bytes with PIL", "data sets")
class Pictures(ImageClassifier):
    class Data(Dataset[Any]):
        def __init__(self, samples: int) -> None:
            from PIL import Image

            draw = np.random.default_rng(samples)
            self.files = []
            for _ in range(samples):
                buffer = io.BytesIO()
                Image.fromarray(draw.integers(0, 255, (6, 6, 3), np.uint8)).save(buffer, "png")
                self.files.append(buffer.getvalue())

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, index: int) -> Any:
            from PIL import Image

            pixels = np.asarray(Image.open(io.BytesIO(self.files[index])), np.float32) / 255
            return pixels.transpose(2, 0, 1), int(pixels.mean() * 1000) % CLASSES

    def datasets(self) -> Datasets:
        return Datasets(train=self.Data(SAMPLES), val=self.Data(7))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES))


@entry("StopIteration in __getitem__", "data sets", refused={"": "StopIteration"})
class Stopping(Classifier):
    class Data(ByItem):
        def __getitem__(self, index: int) -> Any:
            if index == 11:
                return next(iter([]))
            return super().__getitem__(index)

    def datasets(self) -> Datasets:
        return Datasets(train=self.Data())


@entry(
    "IterableDataset without a length",
    "data sets",
    refused={"": "iterable"},
    remark="set data.epoch_samples or training.max_steps",
)
class Streamed(Classifier):
    class Data(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(*points(), strict=True))

    def datasets(self) -> Datasets:
        return Datasets(train=self.Data())


@entry("validation loss alone (no evaluate, no metrics)", "data sets")
class LossAlone(Task):
    datasets, model, loss = Classifier.datasets, Classifier.model, Classifier.loss


@entry("no validation data", "data sets")
class NoValidation(Classifier):
    def datasets(self) -> Datasets:
        return Datasets(train=TensorDataset(*points()))


def table() -> str:
    """The catalogue in Markdown, for ``docs/ordinary-pytorch.md``."""
    groups = dict.fromkeys(entry.group for entry in CATALOGUE)
    parts = []
    for group in groups:
        rows = [_row(entry) for entry in CATALOGUE if entry.group == group]
        heads = ["| what | one device | several, fast | exact | remark |", "| --- | --- | --- | --- | --- |"]
        parts.append("\n".join([f"### {group.capitalize()}", "", *heads, *rows]))
    return "\n\n".join(parts) + "\n"


def _row(entry: Entry) -> str:
    several = "equal"
    if entry.draws:
        several = "own draws"
    elif entry.depends_on_cut:
        several = "differs"
    cells = [
        "refused" if entry.refusal("fast", "one") else "equal",
        "refused" if entry.refusal("fast", "many") else several,
        "refused" if entry.refusal("exact", "one") or entry.refusal("exact", "many") else "identical",
    ]
    return f"| {entry.name} | {' | '.join(cells)} | {entry.remark} |"
