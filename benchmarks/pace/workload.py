"""What every loop trains: the same model, data, batch, optimizer and clipping."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.recipes.images.resnet import ResNet
from lockstep.recipes.text.gpt import Gpt
from lockstep.tasks.har.models import Cnn, Mlp, pre_norm_encoder

#: Steps between two readings of the loss, and between two looks at the clock.
INTERVAL = 50
#: A block that is timed has so many untimed steps around it.
UNTIMED = 2 * INTERVAL
CLASSES, LR, MAX_NORM = 6, 1e-3, 1.0
#: Blocks in an epoch: its end falls between two timed blocks.
BLOCKS_IN_EPOCH = 4

#: Tokens of the language model.
TOKENS = 257


class Text(nn.Module):
    """The model of the task ``text``, smaller: ids (batch, time) to logits (batch, tokens, time)."""

    def __init__(self, time: int) -> None:
        super().__init__()
        self.gpt = Gpt(TOKENS, time, width=32, depth=2)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.gpt(ids)
        return logits.transpose(1, 2)


class Transformer(nn.Module):
    """A classifier of windows (batch, channels, time) by an encoder over patches of five steps."""

    def __init__(self, channels: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Conv1d(channels, 64, 5, stride=5)
        self.positions = nn.Parameter(0.02 * torch.randn(length // 5, 64))
        self.encoder = pre_norm_encoder(width=64, heads=4, hidden=128, depth=2, dropout=0.1)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, windows: Tensor) -> Tensor:
        patches = self.embed(windows).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.encoder(patches).mean(dim=1))
        return logits


#: Shape of a sample, and the model.
MODELS: dict[str, tuple[tuple[int, ...], Callable[..., nn.Module]]] = {
    "mlp": ((1, 561), lambda channels, length: Mlp(channels, CLASSES, length)),
    "cnn": ((9, 128), lambda channels, length: Cnn(channels, CLASSES, length)),
    "transformer": ((9, 128), Transformer),
    "text": ((32,), Text),
    "images": ((1, 16, 16), lambda channels, *size: ResNet(channels, CLASSES, widths=(8, 16, 32))),
}


@dataclass(frozen=True)
class Workload:
    """One contest: ``rounds`` blocks of ``steps`` timed steps.

    ``batch`` is per rank; ``socket``: where the pace is set; ``folder``: for what a loop writes; ``dataset``: one of
    :mod:`pace.catalogue`, and ``workers``, its loader processes (``None``: the loop's own choice); without one every
    loop reads a ``TensorDataset``.
    """

    side: str
    model: str
    ranks: int
    clip: bool
    steps: int
    rounds: int
    socket: str
    folder: str
    batch: int = 32
    device: str = "cpu"
    dataset: str | None = None
    workers: int | None = None

    @property
    def samples(self) -> int:
        """In an epoch."""
        return BLOCKS_IN_EPOCH * self.period * self.batch * self.ranks

    @property
    def period(self) -> int:
        return self.steps + UNTIMED

    @property
    def total_steps(self) -> int:
        return self.rounds * self.period + INTERVAL

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", int(self.device[4:]))

    def build(self) -> nn.Module:
        shape, make = MODELS[self.model]
        torch.manual_seed(0)
        return make(*shape)

    def data(self) -> tuple[Tensor, Tensor]:
        """An epoch's samples and labels, in host memory."""
        generator = torch.Generator().manual_seed(0)
        shape, _ = MODELS[self.model]
        if self.model == "text":
            tokens = torch.randint(0, TOKENS, (self.samples, shape[0] + 1), generator=generator)
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        labels = torch.randint(0, CLASSES, (self.samples,), generator=generator)
        return torch.randn(self.samples, *shape, generator=generator), labels

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, fused=True)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def read_workload(text: str) -> Workload:
    settings: dict[str, Any] = json.loads(text)
    return Workload(**settings)


def is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"
