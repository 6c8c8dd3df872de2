"""Training, planning and verifying a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from lockstep.api.run import Run
from lockstep.api.settings import Settings, mapping_of
from lockstep.config import RunConfig
from lockstep.errors import TaskError

if TYPE_CHECKING:
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

    given = mapping_of(config, settings)
    return Run._ended(launch.train(_named(task, given), given, resume=resume, accept_data=accept_data), task)


def plan(
    task: Task | type[Task] | str | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    **settings: Unpack[Settings],
) -> Plan:
    """Every decision that :func:`train` would make with the same arguments, and its reason; starts nothing.

    Example::

        plan = lockstep.plan(MyTask(), devices="all")
        print(plan.decisions["lr"].reason)

    Raises:
        UsageError: the task or a setting is wrong. DataError: the data cannot be used.
    """
    from lockstep.launch.prepare import make_plan

    given = mapping_of(config, settings)
    return make_plan(_named(task, given), given)


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
        task: as for :func:`train`.
        config: as for :func:`train`; it names at least two devices, as ``devices`` may do.
        steps: optimizer steps of each run.
        eval_batches: batches of each validation.
        say: called with a description of each run before it starts.
        settings: as for :func:`train`.

    Raises:
        LockstepError: the task, a setting or a device is wrong, or a run failed.
    """
    from lockstep.verification import verify as compare

    given = mapping_of(config, settings)
    return compare(_named(task, given), given, steps=steps, eval_batches=eval_batches, say=say)


def _named(task: Task | type[Task] | str | None, config: Mapping[str, Any]) -> Task | type[Task] | str:
    """The task, or the one that ``config`` names. Raises :class:`TaskError`: neither of them."""
    section = config.get("task")
    task = task or (section.get("name") if isinstance(section, Mapping) else None)
    if task is None:
        raise TaskError(
            "no task was given",
            why="the first argument is what to train: a lockstep.Task (an object or its class), or a name",
            fix='lockstep.train(MyTask(), epochs=3), lockstep.train("har"), or lockstep.fit(model=…, loss=…, train=…)',
        )
    return task
