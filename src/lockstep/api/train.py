"""Training, planning and verifying a task, or parts without a class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from lockstep.api.run import Run
from lockstep.api.settings import Settings, mapping_of
from lockstep.config import RunConfig
from lockstep.errors import TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lockstep.engine.task import Task
    from lockstep.planning import Plan
    from lockstep.verification import VerifyReport


def train(
    task: Task | type[Task] | str | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    accept_data: bool = False,
    **settings: Unpack[Settings],
) -> Run:
    """Train ``task`` and return when the run has ended.

    Example::

        run = lockstep.train(MyTask(), devices="gpu:0,gpu:1", epochs=3, batch_size=64)

    One device trains in this process, several in one process each, so this may be called from a script without a main
    guard, a notebook or a server. Under ``torchrun`` or ``srun`` this process is one rank.

    Args:
        task: an object, a class, or a name as on the command line.
        config: further settings, by key (``{"optimizer.name": "sgd"}``), nested as in a YAML file, or as a
            :class:`RunConfig`.
        resume: resume the unfinished run in ``save_dir``; if there is none, start one.
        accept_data: resume even if the training data are not those of the checkpoint, if equally many.
        settings: common settings by their short names, the flags of ``lockstep train``; they override ``config``.

    Raises:
        UsageError: the task or a setting is wrong; nothing was started.
        DataError, RunFolderError, CheckpointError: the data, ``save_dir`` or a checkpoint cannot be used.
        RunError: the run failed.
    """
    from lockstep.launch import api as launch

    mapping = mapping_of(config, settings)
    return Run._ended(launch.train(_named(task, mapping), mapping, resume=resume, accept_data=accept_data), task)


_train = train  # `fit` has an argument of that name


def plan(
    task: Task | type[Task] | str | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    **settings: Unpack[Settings],
) -> Plan:
    """Return every decision that :func:`train` would make with the same arguments, and its reason; starts nothing.

    Example::

        plan = lockstep.plan(MyTask(), devices="all")
        print(plan.decisions["lr"].reason)

    Raises:
        UsageError: the task or a setting is wrong. DataError: the data cannot be used.
    """
    from lockstep.launch.prepare import prepare

    mapping = mapping_of(config, settings)
    return prepare(_named(task, mapping), mapping).plan


#: Another name of :func:`plan`.
make_plan = plan


def verify(
    task: Task | type[Task] | str | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    *,
    steps: int = 24,
    eval_batches: int = 8,
    say: Callable[[str], None] = lambda line: None,
    **settings: Unpack[Settings],
) -> VerifyReport:
    """Train the same steps on one device and on the chosen ones, and compare loss, gradient norm and weights.

    Example::

        lockstep.verify(MyTask(), devices="cpu,cpu").raise_if_different()

    Args:
        config: as for :func:`train`, as are ``task`` and ``settings``; it, or ``devices``, names at least two devices.
        steps: optimizer steps of each run.
        eval_batches: batches of each validation.
        say: called with a description of each run before it starts.

    Raises:
        LockstepError: the task, a setting or a device is wrong, or a run failed.
    """
    from lockstep.verification import verify as compare

    mapping = mapping_of(config, settings)
    return compare(_named(task, mapping), mapping, steps=steps, eval_batches=eval_batches, say=say)


def _named(task: Task | type[Task] | str | None, config: Mapping[str, Any]) -> Task | type[Task] | str:
    """Return the task, or the one that ``config`` names. Raises :class:`TaskError`: neither of them."""
    section = config.get("task")
    task = task or (section.get("name") if isinstance(section, Mapping) else None)
    if task is None:
        raise TaskError(
            "no task was given",
            why="the first argument is what to train: a lockstep.Task (an object or its class), or a name",
            fix='lockstep.train(MyTask(), epochs=3), lockstep.train("har"), or lockstep.fit(model=…, loss=…, train=…)',
        )
    return task


def fit(
    *,
    model: nn.Module | Callable[[], nn.Module],
    loss: Callable[..., Any],
    train: Any,
    val: Any = None,
    test: Any = None,
    metrics: Any = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    collate: Callable[[Sequence[Any]], Any] | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    resume: bool = False,
    accept_data: bool = False,
    **settings: Unpack[Settings],
) -> Run:
    """Train ``model`` on ``train``, without a class; returns when the run has ended.

    Example::

        run = lockstep.fit(model=net, loss=nn.CrossEntropyLoss(), train=ds, val=ds2, devices="all")

    **The loss** is called as ``loss(output, target)``. The last element of a batch is the target, and the output is
    ``model(*others)``. If its first parameter is named ``model``, it is called as ``loss(model, batch)`` instead. It
    returns a mean (as torch's losses do), one value per sample, or a :class:`lockstep.Loss`: a sum and a count. Class
    weights, ignored targets, masks and other numbers that a mean of ``(output, target)`` is divided by are counted. A
    loss that is not made of the losses of samples, or calls the model and divides by something else than samples, is
    refused: state sum and count. Of a loss of ``(model, batch)`` only its autograd graph is looked at, which does not
    show a loss of the whole batch (Dice, a root of a mean): return a :class:`lockstep.Loss` for these.

    All parts are sent to the ranks by value; functions may be local or lambdas. For data sets that do not fit into
    memory several times, or for anything that has no argument here, write a :class:`lockstep.Task`.

    Args:
        model: a module, whose weights are the initial ones and which has the trained ones afterwards; or a function
            that returns a module, called after seeding.
        loss: see above; a module with parameters is trained too, and has the trained ones afterwards. A sum
            (``nn.CrossEntropyLoss(reduction="sum")``) is divided by the samples of a step.
        train: a map-style data set: ``len()`` and ``[i]``; not a ``DataLoader``.
        val: data for validation after each epoch.
        test: data for the best checkpoint after training.
        metrics: torchmetrics (one, a mapping of names or a ``MetricCollection``), or a function that returns an object
            with ``update(output, target)`` and ``compute()``.
        optimizer: called with the parameters, such as ``functools.partial(torch.optim.SGD, lr=0.1)``; default: AdamW
            with the settings ``lr`` and ``weight_decay``.
        collate: samples to a batch; default: torch's ``default_collate``.
        config: as for :func:`lockstep.train`; so are the other keywords.
        resume: resume the unfinished run in ``save_dir``, with the same parts.
        accept_data: resume even if the training data are not those of the checkpoint, if equally many.

    Raises:
        UsageError: a part or a setting is wrong; nothing was started. RunError: the run failed.
    """
    from torch import nn

    from lockstep.engine.task import Datasets
    from lockstep.tasks.parts import TaskFromParts

    task = TaskFromParts(model, loss, Datasets(train, val, test), metrics, optimizer, collate)
    run = _train(task, config, resume=resume, accept_data=accept_data, **settings)
    if isinstance(model, nn.Module) or isinstance(loss, nn.Module):
        task.take_weights(run.load_model("last"), run.run_dir)
    return run
