"""A task from a model, a loss and data sets: what ``lockstep.fit`` trains."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.data.arrays import is_loader
from lockstep.engine.resume import load_weights
from lockstep.engine.task import Datasets, Loss, Task
from lockstep.errors import TaskError
from lockstep.tasks.criterion import Counted, described


class TaskFromParts(Task):
    """A task that consists of the arguments of :func:`lockstep.fit`."""

    records_arguments = False

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
                raise is_loader(
                    f"{name} is a DataLoader, not a data set",
                    dataset,
                    f"pass {name}=loader.dataset, with batch_size=… and, if the loader has one, collate=…",
                )
        if not callable(loss) or isinstance(loss, type):
            raise TaskError(
                f"loss is {loss!r:.60}, which cannot be called",
                fix="pass a function or a module: loss=nn.CrossEntropyLoss()",
            )
        if optimizer is not None and not callable(optimizer):
            raise TaskError(
                f"optimizer is {described(optimizer)}, which cannot be called with the parameters",
                why="each rank makes its optimizer, over the parameters of its copy of the model",
                fix=f"optimizer=lambda parameters: {type(optimizer).__name__}(parameters, lr=…)",
            )
        if not (metrics is None or callable(metrics) or isinstance(metrics, dict)) or isinstance(metrics, str):
            raise TaskError(
                f"metrics is {described(metrics)}",
                fix="pass a metric of torchmetrics, a dict of them by name, or a function that returns an object with "
                "update(output, target) and compute()",
            )
        self._model = model
        self._given_loss = loss
        self._datasets = datasets
        self._metrics = metrics
        self._optimizer = optimizer
        self._collate = collate
        self._criterion = loss
        self._counted = Counted()
        called = loss.forward if isinstance(loss, nn.Module) else loss
        try:
            self._takes_model = next(iter(inspect.signature(called).parameters), None) == "model"
        except (TypeError, ValueError):  # a function in C has no signature
            self._takes_model = False

    def datasets(self) -> Datasets:
        return self._datasets

    def model(self) -> nn.Module:
        self._criterion = _copied("loss", self._given_loss)  # it is moved and trained, as the model is
        self._counted = Counted()
        return _copied("model", self._model) if isinstance(self._model, nn.Module) else self._model()

    def take_weights(self, trained: nn.Module, source: Path) -> None:
        """Put the weights of ``trained``, and of the criterion that was loaded with it, into the given modules."""
        if isinstance(self._model, nn.Module):
            load_weights(self._model, trained.state_dict(), source)
        if isinstance(self._given_loss, nn.Module) and isinstance(self._criterion, nn.Module):
            load_weights(self._given_loss, self._criterion.state_dict(), source)

    def modules(self) -> Mapping[str, nn.Module]:
        loss = self._criterion
        return {"loss": loss} if isinstance(loss, nn.Module) and loss.state_dict() else {}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if self._takes_model:
            return self._counted.of_batch(self._criterion, model, batch)
        return self._counted.of_output(self._criterion, *_forward(model, batch))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        return _forward(model, batch) if self._metrics is not None else ()

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Any, ...]]:
        if self._takes_model:
            return super().validate(model, batch)
        output, target = _forward(model, batch)
        rows = (output, target) if self._metrics is not None else ()
        return self._counted.of_output(self._criterion, output, target), rows

    def metrics(self) -> Any:
        metrics = self._metrics
        if metrics is None:
            return super().metrics()
        from torchmetrics import Metric, MetricCollection

        return copy.deepcopy(metrics) if isinstance(metrics, Metric | MetricCollection | dict) else metrics()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        if self._optimizer is None:
            return None
        return self._optimizer(chain(model.parameters(), *(m.parameters() for m in self.modules().values())))

    def collate(self, samples: Sequence[Any]) -> Any:
        return super().collate(samples) if self._collate is None else self._collate(samples)


def _copied(name: str, part: Any) -> Any:
    """Copy a part. Raises :class:`TaskError`: its weights are computed (pruning, the older weight_norm)."""
    try:
        return copy.deepcopy(part)
    except RuntimeError as error:
        function = "pass a function that makes it: model=lambda: …"
        raise TaskError(
            f"the {name} cannot be copied",
            why=f"{type(error).__name__}: {error}",
            fix=function if name == "model" else "write a lockstep.Task, which makes it in modules()",
        ) from None


def _forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return output and target of a batch of inputs and targets. Raises :class:`TaskError`."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise TaskError(
            f"the batch is {described(batch)}, not inputs and a target",
            why="loss(output, target) and metrics need a tuple whose last element is the target",
            fix="let the data set return (inputs, target), or define `def loss(model, batch): …` and leave metrics out",
        )
    return model(*batch[:-1]), batch[-1]
