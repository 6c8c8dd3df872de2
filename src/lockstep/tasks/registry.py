"""From a name to a task: built-in, ``file.py:Class`` or ``package.module:Class``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lockstep.config.load import explain
from lockstep.engine.lightning_task import is_datamodule_class, is_module_class, module_task
from lockstep.engine.task import Task
from lockstep.errors import LockstepError, TaskError

BUILT_IN = {
    "autoencoder": "lockstep.tasks.autoencoder:AutoencoderTask",
    "har": "lockstep.tasks.har:HarTask",
    "speech": "lockstep.tasks.speech.task:SpeechTask",
}


def find_task(name: str) -> type[Task]:
    """The class that ``name`` means.

    Raises:
        TaskError: there is none, or importing it failed.
    """
    where = BUILT_IN.get(name, name)
    if ":" not in where:
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        raise TaskError(
            f"there is no task {name!r}",
            why=f"the built-in ones are {', '.join(sorted(BUILT_IN))}",
            fix=f"did you mean {close[0]}?" if close else "name one of these, or your own as my_file.py:MyTask",
        )
    found = find_class(where)
    if is_module_class(found):
        return module_task(found, find_class)
    if is_datamodule_class(found):
        raise TaskError(
            f"{found.__name__} is a LightningDataModule, not a task",
            why="it has the data of a LightningModule, which is what is trained",
            fix=f"name the module, and this beside it: lockstep train FILE.py:MODULE --set task.datamodule={where}",
        )
    check_task_class(found)
    return found


def find_class(where: str) -> type:
    """The class at ``path/to/file.py:Class`` or ``package.module:Class``.

    Raises:
        TaskError: there is none, or importing it failed.
    """
    place, _, attribute = where.rpartition(":")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        classes = sorted(
            n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task) and v is not Task
        )
        raise TaskError(
            f"{place} has no class {attribute!r}",
            why=f"its tasks are {', '.join(classes)}" if classes else "it defines no subclass of lockstep.Task",
            fix="check the name after the colon",
        )
    return found


def check_task_class(found: type) -> None:
    """Raises :class:`TaskError` when ``found`` lacks what a task must have."""
    lacking = [m for m in ("datasets", "model", "loss", "evaluate", "metrics") if not callable(getattr(found, m, None))]
    if lacking or not issubclass(found, Task):
        raise TaskError(
            f"{found.__name__} is not a task",
            why=f"it lacks {', '.join(lacking)}" if lacking else "it does not inherit from lockstep.Task",
            fix="subclass lockstep.Task and define datasets, model, loss, evaluate and metrics",
        )


def make_task(kind: type[Task], settings: Mapping[str, Any]) -> Task:
    """A task with its settings validated.

    Raises:
        ConfigError: an unknown or bad setting.
    """
    model: type[BaseModel] = kind.Config
    try:
        return kind(model.model_validate(dict(settings)))
    except ValidationError as error:
        raise explain(error, model, prefix="task.") from None


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise TaskError(
            f"there is no file {path}", why=f"looked in {Path.cwd()}", fix="check the path before the colon"
        )
    # A stable name lets objects of the module be pickled between processes that import the same file.
    name = f"lockstep_task_{path.resolve().stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        # As when the file is run as a script: its neighbours can be imported, now and later.
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except LockstepError:
        raise
    except Exception as error:
        raise TaskError(
            f"importing {path} failed", why=f"{type(error).__name__}: {error}", fix="mend the file"
        ) from error
    return module


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TaskError(
            f"cannot import {name}", why=str(error), fix="install it, or give the file as path/to/file.py:Class"
        ) from error
