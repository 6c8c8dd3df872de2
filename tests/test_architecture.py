"""The house as a test: imports point one way, heavy libraries wait until they are used, `__all__` is true."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gloo import ROOT, clean_environment

PACKAGE = ROOT / "src" / "lockstep"

#: From the ground up: a module may import what stands before it, and its own part.
FLOORS = (
    *("errors", "events", "strategies", "config"),
    "hardware",
    "plan",
    *("data", "telemetry", "checkpoint"),
    "models",
    "engine",
    "tasks",
    "launch",
    *("verify", "bench", "doctor", "lightning", "report"),
    "forecast",
    "studio",
    "cli",
)
#: Parts that people wait for at a prompt, or that plan and look only.
LIGHT = ("errors", "events", "config", "hardware", "plan", "cli")
HEAVY = ("torch", "torchmetrics", "lightning", "tensorboard", "matplotlib", "pandas", "scipy")

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def part_of(module: str) -> str:
    """``lockstep.plan.batch`` → ``plan``; empty for the package itself."""
    return [*module.split("."), ""][1]


def runtime_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import that can run, those inside functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in node.orelse:
                yield from runtime_imports(branch)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide where they point"
            base = node.module or ""
            # `from lockstep import x` may mean the module lockstep.x.
            names = {f"{base}.{alias.name}" if base == "lockstep" else base for alias in node.names}
            yield from ((node.lineno, name) for name in sorted(names))
        else:
            yield from runtime_imports(node)


def test_the_parts_are_the_floors() -> None:
    parts = {part_of(module_name(file)) for file in FILES} - {"", "__main__"}
    assert parts <= set(FLOORS), "a new part needs a floor, here and in docs/architecture.md"


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_point_down(file: Path) -> None:
    own = part_of(module_name(file))
    if own in {"", "__main__"}:
        return
    wrong = []
    for line, module in runtime_imports(ast.parse(file.read_text(encoding="utf-8"))):
        if module.split(".")[0] != "lockstep":
            continue
        other = part_of(module)
        if other not in FLOORS or FLOORS.index(other) > FLOORS.index(own):
            wrong.append(f"{file.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, f"`{own}` may import what stands before it in FLOORS:\n" + "\n".join(wrong)


def declared_names(file: Path) -> list[str] | None:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


WITH_ALL = [file for file in FILES if declared_names(file) is not None]


@pytest.mark.parametrize("file", WITH_ALL, ids=module_name)
def test_all_is_sorted_and_true(file: Path) -> None:
    names = declared_names(file) or []
    # Constants, then classes, then functions: the order that ruff keeps.
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[:1].islower() or name[:1] == "_", name))
    assert len(set(names)) == len(names)
    module = importlib.import_module(module_name(file))
    assert [name for name in names if not hasattr(module, name)] == []


def heavy_after(code: str) -> list[str]:
    """Heavy libraries that a fresh interpreter has loaded after ``code``."""
    program = f"import json, sys\n{code}\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    environ = clean_environment(PYTHONPATH=str(ROOT / "src"))
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_importing_lockstep_is_light() -> None:
    assert heavy_after("import lockstep") == []


@pytest.mark.parametrize("part", LIGHT)
def test_light_parts_load_no_heavy_library(part: str) -> None:
    modules = [module_name(file) for file in FILES if part_of(module_name(file)) == part]
    assert heavy_after("\n".join(f"import {module}" for module in modules)) == []


def test_help_is_light() -> None:
    code = "\n".join(
        [
            "from lockstep.cli.main import main",
            "sys.argv = ['lockstep', '--help']",
            "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code",
        ]
    )
    assert heavy_after(code) == []


def test_detection_is_light() -> None:
    assert heavy_after("import lockstep.hardware\nlockstep.hardware.detect_devices()") == []
