"""Averaged weights: an exponential moving average (EMA), the mean of the last part of a run (SWA), or an optimizer's.

Polyak and Juditsky 1992; Izmailov et al. 2018, https://arxiv.org/abs/1803.05407. Evaluations and checkpoints have the
averages as the model's weights; the weights that are trained are in the training state of a checkpoint.

Schedule-Free optimizers (Defazio et al. 2024, https://arxiv.org/abs/2405.15682) average by themselves: their ``eval()``
makes the model's weights the averages, their ``train()`` those that are trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from lockstep._compat.torch import buffers_of, plain_name
from lockstep.config import AveragingConfig


class Averages:
    """Averages of trained parameters and floating-point buffers, such as BatchNorm's statistics.

    All ranks have the same weights, so each averages its copy. Without averaging, methods do nothing.
    """

    def __init__(
        self, config: AveragingConfig, model: nn.Module, total_steps: int, optimizer: Optimizer | None = None
    ) -> None:
        self._config = config
        self._model = model
        both = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
        schedule_free: Any = optimizer
        self._own = schedule_free if both and config.name == "none" else None
        if self._own is not None:
            self._own.train()
        self._start = round(config.start_share * total_steps) if config.name == "swa" else 0
        self._updates = 0
        self._parameters = dict(model.named_parameters())
        #: A layer's buffers and the key of each that is averaged: the tensor there may be another one in each step.
        self._buffers: dict[str, tuple[MutableMapping[str, Tensor | None], str]] = {}
        if config.name != "none":
            saved = model.state_dict().keys()
            layers = dict(model.named_modules())
            for name, buffer in model.named_buffers():
                if name in saved and buffer.is_floating_point() and buffer.itemsize > 1:  # no arithmetic in 8 bits
                    prefix, _, key = name.rpartition(".")
                    self._buffers[name] = buffers_of(layers[prefix]), key
        self._averaged = self._copies() if config.name == "ema" else {}
        #: Weights that may have values that are not finite, as a mask has: buffers, and parameters that have some.
        self._may_be_infinite: list[str] | None = None

    def _weights(self) -> dict[str, Tensor]:
        weights: dict[str, Any] = {name: p for name, p in self._parameters.items() if p.requires_grad}
        return weights | {name: buffers[key] for name, (buffers, key) in self._buffers.items()}

    def _copies(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._weights().items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after ``step`` optimizer steps."""
        config = self._config
        if config.name == "none" or step <= self._start or step % config.every_steps:
            return
        weights = self._weights()
        averaged = self._averaged
        for name in weights.keys() - averaged.keys():  # the first update of SWA, or unfrozen since
            averaged[name] = weights[name].detach().clone()
        if self._may_be_infinite is None:
            infinite = [name for name, weight in weights.items() if not bool(_local(weight).isfinite().all())]
            self._may_be_infinite = list(dict.fromkeys((*self._buffers, *infinite)))
        lists = [_local(averaged[name]) for name in weights], [_local(weight) for weight in weights.values()]
        if config.name == "swa":
            get_swa_multi_avg_fn()(*lists, self._updates)  # a tensor would be divided as float32
        else:
            early = (1 + self._updates) / (10 + self._updates) if config.warmup else 1.0
            get_ema_multi_avg_fn(min(config.decay, early))(*lists, self._updates)
        for name in self._may_be_infinite:  # ∞ - ∞
            average = _local(averaged[name])
            weight = _local(weights[name])
            average.copy_(torch.where(average.isfinite(), average, weight))
        self._updates += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange averages and weights, in place; called twice, all is as before."""
        if self._own is not None and not self._averaged:
            self._averaged = self._copies()
            self._own.eval()
        elif self._own is not None:  # its train() would round
            self._own.train()
            self._load(self._averaged)
            self._averaged = {}
        else:
            weights = self._named()
            for name, average in self._averaged.items():
                weight = weights[name].detach()
                trained = weight.clone()
                weight.copy_(average)
                average.copy_(trained)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Put the averaged weights into the model for the block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def trained(self) -> dict[str, Any] | None:
        """Return the weights that are trained, for a checkpoint, while the averages are in use."""
        averages = self._config.name != "none" or self._own is not None
        return {"updates": self._updates, "trained": dict(self._averaged)} if averages else None

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Resume from ``state`` (:meth:`trained`) of a checkpoint, whose averages the model has now."""
        saved = {} if state is None else {plain_name(name): value for name, value in state["trained"].items()}
        if self._config.name != "none":
            self._updates = 0 if state is None else state["updates"]
            named = self._named()
            names = saved if self._config.name == "swa" else {**self._weights(), **saved}
            self._averaged = {name: named[name].detach().clone() for name in names}
        if self._own is not None:
            self._own.train()
        self._load(saved)

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        named = self._named()
        for name, value in weights.items():
            if hasattr(named[name], "device_mesh") and not hasattr(value, "device_mesh"):  # divided among ranks
                from lockstep.engine.distributed.dtensor_state import divided_like

                value = divided_like(value, named[name])
            named[name].detach().copy_(value)

    def _named(self) -> dict[str, Tensor]:
        return {**self._parameters, **dict(self._model.named_buffers())}


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a divided tensor, sharing its memory; operations on lists do not mix both kinds."""
    whole: Any = tensor.detach()
    part: Tensor = whole.to_local() if hasattr(whole, "to_local") else whole
    return part
