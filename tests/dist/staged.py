"""A task that can be trained in stages, and some that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lockstep import Loss
from tests.toys import CLASSES, FEATURES, Toy


class First(nn.Module):
    """Passes on what it makes, and what it got: a tuple, of which one tensor needs no gradient."""

    def __init__(self, batchnorm: bool, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 16, bias=not batchnorm)
        self.norm = nn.BatchNorm1d(16) if batchnorm else nn.Identity()
        self.dropout = dropout

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.linear(inputs)).relu()
        return nn.functional.dropout(hidden, self.dropout, self.training), inputs > 0


class Middle(nn.Module):
    """Its two layers share a weight."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.again, self.dropout = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(dropout)
        self.again.weight = self.linear.weight

    def forward(self, hidden: Tensor, signs: Tensor) -> Tensor:
        output: Tensor = self.again(self.linear(hidden).tanh()) * signs.any(1, keepdim=True)
        return self.dropout(output)


class ThreeStages(nn.Module):
    def __init__(self, batchnorm: bool, dropout: float) -> None:
        super().__init__()
        self.first, self.middle = First(batchnorm, dropout), Middle(dropout)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.middle(*self.first(inputs)))
        return output


class Staged(Toy):
    def model(self) -> nn.Module:
        return ThreeStages(self.config.batchnorm, self.config.dropout)

    def stages(self, model: Any) -> Sequence[nn.Module]:
        return [model.first, model.middle, model.last]


class Incomplete(Staged):
    def stages(self, model: Any) -> Sequence[nn.Module]:
        return [model.first, model.middle]


class Enlarged(Staged):
    """Adds a layer that the model does not have."""

    def stages(self, model: Any) -> Sequence[nn.Module]:
        return [model.first, model.middle, nn.Sequential(model.last, nn.Linear(CLASSES, CLASSES))]


class CallsTwice(Staged):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        model(batch[0])
        return super().loss(model, batch)


class CallsByName(Staged):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(inputs=batch[0]).sum(), len(batch[0]))


class CallsMethod(Staged):
    def loss(self, model: Any, batch: Any) -> Loss:
        model.first(batch[0])
        return super().loss(model, batch)


class Unstaged(Staged):
    def stages(self, model: Any) -> None:  # type: ignore[override]
        return None
