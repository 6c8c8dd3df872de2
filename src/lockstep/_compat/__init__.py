"""Private names of other libraries: each is used here, once, and nowhere else in the package.

A name that a new release removes raises an :class:`~lockstep.errors.UnsupportedError` that names the installed
version. ``make smoke-oldest`` and ``tests/compat`` call every name; the upper bounds in ``pyproject.toml`` are the
versions that passed them.
"""

from __future__ import annotations

import atexit
import sys
from importlib.metadata import version
from types import FrameType

from lockstep.errors import UnsupportedError


def missing(library: str, name: object) -> UnsupportedError:
    """Return the error for ``name`` that the installed version of ``library`` lacks."""
    return UnsupportedError(
        f"{library} {version(library)} lacks a private name that Lockstep uses: {name}",
        why="Lockstep was tested with other versions",
        fix=f"install a version of {library} that Lockstep supports: pip install --upgrade lockstep-train {library}",
    )


def run_exit_functions() -> None:
    """Call the functions of :mod:`atexit`, for a process that ends by ``os._exit``."""
    atexit._run_exitfuncs()


def script_frame() -> FrameType | None:
    """Return the frame of the script's top level, below the caller's; ``None``: another module's code was started."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__main__"):
        frame = frame.f_back
    return frame


def has_returned(frame: FrameType | None) -> bool:
    """Return whether ``frame``, which has ended, ran to its end: else an exception has left it."""
    import dis

    return frame is None or dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
