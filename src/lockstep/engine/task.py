"""The :class:`Task`, which a run trains. It knows nothing about devices, ranks or files of a run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

from pydantic import BaseModel
from torch import Tensor, nn

from lockstep.engine.state import TrainState
from lockstep.engine.task_settings import Recorded, record_arguments
from lockstep.engine.task_settings import TaskConfig as TaskConfig  # a public name of this module
from lockstep.errors import TaskError, UnsupportedError
from lockstep.events import Sound

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class Loss(NamedTuple):
    """A *sum* of losses and the number of items it sums, not a mean.

    ``total`` is a tensor with a gradient: the sum, or one value per item, which are summed in single precision. In half
    precision sums soon leave the range of numbers, so return values there. ``count`` is a number or a scalar tensor.
    Sums can be added over ranks and micro-batches without weighting mistakes; means cannot.
    """

    total: Tensor
    count: Tensor | int  # type: ignore[assignment]  # hides tuple.count()


@dataclass(frozen=True)
class Datasets:
    """Map-style data sets: ``len()`` and ``[i]``, or ``__getitems__(indices)`` for whole batches.

    Draws from ``random``, ``numpy.random`` and torch's global generator inside ``[i]`` are keyed by (seed, epoch,
    index), so that augmentation is the same for any number of ranks and workers. A data set may offer
    ``sample(index, rng)`` instead, which is faster: ``rng`` is a NumPy generator with that key.

    ``weights``: how often each training sample is drawn, in proportion: one number for each; a function that returns
    them for an epoch, from 0; or torch's ``WeightedRandomSampler``, of which weights, length and replacement are taken.

    ``val`` may be several sets by name, ``{"clean": …, "noisy": …}``: their metrics are ``val_clean_loss`` and so on;
    those of the first set are ``val_loss`` and so on, too.
    """

    train: Any
    val: Any = None
    test: Any = None
    weights: Any = None
    #: Validation sets by name; set when data are opened.
    named: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scheduler:
    """A scheduler of torch's, and when it steps.

    ``interval``: after every optimizer ``step``, at the end of every ``epoch``, or with the monitored ``metric`` after
    every evaluation.
    """

    scheduler: LRScheduler
    interval: Literal["step", "epoch", "metric"] = "step"


@dataclass(frozen=True)
class DataSettings:
    """Where a task finds its data: the run's ``data`` section, handed to the task before ``prepare``."""

    data_dir: Any = None
    download: bool = False
    seed: int = 42
    on_bad_row: str = "stop"


class Context:
    """Where a run is, for ``loss``, ``evaluate``, the model and callbacks: ``Task.context``.

    Attributes:
        is_training: whether a training step is under way; ``False`` in evaluations.
    """

    def __init__(self, state: TrainState | None = None) -> None:
        self._state = TrainState() if state is None else state
        self.is_training = False

    @property
    def step(self) -> int:
        """Finished optimizer steps, earlier attempts included."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._state.epoch


class Callback:
    """Code to run around steps, epochs and evaluations: override what you need, and return it in ``Task.callbacks()``.

    Each method is called on every rank, with the task's context and the model; it must make the same
    changes on all of them.
    """

    def on_epoch_start(self, context: Context, model: nn.Module) -> None:
        """Before the first step of an epoch, and before the first step of an attempt that resumes within one."""

    def on_step_start(self, context: Context, model: nn.Module) -> None:
        """Before the forward pass of an optimizer step."""

    def on_after_backward(self, context: Context, model: nn.Module) -> None:
        """Gradients are those of the mean loss over all ranks, not yet clipped."""

    def on_step_end(self, context: Context, model: nn.Module) -> None:
        """After an optimizer step, before ``Task.hooks()``; ``context.step`` counts it."""

    def on_epoch_end(self, context: Context, model: nn.Module) -> None:
        """After the last step of an epoch, before it is evaluated and saved."""

    def on_evaluation_start(self, context: Context, model: nn.Module) -> None:
        """Before an evaluation of validation or test data; ``lockstep evaluate`` calls it too."""

    def on_evaluation_end(self, context: Context, model: nn.Module) -> None:
        """After an evaluation, its remarks and its pictures."""


class Metrics(Protocol):
    """Scores of a data set: torchmetrics' ``MetricCollection``, or another object with these two methods.

    Rank 0 alone has one and feeds it the rows of all ranks in index order, so it must not talk to other ranks.
    """

    def update(self, *rows: Any) -> None:
        """Take what :meth:`Task.evaluate` returned, on the CPU."""

    def compute(self) -> Mapping[str, Any]:
        """Return a number or a tensor for each name: one number is logged, several are kept as a table.

        A list of one number for each of the task's ``class_names`` is logged by these: ``val_recall/cat``.
        """


class _LossOnly:
    """Metrics of a task that has none."""

    def update(self, *rows: Any) -> None:
        pass

    def compute(self) -> Mapping[str, Any]:
        return {}


def undefined(kind: type[Task], method: str) -> TaskError:
    return TaskError(
        f"the task {kind.__name__} has no {method}()",
        why="a task defines datasets(), model() and loss()",
        fix=f"define {method}() in the class",
    )


def similar_methods(kind: type[Task]) -> tuple[tuple[str, str], ...]:
    """Find methods of a task whose name is nearly that of a method it does not define: misspelt ones."""
    absent = [name for name in vars(Task) if not name.startswith("_") and getattr(kind, name) is getattr(Task, name)]
    added = [name for cls in kind.__mro__ if issubclass(cls, Task) and cls is not Task for name in vars(cls)]
    names = [name for name in added if name not in vars(Task) and isinstance(getattr(kind, name), FunctionType)]
    close = {name: difflib.get_close_matches(name, absent, n=1, cutoff=0.87) for name in names}
    return tuple((name, matches[0]) for name, matches in close.items() if matches)


_Value = TypeVar("_Value")


class _FromRun(Generic[_Value]):
    """An attribute that the run provides, unless the task sets one of that name itself."""

    def __init__(self, source: str) -> None:
        self._source = source

    def __get__(self, task: Task | None, kind: type[Task]) -> _Value:
        value: _Value = getattr(kind if task is None else task, self._source)
        return value


class Task:
    """Subclass this, and define :meth:`datasets`, :meth:`model` and :meth:`loss`.

    Its settings are the fields of ``Config``, which is a pydantic model or a dataclass, and the parameters of
    ``__init__`` that take plain values. They are recorded with the run, and used where a command makes the task again.

    Args:
        config: the task's settings; ``None`` takes the defaults of ``Config``.
    """

    Config: ClassVar[type[Any]] = TaskConfig
    #: Settings of the run that suit this task better than the general defaults, as in a YAML file.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: What 'best' means when the run does not say: a key of the metrics row, and its direction.
    monitor: ClassVar[tuple[str, str]] = ("val_loss", "min")

    #: Names of the classes, in the order of their numbers; may be set in ``__init__`` or ``datasets``. A metric with a
    #: number for each class has a column for each (``val_recall/cat``), and a report names the rows of ``confusion``.
    class_names: Sequence[str] = ()

    #: Whether arguments of ``__init__`` are settings of the task.
    records_arguments: ClassVar[bool] = True

    config: Any
    #: The run's :class:`DataSettings`.
    data = _FromRun[DataSettings]("_lockstep_data")
    #: The run's :class:`Context`: its step, epoch and mode, set before ``model()`` is called. Not for ``collate``,
    #: which runs ahead.
    context = _FromRun[Context]("_lockstep_context")
    # For the engine: the runner of tasks of a class, and whether the class decides which samples are drawn; then
    # values that the engine keeps on a task; a task may itself set `config`, `data` and `context` to other values.
    _lockstep_runner: ClassVar[str] = "lockstep.engine.runner:TaskRunner"
    _lockstep_samples_itself: ClassVar[bool] = False
    _lockstep_data: DataSettings = DataSettings()
    _lockstep_context: Context = Context()
    _lockstep_recorded: Recorded = Recorded({})

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        """Record the arguments, with which later commands make the task again."""
        task = super().__new__(cls)
        task._lockstep_recorded = record_arguments(cls, arguments, keywords)
        return task

    def __init__(self, config: BaseModel | None = None) -> None:
        self.config = config if config is not None else self.Config()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a value that would hide a method."""
        if callable(vars(Task).get(name)) and (not callable(value) or isinstance(value, nn.Module | type)):
            raise TaskError(
                f"the task {type(self).__name__} sets its attribute {name} to a {type(value).__name__}",
                why=f"{name}() is a method of lockstep.Task, which the attribute would hide",
                fix=f"give the attribute another name, such as self._{name}, or self.my_{name}",
            )
        super().__setattr__(name, value)

    def prepare(self) -> None:
        """Make or fetch the data; called once per node, before any data set is opened."""

    def datasets(self) -> Datasets:
        raise undefined(type(self), "datasets")

    def model(self) -> nn.Module:
        raise undefined(type(self), "model")

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise undefined(type(self), "loss")

    # Optional from here on.

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        """Return the arguments of ``metrics().update``, in the order of the batch.

        Tensors with one row per sample, or lists with one entry per sample (texts, boxes, dicts). Without it and
        ``metrics``, the loss of the validation data is all that is evaluated.
        """
        return ()

    def metrics(self) -> Metrics | dict[str, Any]:
        """New metrics for one evaluation: torchmetrics by name (a dict), or one of them, named after its class."""
        return _LossOnly()

    def evaluation_data(self, path: Path) -> Any:
        """Make a data set of ``path``, for ``lockstep evaluate RUN --data PATH``."""
        raise UnsupportedError(
            f"this task cannot read data from {path}",
            why=f"{type(self).__name__} has no evaluation_data()",
            fix="name a split of the run: train, val or test; or define evaluation_data(path)",
        )

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return the columns of ``lockstep predict`` by name: tensors or lists with one entry per sample.

        Without it, the columns are what ``evaluate`` returns.
        """
        return {f"output_{number}": column for number, column in enumerate(self.evaluate(model, batch))}

    def prediction_data(self, path: Path) -> Any:
        """Make a data set of ``path``, for ``lockstep predict RUN PATH``; its labels, if any, mean nothing."""
        if type(self).evaluation_data is not Task.evaluation_data:
            return self.evaluation_data(path)
        raise UnsupportedError(
            f"this task cannot read data from {path}",
            why=f"{type(self).__name__} has no prediction_data() and no evaluation_data()",
            fix="name a split of the run: train, val or test; or define prediction_data(path)",
        )

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write further files of a trained ``model`` to the folder of ``lockstep export``."""

    def merge(self, rows: Sequence[Any]) -> tuple[Any, ...]:
        """Join all values of an ``evaluate`` that returns another type for one ``metrics().update``.

        Called once, on the main rank, with what ``evaluate`` returned for each batch, in index order; tensors in
        containers and in objects with ``to`` are on the CPU. It is all kept until then; without this method, metrics
        are updated batch by batch.
        """
        raise NotImplementedError

    def lengths(self) -> Sequence[float] | NDArray[Any] | None:
        """Return one number per *training* sample, in any unit; called after ``datasets()``, on every rank.

        Samples of like length then share a batch, so that padding is short (``data.bucketing``).
        """
        return None

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Any, ...]]:
        """Compute loss and rows of one validation batch; override it to share the forward pass."""
        return self.loss(model, batch), self.evaluate(model, batch)

    def modules(self) -> Mapping[str, nn.Module]:
        """Return modules with parameters beside the model, such as a criterion, by name; called after :meth:`model`.

        They are trained, moved, reduced and saved together with it.
        """
        return {}

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | Scheduler | None:
        """Return a scheduler of ``torch.optim.lr_scheduler``, used instead of the run's schedule; ``None``: the run's.

        It steps after every optimizer step, a ``ReduceLROnPlateau`` with the monitored metric after every evaluation;
        return a :class:`Scheduler` to choose. Its state is saved with the optimizer's.
        """
        return None

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        """Return the task's optimizer (parameter groups included); ``None``: that of the run's settings.

        The run's schedule, and ``optimizer.lr_scaling``, multiply the learning rate of every group; other settings of
        ``optimizer`` have no effect.
        """
        return None

    def collate(self, samples: Sequence[Any]) -> Any:
        """Combine samples to a batch; the default is torch's ``default_collate``."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))

    def pad(self, batch: Any, samples: int) -> Any:
        """Fill ``batch`` up to ``samples`` samples for ``training.compile``; ``loss`` must not count the new ones.

        Then the last, smaller batch of an epoch has the shape of the others, and nothing is compiled for it. Not called
        for a model with BatchNorm, whose statistics would count them. The default is ``batch`` as it is.
        """
        return batch

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """Return modules for ``strategy: fsdp``, none in another: the parameters of each are gathered together.

        A block is used by calling it. ``None``: the members of module lists of one kind, else the model's children.
        """
        return None

    def stages(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """Return parts of ``model`` for ``strategy: pipeline`` that, called one after the other, compute the same.

        The first gets the tensors of the task's call; each returns a tensor or a tuple of tensors, which
        the next is called with. ``None``: the model cannot be cut.
        """
        return None

    def hooks(self) -> Sequence[tuple[Callable[..., Mapping[str, float] | None], int]]:
        """Return ``(function, every)`` pairs: ``function(step_result, model)`` after every ``every`` steps.

        Numbers that a hook returns are logged as scalars. Hooks run on every rank, and talk to the others through
        :func:`lockstep.collectives`.
        """
        return ()

    def callbacks(self) -> Sequence[Callback]:
        """Return objects to call around steps, epochs and evaluations, in this order, after ``load_state_dict``."""
        return ()

    def remarks(self) -> Sequence[str | Sound]:
        """Return lines for people about the last evaluation, such as examples; asked on the main rank.

        A :class:`lockstep.Sound` is a line with a recording, written to ``audio/`` of the run.
        With a parameter, ``remarks(self, model)``, it gets the model in evaluation mode, unless that is divided.
        """
        return ()

    def pictures(self) -> Mapping[str, NDArray[np.uint8]]:
        """Return pictures of the last evaluation by name, such as inputs and outputs; asked on the main rank.

        May take the model, as ``remarks``. Pixels from 0 to 255: grey (height, width) or RGB (height, width, 3).
        Written to ``pictures/`` of the run, and logged.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return state of the task itself that a checkpoint should keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
