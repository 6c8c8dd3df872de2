"""Tasks built so that several ranks do not compute what one computes, each for a reason of its own."""

from __future__ import annotations

import os
import random
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lockstep import ArrayDataset, Datasets, Loss
from tests.toys import CLASSES, FEATURES, SampleBySample, Toy, arrays


def place() -> tuple[int, int]:
    """This process's (rank, world size), as a user's code reads it behind Lockstep's back."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class MeanOfMeans(Toy):
    """Each micro-batch's mean counts as one item, however many samples it has."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(nn.functional.cross_entropy(model(batch[0]), batch[1]), 1)


class PaddedShard(SampleBySample):
    """What a DistributedSampler does, inside a data set: every rank has its own part, filled up to equal length."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rank, size = place()
        each = -(-len(self) // size)
        return super().__getitem__((rank * each + index % each) % len(self))


class PaddingSampler(Toy):
    def datasets(self) -> Datasets:
        return Datasets(PaddedShard(*arrays(self.config.samples, 1)), ArrayDataset(*arrays(53, 2)))


class Noisy(SampleBySample):
    """Augmentation in ``__getitem__`` from a generator of the data set's own."""

    def __init__(self, seed: int | None) -> None:
        super().__init__(*arrays(200, 1))
        self._generator = np.random.default_rng(seed)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = super().__getitem__(index)
        return inputs + 1e-8 * float(self._generator.normal()), label


class UnseededAugmentation(Toy):
    """So little noise that the losses agree: samples that differ are a fault all the same."""

    def datasets(self) -> Datasets:
        return Datasets(Noisy(None), ArrayDataset(*arrays(53, 2)))


class KeptGenerator(Toy):
    """Seeded, but what a sample gets depends on the samples read before it."""

    def datasets(self) -> Datasets:
        return Datasets(Noisy(0), ArrayDataset(*arrays(53, 2)))


class Drawn(SampleBySample):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = super().__getitem__(index)
        return inputs + random.random() + float(np.random.rand()) + torch.rand(()), label


class GlobalDraws(Toy):
    """Augmentation from global generators, which are seeded for each sample."""

    def datasets(self) -> Datasets:
        return Datasets(Drawn(*arrays(200, 1)), ArrayDataset(*arrays(53, 2)))


class UnseededDropout(Toy):
    """Masks from the operating system's entropy."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        generator = torch.Generator()
        generator.seed()
        mask = torch.empty_like(inputs).bernoulli_(0.8, generator=generator)
        return Loss(nn.functional.cross_entropy(model(inputs * mask), labels, reduction="sum"), len(labels))


class RankDropout(Toy):
    """Masks from the global generator, but not by dropout: they cannot be switched off."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        mask = (torch.rand_like(inputs) < 0.8).float()
        return Loss(nn.functional.cross_entropy(model(inputs * mask), labels, reduction="sum"), len(labels))


class ScaledRate(Toy):
    """The learning rate is multiplied by the number of ranks where nobody sees it."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01 * place()[1])


class Centred(nn.Module):
    """Statistics of the batch without a BatchNorm layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


class HandMadeNorm(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), Centred(), nn.ReLU(), nn.Linear(16, CLASSES))


class LoudRank(Toy):
    """The second rank takes its samples more seriously."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        return Loss(total * (1 + place()[0]), count)


class LastBits(Toy):
    """The second rank's losses differ by what rounding in another order might change."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        return Loss(total * (1 + 1e-6 * place()[0]), count)


class OwnStart(Toy):
    """Every rank starts from weights of its own. DDP compares shapes at the start, not values, when told not to."""

    def model(self) -> nn.Module:
        torch.manual_seed(place()[1])
        return super().model()


class RankValidation(Toy):
    """Training is the same everywhere; what is evaluated is not."""

    def validate(self, model: nn.Module, batch: Any) -> Any:
        loss, rows = super().validate(model, batch)
        return Loss(loss.total * place()[1], loss.count), rows


class WrongCountAndDraws(MeanOfMeans):
    """A harmless draw beside a real fault: the fault is to be named."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        torch.rand_like(batch[0])
        return super().loss(model, batch)


class NoisyOptimizer(torch.optim.SGD):
    """Gradient noise from the global generator, which each rank has seeded for its own micro-batch."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(torch.randn_like(parameter.grad), alpha=1e-6)
        return super().step(closure)


class OptimizerNoise(Toy):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return NoisyOptimizer(model.parameters(), lr=0.01)


class HookNoise(Toy):
    """Weight noise in a hook, by a generator that is seeded with the rank."""

    def hooks(self) -> Any:
        generator = torch.Generator().manual_seed(place()[0])

        def disturb(result: Any, model: nn.Module) -> None:
            with torch.no_grad():
                model[0].weight.add_(torch.randn(model[0].weight.shape, generator=generator), alpha=1e-6)

        return [(disturb, 3)]


class RunningMaximum(nn.Module):
    """A buffer that changes in training and is merged by another rule than the one that it follows."""

    buffer_reduction: ClassVar[dict[str, str]] = {"total": "max"}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.total += inputs.detach().square().sum()
        return inputs


class WrongMerge(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(RunningMaximum(), *super().model())


class Forgetful(Toy):
    """A loss weight that grows with the steps and is in no checkpoint."""

    steps = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        return Loss(total * (1 + 0.1 * self.steps), count)

    def hooks(self) -> Any:
        def count(result: Any, model: nn.Module) -> None:
            self.steps += 1

        return [(count, 1)]


class Growing(torch.optim.SGD):
    """Keeps what it has learnt of the learning rate in its groups, as Prodigy and D-Adaptation do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.param_groups[0]["d"] = 1.0

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["d"] *= 1.1
        for parameter in group["params"]:
            parameter.grad.mul_(group["d"])
        return super().step(closure)


class StateInGroups(Toy):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Growing(model.parameters())


class NotANumber(Toy):
    """Both runs have no loss from the third step on, and finite gradients."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        return Loss(total + (float("nan") if self.calls > 2 else 0.0), count)


class Frozen(Toy):
    """A frozen first layer."""

    def model(self) -> nn.Module:
        model = super().model()
        model[0].requires_grad_(False)
        return model


class ThawingAll(Frozen):
    """All parameters are in the optimizer from the start; a hook thaws the first layer."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def hooks(self) -> Any:
        return [(lambda result, model: model[0].requires_grad_(result.step >= 3) and None, 1)]


class Instances(nn.Module):
    """InstanceNorm with running statistics, beside a BatchNorm that is synchronised."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 24, bias=False), nn.BatchNorm1d(24)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.last = nn.Linear(24, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        output: Tensor = self.last(self.instance(hidden.view(-1, 4, 6)).flatten(1))
        return output


class InstanceNormed(Toy):
    def model(self) -> nn.Module:
        return Instances()


class Split(Toy):
    def datasets(self) -> Datasets:
        train, val = torch.utils.data.random_split(SampleBySample(*arrays(200, 1)), [150, 50])
        return Datasets(train, val)
