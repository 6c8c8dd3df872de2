"""What a task's file imports, imported before there are ranks: they are forks, and share it."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path

_OURS = __name__.partition(".")[0]


def source_of(name: str) -> Path | None:
    """The file of a task, by its name on the command line; ``None``: it is installed, or there is none."""
    place = name if name.endswith(".py") else name.rpartition(":")[0]
    file = Path(place if place.endswith(".py") else place.replace(".", "/") + ".py")
    return file.resolve() if place and file.is_file() else None


def import_libraries(file: Path) -> None:
    """Run the imports with which ``file`` begins, in their order, as far as they are of installed packages.

    It ends at any other statement, which might set what a later import reads (a variable, ``sys.path``), at a module of
    the user, which each rank runs itself, and at an error, which the import of the file reports.
    """
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        if not (isinstance(statement, ast.Import | ast.ImportFrom) and _is_installed(statement, file.parent)):
            return
        try:
            exec(compile(ast.Module([statement], []), str(file), "exec"), {})
        except Exception:
            return


def _is_installed(statement: ast.Import | ast.ImportFrom, folder: Path) -> bool:
    if isinstance(statement, ast.ImportFrom):
        names = [statement.module or ""] if not statement.level else [""]
    else:
        names = [alias.name for alias in statement.names]
    return all(_is_library(name.partition(".")[0], folder) for name in names)


def _is_library(name: str, folder: Path) -> bool:
    """Whether the top-level package ``name`` is Python's, ours or installed, and no neighbour of the file hides it."""
    if name in sys.stdlib_module_names or name == _OURS:
        return True
    neighbours = [place / file for place in (folder, Path.cwd()) for file in (f"{name}.py", f"{name}/__init__.py")]
    if not name or any(neighbour.exists() for neighbour in neighbours):
        return False
    try:
        found = find_spec(name)
    except (ImportError, ValueError):
        return False
    places = [] if found is None else [found.origin or "", *(found.submodule_search_locations or ())]
    return any({"site-packages", "dist-packages"}.intersection(Path(place).parts) for place in places)
