"""Serialize a task for the ranks: by import path and settings, or by value for classes defined in a script."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from lockstep.config import RunConfig
from lockstep.engine.task import Task
from lockstep.engine.training_data import data_settings
from lockstep.errors import TaskError
from lockstep.tasks.registry import find_task, make_task
from lockstep.telemetry.rundir import RunDir


def pack_task(run: RunDir, task: Task, config: RunConfig) -> None:
    """Write the task to where the ranks of this launch read it.

    Raises:
        TaskError: it must be sent by value and cannot be pickled.
    """
    run.task_file.unlink(missing_ok=True)
    if _importable(task, config):
        return
    import cloudpickle

    try:
        run.task_file.write_bytes(cloudpickle.dumps(task))
    except Exception as error:  # whatever the task's own objects raise
        raise TaskError(
            f"the task {type(task).__qualname__} cannot be sent to other processes",
            why=f"{type(error).__name__}: {error}",
            fix="define it in a separate module, or keep open files and locks out of its attributes",
        ) from error


def _importable(task: Task, config: RunConfig) -> bool:
    """Whether name and settings give the same task again."""
    kind = type(task)
    named = not config.task.name.startswith(f"{kind.__module__}:")
    if named:
        return True
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__ or kind.__init__ is not Task.__init__:
        return False
    return importlib.util.find_spec(kind.__module__) is not None


def load_task(run: RunDir, config: RunConfig) -> Task:
    """The task that :func:`pack_task` wrote. Only ranks that Lockstep started may call this."""
    task: Any
    if run.task_file.exists() and os.environ.get("LOCKSTEP_LAUNCHER"):
        import cloudpickle

        task = cloudpickle.loads(run.task_file.read_bytes())
    else:
        task = make_task(find_task(config.task.name), config.task.settings)
    task.data = data_settings(config)
    assert isinstance(task, Task)
    return task
