"""Records of one process: a file of JSON lines, each with the script's line, and watched functions that write them."""

from __future__ import annotations

import functools
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

#: The folders of Python's library and of Lockstep.
_LIBRARIES = tuple(
    f"{Path(path).resolve()}{os.sep}" for path in (sysconfig.get_path("stdlib"), Path(__file__).parents[2])
)
_OBSERVER = str(Path(__file__).parent)


@functools.cache
def is_library(filename: str) -> bool:
    """Whether a code object's file belongs to Python, to an installed package or to Lockstep."""
    parts = Path(filename).parts
    if filename.startswith("<") or "site-packages" in parts or "dist-packages" in parts:
        return True
    return os.path.abspath(filename).startswith(_LIBRARIES)


def callers() -> Iterator[FrameType]:
    """Yield the frames of the call that is observed, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OBSERVER):
            yield frame
        frame = frame.f_back


def script_line() -> str | None:
    """Return ``file:line`` of the innermost frame in the user's code."""
    lines = (
        f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}"
        for frame in callers()
        if not is_library(frame.f_code.co_filename)
    )
    return next(lines, None)


class Recorder:
    """Writes the records of this process to ``folder``; a forked child writes to another file.

    Attributes:
        step: number of the optimizer step to come, from 1.
        loader_pass: number of the pass over a loader whose batch was read last.
        is_child: whether this is a forked process, as workers of loaders are.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.step = 1
        self.loader_pass: int | None = None
        self.is_child = False
        self._file: int | None = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._file = None
        self.is_child = True

    def write(self, kind: str, **values: Any) -> None:
        """Append one record; it is in the file when this returns, however the process ends."""
        if self._file is None:
            process = "worker" if self.is_child else "rank"
            path = Path(self.folder, f"{process}-{self.rank}-{os.getpid()}.jsonl")
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        record = {"kind": kind, "step": self.step, "loader_pass": self.loader_pass, "site": script_line(), **values}
        os.write(self._file, json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n")

    def watch(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
    ) -> None:
        """Call ``before(*arguments)`` and ``after(result, *arguments)`` around each call of ``owner.name``."""
        original = getattr(owner, name)

        @functools.wraps(original)  # Lightning reads the signature of loaders
        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self.guard(before, *args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                self.guard(after, result, *args, **kwargs)
            return result

        setattr(owner, name, call)

    def guard(self, observe: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``observe``; its failure is a limit of the report, never an error of the script."""
        try:
            return observe(*args, **kwargs)
        except Exception as error:
            name = getattr(observe, "__name__", repr(observe))
            self.write("limit", text=f"{name}: {error!r}")
            return None
