"""Which tasks the page may start: the built-in ones, and those named when the studio was started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import TaskError
from lockstep.tasks import BUILT_IN


@dataclass(frozen=True)
class OfferedTasks:
    """Tasks by name, the built-in ones first.

    Attributes:
        data_modules: of a LightningModule among them, the LightningDataModule that was named with it.
    """

    names: tuple[str, ...]
    data_modules: Mapping[str, str]


def offered_tasks(given: Sequence[str]) -> OfferedTasks:
    """The built-in tasks and the ``given`` ones: each a task's class, or a LightningModule's and its data's with a +.

    A class in a file is named by its absolute path, as runs name it.

    Raises:
        TaskError: ``given`` names something that is neither ``FILE.py:Class`` nor ``package.module:Class``, or one
            module with two data modules.
    """
    data_modules: dict[str, str] = {}
    own = []
    for text in given:
        name, plus, data = text.partition("+")
        own.append(task := _class_path(name))
        if plus and data_modules.setdefault(task, found := _class_path(data)) != found:
            raise TaskError(
                f"{name} is given with two data modules", fix="give each module once, or derive a class for the other"
            )
    return OfferedTasks((*BUILT_IN, *dict.fromkeys(own)), data_modules)


def _class_path(name: str) -> str:
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute.isidentifier():
        raise TaskError(f"{name!r} names no class", fix="write --task my_file.py:MyTask")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise TaskError(f"there is no file {place}", why=f"looked in {Path.cwd()}", fix="check the path")
        place = str(path)
    return f"{place}:{attribute}"
