"""Records of one process: a file of JSON lines, the script's line of a call, and patches that can be undone."""

from __future__ import annotations

import functools
import json
import os
import sys
import sysconfig
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

Record = dict[str, Any]

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


def script_line(most_frames: int = 200) -> str | None:
    """Return ``file:line`` of the innermost frame in the user's code, at most ``most_frames`` library frames away."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and most_frames:
        if not is_library(frame.f_code.co_filename):
            return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}"
        most_frames -= frame.f_code.co_filename != __file__
        frame = frame.f_back
    return None


def libraries_above() -> list[str]:
    """Return the names of the installed packages between here and the script's innermost frame."""
    names = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        names.add(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    return sorted(names)


class Recorder:
    """Writes the records of this process to ``folder``; a forked child writes to another file."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.is_child = False
        self._file: int | None = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._file = None
        self.is_child = True

    def write(self, record: Record) -> None:
        """Append one record; it is in the file when this returns, however the process ends."""
        if self._file is None:
            kind = "worker" if self.is_child else "rank"
            path = Path(self.folder, f"{kind}-{self.rank}-{os.getpid()}.jsonl")
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._file, json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n")


class Patches:
    """Replaced functions of libraries; :meth:`undo` restores them.

    A failure of an observer is a limit of the report, never an error of the script.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._stack = ExitStack()

    def before(self, owner: Any, name: str, note: Callable[..., object]) -> None:
        """Call ``note`` with the arguments of each call of ``owner.name``, before it."""
        note = guarded(note, self.recorder)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                note(*args, **kwargs)
                return original(*args, **kwargs)

            return call

        self.replace(owner, name, make)

    def after(self, owner: Any, name: str, note: Callable[..., object]) -> None:
        """Call ``note`` with the result and the arguments of each call of ``owner.name``, after it."""
        note = guarded(note, self.recorder)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                note(result, *args, **kwargs)
                return result

            return call

        self.replace(owner, name, make)

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``owner.name`` by ``make(original)``, with the signature of the original."""
        original = getattr(owner, name)
        is_inherited = isinstance(owner, type) and name not in vars(owner)
        setattr(owner, name, functools.wraps(original)(make(original)))
        restore = (
            functools.partial(delattr, owner, name)
            if is_inherited
            else functools.partial(setattr, owner, name, original)
        )
        self._stack.callback(restore)

    def on_undo(self, call: Callable[[], Any]) -> None:
        self._stack.callback(call)

    def undo(self) -> None:
        """Restore everything, last first."""
        self._stack.close()


def guarded(observe: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return ``observe`` with errors recorded as limits; its result is then ``None``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return observe(*args, **kwargs)
        except Exception as error:
            name = getattr(observe, "__name__", repr(observe))
            recorder.write({"t": "limit", "code": "observer", "text": f"{name}: {error!r}"})
            return None

    return call
