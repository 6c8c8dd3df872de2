"""Training without a class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from lockstep.api.run import Run
from lockstep.api.settings import Settings
from lockstep.api.train import train as train_task
from lockstep.config import RunConfig

if TYPE_CHECKING:
    import torch
    from torch import nn


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
    returns the mean over the batch's samples (as torch's losses do), one value per sample, or a
    :class:`lockstep.Loss`: a sum and a count, for a mean over something else, such as tokens.

    All parts are sent to the ranks by value; functions may be local or lambdas. For data sets that do not fit into
    memory several times, or for anything that has no argument here, write a :class:`lockstep.Task`.

    Args:
        model: a module, whose weights are the initial ones and which has the trained ones afterwards; or a function
            that returns a module, called after seeding.
        loss: see above; a module with parameters is trained too.
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
    from lockstep.tasks.parts import Parts, TaskFromParts

    parts = Parts(model, loss, Datasets(train, val, test), metrics, optimizer, collate)
    run = train_task(TaskFromParts(parts), config, resume=resume, accept_data=accept_data, **settings)
    if isinstance(model, nn.Module):
        model.load_state_dict(run.load_model("last").state_dict())
    return run
