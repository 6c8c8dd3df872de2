"""Which tasks the page may start: the built-in ones, and those named when the studio was started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import TaskError

#: As :data:`lockstep.tasks.registry.BUILT_IN`, which cannot be imported without torch; a test compares the two.
BUILT_IN = ("har", "speech", "autoencoder")


def offered_tasks(given: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Names of all tasks, the built-in ones first, and how many those are.

    A task in a file is named by its absolute path, as runs name it.

    Raises:
        TaskError: ``given`` names something that is neither ``FILE.py:Class`` nor ``package.module:Class``.
    """
    own = []
    for name in given:
        place, colon, attribute = name.rpartition(":")
        if not colon or not place or not attribute.isidentifier():
            raise TaskError(f"{name!r} names no task", fix="write --task my_file.py:MyTask")
        if place.endswith(".py"):
            path = Path(place).resolve()
            if not path.is_file():
                raise TaskError(f"there is no file {place}", why=f"looked in {Path.cwd()}", fix="check the path")
            place = str(path)
        own.append(f"{place}:{attribute}")
    return (*BUILT_IN, *dict.fromkeys(own)), len(BUILT_IN)
