"""Records of one process: a file of JSON lines, each with the script's line, and watched functions that write them."""

from __future__ import annotations

import functools
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Stands around a call: its ``yield`` returns the result. Without a ``yield`` reached, it only precedes the call.
Observation = Generator[None, Any, None]

#: The folders of Python's library and of Lockstep.
_LIBRARIES = tuple(
    f"{Path(path).resolve()}{os.sep}" for path in (sysconfig.get_path("stdlib"), Path(__file__).parents[2])
)


@functools.cache
def is_library(filename: str) -> bool:
    """Whether a code object's file belongs to Python, to an installed package or to Lockstep."""
    parts = Path(filename).parts
    if filename.startswith("<") or "site-packages" in parts or "dist-packages" in parts:
        return True
    return os.path.abspath(filename).startswith(_LIBRARIES)


def script_line() -> str | None:
    """Return ``file:line`` of the innermost frame in the user's code."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        if not is_library(frame.f_code.co_filename):
            return f"{os.path.abspath(frame.f_code.co_filename)}:{line}"
    return None


@dataclass
class Pass:
    """A pass over a loader: its number, batches left (``None``: unknown), optimizer steps, and indices read ahead."""

    number: int
    left: int | None = None
    steps: int = 0
    prefetched: list[Any] = field(default_factory=list)


class Recorder:
    """Writes the records of this process to ``folder``; a forked child, such as a loader's worker, only ``draw``.

    Attributes:
        step: number of the optimizer step to come, from 1.
        current_pass: the pass whose batch was read last.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.step = 1
        self.current_pass: Pass | None = None
        self._is_child = False
        self._file: int | None = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._file = None
        self._is_child = True

    def write(self, kind: str, **values: Any) -> None:
        """Append one record; it is in the file when this returns, however the process ends."""
        if self._is_child and kind != "draw":
            return
        if self._file is None:
            path = Path(self.folder, f"{self.rank}-{os.getpid()}.jsonl")
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        number = self.current_pass.number if self.current_pass else None
        record = {"kind": kind, "rank": self.rank, "step": self.step, "loader_pass": number, "site": script_line()}
        os.write(self._file, json.dumps(record | values, separators=(",", ":"), default=str).encode() + b"\n")

    def watch(self, owner: Any, name: str, observe: Callable[..., Observation]) -> None:
        """Put ``observe(*arguments)`` around each call of ``owner.name``."""
        from torch.compiler import is_compiling

        original = getattr(owner, name)

        @functools.wraps(original)  # Lightning reads the signature of loaders
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            observation = observe(*args, **kwargs)
            with self.guarded(name):
                next(observation, None)
            result = original(*args, **kwargs)
            with self.guarded(name), suppress(StopIteration):
                observation.send(result)
            return result

        setattr(owner, name, call)

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """Turn a failure of the observation of ``name``, which is not the script's, into a limit of the report."""
        try:
            yield
        except Exception as error:
            self.write("limit", text=f"{name}: {error!r}")
