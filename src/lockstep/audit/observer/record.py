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

#: Surrounds a call: its ``yield`` returns the result. If it ends before a ``yield``, it only precedes the call.
Observation = Generator[None, Any, None]

#: Folders of the standard library and of Lockstep.
_LIBRARIES = tuple(
    f"{Path(path).resolve()}{os.sep}" for path in (sysconfig.get_path("stdlib"), Path(__file__).parents[2])
)


@functools.cache
def is_library(filename: str) -> bool:
    """Return whether a code object's file belongs to Python, to an installed package or to Lockstep."""
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
class OpenPass:
    """A pass over a loader that the script reads now.

    Attributes:
        left: number of batches to come, if it is known.
        steps: optimizer steps that were taken in it.
        prefetched: indices of batches that the loader has read ahead.
        unused: indices of batches that no backward pass has used.
    """

    number: int
    left: int | None = None
    steps: int = 0
    prefetched: list[Any] = field(default_factory=list)
    unused: list[list[int] | None] = field(default_factory=list)


class Recorder:
    """Writes the records of this process to ``folder``; a forked child, such as a loader's worker, only ``draw``.

    Attributes:
        max_steps: optimizer steps after which a pass over a loader ends.
        step: number of the optimizer step to come, from 1.
        current_pass: the pass whose batch was read last.
    """

    def __init__(self, folder: str, max_steps: int) -> None:
        self.folder = folder
        self.max_steps = max_steps
        self.rank = int(os.environ.get("RANK", "0"))
        self.step = 1
        self.current_pass: OpenPass | None = None
        self._process = os.getpid()
        self._file: int | None = None

    def write(self, kind: str, **values: Any) -> None:
        """Append one record; it is in the file when this returns, however the process ends."""
        if os.getpid() != self._process and kind != "draw":
            return
        if self._file is None:
            path = Path(self.folder, f"{self.rank}-{os.getpid()}.jsonl")  # a forked child inherits it
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        number = self.current_pass.number if self.current_pass else None
        record = {"kind": kind, "rank": self.rank, "step": self.step, "loader_pass": number, "site": script_line()}
        os.write(self._file, json.dumps(record | values, separators=(",", ":"), default=str).encode() + b"\n")

    def watch(self, owner: Any, name: str, observe: Callable[..., Observation]) -> None:
        """Put ``observe(*arguments)`` around each call of ``owner.name``. Its exceptions replace the call."""
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
