"""A task from a model, a loss and data sets: what ``lockstep.fit`` trains."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.data.arrays import is_loader
from lockstep.engine.task import Datasets, Loss, Task
from lockstep.errors import TaskError


class TaskFromParts(Task):
    """A task that consists of the arguments of :func:`lockstep.fit`."""

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Callable[..., Any],
        datasets: Datasets,
        metrics: Any = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        for name, dataset in vars(datasets).items():
            if isinstance(dataset, DataLoader):
                fix = f"pass {name}=loader.dataset, with batch_size=… and, if the loader has one, collate=…"
                raise is_loader(f"{name} is a DataLoader, not a data set", dataset, fix)
        self._model, self._given_loss, self._datasets = model, loss, datasets
        self._metrics, self._optimizer, self._collate = metrics, optimizer, collate
        self._criterion = loss
        called = loss.forward if isinstance(loss, nn.Module) else loss
        try:
            self._takes_model = next(iter(inspect.signature(called).parameters), None) == "model"
        except (TypeError, ValueError):  # a function in C has no signature
            self._takes_model = False

    def datasets(self) -> Datasets:
        return self._datasets

    def model(self) -> nn.Module:
        self._criterion = copy.deepcopy(self._given_loss)  # it is moved and trained, as the model is
        return copy.deepcopy(self._model) if isinstance(self._model, nn.Module) else self._model()

    def modules(self) -> Mapping[str, nn.Module]:
        loss = self._criterion
        return {"loss": loss} if isinstance(loss, nn.Module) and loss.state_dict() else {}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if self._takes_model:
            return self._sum(self._criterion(model, batch), batch)
        output, target = _forward(model, batch)
        return self._sum(self._criterion(output, target), target)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        return _forward(model, batch) if self._metrics is not None else ()

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Any, ...]]:
        if self._takes_model:
            return super().validate(model, batch)
        output, target = _forward(model, batch)
        rows = (output, target) if self._metrics is not None else ()
        return self._sum(self._criterion(output, target), target), rows

    def metrics(self) -> Any:
        given = self._metrics
        if given is None:
            return super().metrics()
        from torchmetrics import Metric, MetricCollection

        if isinstance(given, Metric | MetricCollection | dict):
            return MetricCollection(copy.deepcopy(given))
        return given()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        if self._optimizer is None:
            return None
        return self._optimizer(chain(model.parameters(), *(m.parameters() for m in self.modules().values())))

    def collate(self, samples: Sequence[Any]) -> Any:
        return super().collate(samples) if self._collate is None else self._collate(samples)

    def _sum(self, value: Any, batch: Any) -> Loss:
        if isinstance(value, tuple):
            return Loss(*value)
        samples = _samples(batch)
        if samples is None or not isinstance(value, Tensor) or (value.dim() and value.numel() != samples):
            raise TaskError(
                f"the loss returned {_described(value)} for a batch of {samples or 'an unknown number of'} samples",
                fix="return the mean over the samples, a value per sample, or lockstep.Loss(sum, count)",
            )
        if value.dim():
            return Loss(value.sum(), samples)
        return Loss(value if getattr(self._criterion, "reduction", "mean") == "sum" else value * samples, samples)


def _forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Output and target of a batch of inputs and targets. Raises :class:`TaskError`."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise TaskError(
            f"the batch is {_described(batch)}, not inputs and a target",
            why="loss(output, target) and metrics need a tuple whose last element is the target",
            fix="let the data set return (inputs, target), or define `def loss(model, batch): …` and leave metrics out",
        )
    return model(*batch[:-1]), batch[-1]


def _samples(batch: Any) -> int | None:
    """Rows of the first tensor in ``batch``; ``None`` without one."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return next((rows for rows in map(_samples, values) if rows is not None), None)


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
