"""From a name to a task: built-in, ``file.py:Class`` or ``package.module:Class``; and from a process to its ranks."""

from __future__ import annotations

import difflib
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from functools import partial
from inspect import getattr_static, signature
from pathlib import Path
from traceback import extract_tb
from types import FunctionType
from typing import Any

from pydantic import ValidationError

from lockstep.config import RunConfig
from lockstep.config.load import explain
from lockstep.config.named import whole_name as whole_name
from lockstep.engine.runner import load_object, runner_class
from lockstep.engine.task import Task
from lockstep.engine.task_settings import RESERVED as RESERVED
from lockstep.engine.task_settings import arguments_of, config_names, config_parameter, settings_model, settings_of
from lockstep.engine.training_data import data_settings
from lockstep.errors import LockstepError, TaskError
from lockstep.hardware.world import world_kept
from lockstep.rundir.files import is_in_run_folder
from lockstep.tasks import BUILT_IN

#: The name of a task that `lockstep.fit` made.
FROM_PARTS = "lockstep.tasks.parts:TaskFromParts"
#: Makes the class of tasks of a LightningModule; imported when one is named.
MODULE_TASK = "lockstep.lightning.module_task:module_task"
#: Packages that have Lightning's classes.
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def class_name(task: str) -> str:
    """Return the name of a task's class, without its file or module."""
    return BUILT_IN.get(task, task).rpartition(":")[2]


def find_task(name: str) -> type[Task]:
    """Return the class of the built-in task ``name``, or of ``file.py:Class`` or ``package.module:Class``."""
    full_name = BUILT_IN.get(name, name)
    if full_name.endswith(".py"):
        names = _task_names(_imported(full_name))
        raise TaskError(
            f"{full_name} is a file, and one of its tasks must be named",
            why=_listed(names),
            fix=f"lockstep train {full_name}:{names[0]}" if len(names) == 1 else "name one as FILE.py:CLASS",
        )
    if ":" not in full_name:
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        raise TaskError(
            f"there is no task {name!r}",
            why=f"the built-in ones are {', '.join(sorted(BUILT_IN))}",
            fix=f"did you mean {close[0]}?" if close else "name one of these, or your task as my_file.py:MyTask",
        )
    return task_class(find_class(full_name), full_name)


def class_of(task: Any) -> type[Task]:
    """Return the class of a task that is given by its name, as a class, or as an object."""
    if isinstance(task, str):
        return find_task(task)
    return task_class(task if isinstance(task, type) else type(task))


def task_class(kind: type, name: str = "") -> type[Task]:
    """Return ``kind``, or the task class of a LightningModule. ``name``: of the class, for people."""
    if issubclass(kind, Task):
        return kind
    if inherits(kind, "LightningModule"):
        module_task: type[Task] = load_object(MODULE_TASK)(kind)
        return module_task
    if inherits(kind, "LightningDataModule"):
        raise TaskError(
            f"{kind.__name__} is a LightningDataModule, not a task",
            why="it has the data of a LightningModule, and the module is trained",
            fix=f"name the module, and this beside it: lockstep train FILE.py:MODULE --set task.datamodule={name}",
        )
    is_model = any(base.__module__.startswith("torch.nn.") for base in kind.__mro__)
    raise TaskError(
        f"{kind.__name__} is not a task",
        why="it is a model" if is_model else "it does not inherit from lockstep.Task",
        fix="write a subclass of lockstep.Task whose methods datasets, model and loss return the data, "
        f"{f'{kind.__name__}(...)' if is_model else 'the model'} and the loss, and name that class",
    )


def inherits(kind: type, name: str) -> bool:
    """Return whether ``kind`` is a class of Lightning's of this ``name``, without importing Lightning."""
    return any(base.__name__ == name and base.__module__.partition(".")[0] in _LIGHTNING for base in kind.__mro__)


def find_class(name: str) -> type:
    """Import the class at ``path/to/file.py:Class`` or ``package.module:Class``."""
    module_name, _, attribute = name.rpartition(":")
    working_folder = Path.cwd()
    if not is_in_run_folder(working_folder):  # files of a run are not code
        _search(working_folder, module_name)  # as `python -m` does; a console script has its folder instead
    module = _imported(module_name)
    kind = getattr(module, attribute, None)
    if not isinstance(kind, type):
        names = _task_names(module)
        close = difflib.get_close_matches(attribute, names, n=1)
        raise TaskError(
            f"{module_name} has no class {attribute!r}",
            why=_listed(names),
            fix=f"did you mean {close[0]}?" if close else "check the name after the colon",
        )
    return kind


def _task_names(module: Any) -> list[str]:
    """Return the tasks and LightningModules that a module defines itself, else those that it imports."""
    tasks = {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type) and kind is not Task and (issubclass(kind, Task) or inherits(kind, "LightningModule"))
    }
    return sorted(n for n, kind in tasks.items() if kind.__module__ == module.__name__) or sorted(tasks)


def _listed(names: list[str]) -> str:
    return f"its tasks are {', '.join(names)}" if names else "it defines no subclass of lockstep.Task"


def make_task(kind: type[Task], settings: Mapping[str, Any]) -> Task:
    """Make a task of class ``kind``. Raises :class:`UsageError`: wrong settings, or it needs other arguments."""
    check_methods(kind)
    model = settings_model(kind)
    try:
        validated = model.model_validate(dict(settings))
        config, arguments = arguments_of(kind, settings, validated)
    except ValidationError as error:
        raise explain(error, model, prefix="task.") from None
    problem = ""
    if config_names(kind) and config_parameter(kind) is None:
        problem = "no parameter `config`"
    try:
        signature(kind.__init__).bind(None, **arguments)
    except TypeError as error:
        problem = problem or str(error)
    if problem:
        raise TaskError(
            f"{kind.__name__}.__init__: {problem}",
            why="Lockstep makes the task from its settings: the fields of its Config, as `config`, and the parameters "
            "that take numbers, texts, paths, lists or mappings of these",
            fix="make other objects in __init__ from such values; for a Config, write "
            "`def __init__(self, config=None): super().__init__(config)`",
        )
    return configured(runner_class(kind).make(kind, arguments), config)


def check_methods(kind: type[Task]) -> None:
    """Raise :class:`TaskError` where a method of the task cannot be called as Lockstep calls it."""
    config: Any = kind.Config
    if not isinstance(config, type):
        raise TaskError(
            f"{kind.__name__}.Config is a {type(config).__name__}, not a class",
            fix="write a class of settings: a subclass of lockstep.TaskConfig, or a dataclass",
        )
    for name, method in vars(Task).items():
        override = getattr(kind, name)
        if name.startswith("_") or not isinstance(method, FunctionType) or override is method:
            continue
        names = [*signature(method).parameters]
        fix = f"define it as `def {name}({', '.join(names)})`"
        if not callable(override) or isinstance(override, type):
            raise TaskError(
                f"{kind.__name__}.{name} is a {type(override).__name__}",
                why=f"{name}() is a method of lockstep.Task, which the attribute hides",
                fix=f"{fix}, or give the attribute another name",
            )
        is_bound = isinstance(getattr_static(kind, name), staticmethod | classmethod)
        optional = ["model"] * (name in ("remarks", "pictures") and "model" in signature(override).parameters)
        try:
            signature(override).bind(*names[is_bound:], *optional)
        except ValueError:  # a function in C has no signature
            continue
        except TypeError as error:
            raise TaskError(
                f"{kind.__name__}.{name} cannot be called with ({', '.join(names[1:])})", why=str(error), fix=fix
            ) from None


def section_of(task: Task) -> dict[str, Any]:
    """Return the section ``task`` of a configuration that makes a task like ``task``, without its name."""
    recorded = settings_of(task)
    return recorded.settings | ({"unrecorded": recorded.unrecorded} if recorded.unrecorded else {})


def refuse_unrecorded(section: Mapping[str, Any]) -> None:
    """Raise :class:`TaskError` where a task was made with arguments that the section ``task`` of its run lacks."""
    names = section.get("unrecorded")
    if names:
        raise TaskError(
            f"the task {section.get('name')} was made with arguments that are not recorded: {', '.join(names)}",
            why="its other arguments are settings of the run; these were objects of the program that made it",
            fix="there, pass the task: lockstep.Run(…).resume(task), .evaluate(task=task), .load_model(task=task)",
        )


def given_task(task: Task) -> Task:
    """Return a task that the user has made, with its settings. Raises :class:`TaskError` as :func:`check_methods`."""
    check_methods(type(task))
    return configured(task)


def configured(task: Task, config: Any = None) -> Task:
    """Give ``task`` its settings, also where its ``__init__`` did not call ``super().__init__``."""
    if getattr(task, "config", None) is None:
        task.config = task.Config() if config is None else config
    return task


def _imported(name: str) -> Any:
    """Import ``path/to/file.py`` or ``package.module``, as if it were called without arguments."""
    caller_argv = sys.argv
    sys.argv = [name]
    try:
        with world_kept(os.environ):
            return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except LockstepError:
        raise
    except SystemExit as end:
        raise TaskError(
            f"importing {name} ended with sys.exit({'' if end.code is None else repr(end.code)})",
            why="the import ran the script, without arguments of a command line",
            fix="put its argument parser and its training under `if __name__ == '__main__':`, or train it with a "
            "session: lockstep run",
        ) from end
    except Exception as error:
        frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename == str(Path(name).resolve())]
        at = f", in line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
        fix = "fix that line, or the installation of the package that it imports"
        if not frames:
            fix = "fix it; a package must be installed or in the working folder, or be named as path/to/file.py:Class"
        raise TaskError(f"importing {name} failed", why=f"{type(error).__name__}: {error}{at}", fix=fix) from error
    finally:
        sys.argv = caller_argv


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
    # As when the file is run as a script: its neighbours can be imported, now and later.
    _search(path.resolve().parent, path.name)
    spec.loader.exec_module(module)
    return module


def _search(folder: Path, file: str) -> None:
    """Import from ``folder``, too: first, or last where ``file``, such as queue.py, would hide a module of Python's."""
    if str(folder) not in sys.path:
        sys.path.insert(len(sys.path) if Path(file).stem in sys.stdlib_module_names else 0, str(folder))


def pack_task(task: Task, config: RunConfig) -> Callable[[], Task]:
    """Return a function that makes ``task`` in another process: from its name and settings, or else from a pickle."""
    kind = type(task)
    is_script = kind.__module__ == "__main__" or "<locals>" in kind.__qualname__
    takes_settings = kind.__init__ is Task.__init__
    is_named = not config.task.name.startswith(f"{kind.__module__}:")
    if is_named or (not is_script and takes_settings and importlib.util.find_spec(kind.__module__) is not None):
        return partial(_named_task, config)
    try:
        return partial(_unpickled_task, _pickled(task), config)
    except Exception as error:  # any that the task's objects raise
        raise TaskError(
            f"the task {kind.__qualname__} cannot be sent to other processes",
            why=f"{type(error).__name__}: {error}",
            fix="define it in a separate module, or keep open files and locks out of its attributes",
        ) from error


def _pickled(task: Task) -> bytes:
    """Pickle a task, with what belongs to a script by value, and with parametrized modules."""
    import cloudpickle

    from lockstep._compat.torch import reduce_parametrized

    class TaskPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            return reduce_parametrized(value) or super().reducer_override(value)

    with io.BytesIO() as file:
        TaskPickler(file).dump(task)
        return file.getvalue()


def _named_task(config: RunConfig) -> Task:
    task = make_task(find_task(config.task.name), config.task.settings)
    task._lockstep_data = data_settings(config)
    return task


def _unpickled_task(content: bytes, config: RunConfig) -> Task:
    with world_kept(os.environ):
        task = pickle.loads(content)
    assert isinstance(task, Task)
    task._lockstep_data = data_settings(config)
    return task
