"""Private names of other libraries: each is used here, once, and nowhere else in the package.

A name that a new release removes either has a fallback made of public names, or its use raises an
:class:`~lockstep.errors.UnsupportedError` that names the installed version. ``make smoke-oldest`` and
``tests/compat`` call every name; the upper bounds in ``pyproject.toml`` are the versions that passed them.
"""

from __future__ import annotations

import atexit
from importlib.metadata import version

from lockstep.errors import UnsupportedError


def missing(library: str, name: object) -> UnsupportedError:
    """The error for ``name`` that the installed version of ``library`` lacks."""
    return UnsupportedError(
        f"{library} {version(library)} lacks a private name that Lockstep uses: {name}",
        why="Lockstep was tested with other versions",
        fix=f"install a version of {library} that Lockstep supports: pip install --upgrade lockstep-train {library}",
    )


def run_exit_functions() -> None:
    """Call what was registered with :mod:`atexit`, for a process that ends by ``os._exit``."""
    atexit._run_exitfuncs()
