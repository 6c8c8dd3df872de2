"""Imports point one way and in no circle, heavy libraries are imported where they are used, `__all__` is correct."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.gloo import ROOT, heavy_after

PACKAGE = ROOT / "src" / "lockstep"

#: The core, from the ground up: a module may import what stands before it, and its own part.
FLOORS = (
    *("errors", "arithmetic", "_compat", "events", "strategies", "precisions", "config"),
    "hardware",
    "planning",
    "rundir",
    *("data", "telemetry", "checkpoint"),
    "engine",
    "tasks",
    "launch",
    "verification",
    *("api", "cli"),
)
#: What no training run needs. A leaf may import the core and the leaves before it; the core imports no leaf.
LEAVES = ("readers", "recipes", "lab", "studio", "lightning", "audit")
#: Parts that people wait for at a prompt, or that plan and look only.
LIGHT = ("errors", "events", "config", "hardware", "planning", "cli")

#: Modules of the project that one module may import.
MOST_IMPORTS = 15

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def part_of(module: str) -> str:
    """``lockstep.planning.batch`` → ``planning``; empty for the package itself."""
    return [*module.split("."), ""][1]


def room_of(module: str) -> str:
    """``lockstep.launch.failure.report`` → ``launch.failure``; empty for a module that is in no sub-package."""
    parts = module.split(".")[1:]
    folders = parts if PACKAGE.joinpath(*parts).is_dir() else parts[:-1]
    return ".".join(folders[:2]) if len(folders) > 1 else ""


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
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):  # no expression has an import
            yield from runtime_imports(node)


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def test_the_parts_are_the_floors() -> None:
    parts = {part_of(module_name(file)) for file in FILES} - {"", "__main__"}
    assert parts == {*FLOORS, *LEAVES}, "a new part needs a floor, here and in docs/architecture.md"


def test_imports_point_down() -> None:
    order = FLOORS + LEAVES
    wrong = []
    for file in FILES:
        module = module_name(file)
        part = part_of(module)
        if part in {"", "__main__"}:
            continue
        for line, imported in runtime_imports(tree(file)):
            other = part_of(imported)
            points_down = other in order and order.index(other) <= order.index(part)
            if imported.split(".")[0] == "lockstep" and not points_down:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {imported}")
    assert not wrong, "a part may import what stands before it in FLOORS and LEAVES:\n" + "\n".join(wrong)


def test_rooms_of_a_package_do_not_import_each_other() -> None:
    """``launch/failure`` may import ``launch/process``, but then not the other way round; likewise of all packages."""
    pairs = {
        (room_of(module), room_of(other))
        for module, others in all_imports().items()
        for other in others
        if part_of(module) == part_of(other) and "" not in (room_of(module), room_of(other))
    }
    assert [(one, other) for one, other in sorted(pairs) if one < other and (other, one) in pairs] == []


MODULES = {module_name(file): file for file in FILES}


def imported_modules(file: Path) -> set[str]:
    """Modules of the project that a file imports anywhere: in functions and for type checking, too."""
    found = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys() - {module_name(file)}


@cache
def all_imports() -> dict[str, set[str]]:
    return {name: imported_modules(file) for name, file in MODULES.items()}


def test_no_modules_import_each_other() -> None:
    try:
        tuple(TopologicalSorter(all_imports()).static_order())
    except CycleError as error:
        pytest.fail(f"an import circle: {' → '.join(error.args[1])}")


def test_a_module_imports_few_others() -> None:
    many = {name: sorted(others) for name, others in all_imports().items() if len(others) > MOST_IMPORTS}
    assert not many, f"more than {MOST_IMPORTS} modules of the project"


def declared_names(file: Path) -> list[str]:
    for node in tree(file).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


WITH_ALL = [file for file in FILES if "\n__all__ = " in file.read_text(encoding="utf-8")]


#: Modules whose import takes a second: of Lightning, and of Ray.
LONG_IMPORTS = ("lightning", "ray")


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.long] if {*module_name(file).split(".")} & {*LONG_IMPORTS} else [])
        for file in WITH_ALL
    ],
    ids=[module_name(file) for file in WITH_ALL],
)
def test_all_is_sorted_and_true(file: Path) -> None:
    names = declared_names(file)
    assert names
    # Constants, then classes, then functions: the order that ruff keeps.
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[:1].islower() or name[:1] == "_", name))
    assert len(set(names)) == len(names)
    module = importlib.import_module(module_name(file))
    assert [name for name in names if not hasattr(module, name)] == []


#: What imports no heavy library, in the order in which one process does it.
LIGHT_CODE = {
    "commands": "from lockstep.cli.main import main\nfor words in (['--help'], ['train', '--help'], ['--version'], "
    "['runs'], ['version']):\n    assert not main(words)",
    "import lockstep": "import lockstep",
    **{
        part: "\n".join(f"import {module_name(file)}" for file in FILES if part_of(module_name(file)) == part)
        for part in LIGHT
    },
    "the launcher": "import lockstep.launch.local.launcher",
    "detection": "import lockstep.hardware\nlockstep.hardware.detect_devices()",
    "flags of a run": "from lockstep.cli.settings import NO_SETTINGS, to_mapping\nto_mapping(NO_SETTINGS, 'har')",
}


@pytest.mark.long
def test_no_heavy_library_is_imported_before_it_is_needed(tmp_path: Path) -> None:
    assert heavy_after(LIGHT_CODE, tmp_path) == {}


#: Begin with an underscore, and are documented: of named tuples, os, sys, and of agents and metrics that are derived.
DOCUMENTED = {"_asdict", "_replace", "_fields", "_exit", "_getframe", "_current_frames"}
#: Private names of libraries that Lockstep's own classes have, too: only for ``self`` outside ``_compat``.
SHARED = {"_apply", "_buffers", "_groups", "_modules", "_parameters", "_workers"}
#: Methods that only ``_compat`` overrides.
OVERRIDES = {"_configure_launcher", "_evaluate_stopping_criteria", "_parse_ckpt_path", "_run_subcommand"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in DOCUMENTED


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines: functions, classes, variables, attributes of ``self``, arguments."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


@cache
def outside_compat() -> dict[Path, ast.Module]:
    return {file: tree(file) for file in FILES if part_of(module_name(file)) != "_compat"}


@cache
def ours() -> frozenset[str]:
    return frozenset(name for module in outside_compat().values() for name in own_names(module)) - OVERRIDES


def foreign_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, private name) of each import, attribute and ``getattr`` that only a library can have defined."""
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.ImportFrom(module=str(module)) if not module.startswith("lockstep"):
                names = [*module.split("."), *(alias.name for alias in node.names)]
            case ast.Import():
                names = [part for alias in node.names for part in alias.name.split(".")]
            case ast.Attribute(value=value, attr=name):
                shared = name in SHARED and not (isinstance(value, ast.Name) and value.id in ("self", "cls"))
                names = [name] if shared or name not in ours() else []
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(str(name)), *_]):
                names = [name] if name not in ours() else []
            case ast.FunctionDef(name=name) if name in OVERRIDES:
                names = [name]
        yield from ((node.lineno, name) for name in names if is_private(name))  # type: ignore[attr-defined]


@pytest.mark.long
def test_private_names_of_libraries_are_in_compat() -> None:
    found = [
        f"{file.name}:{line}: {name}"
        for file, module in outside_compat().items()
        for line, name in foreign_names(module)
    ]
    assert not found, "private names of other libraries belong in lockstep/_compat:\n" + "\n".join(found)


PRIVATE_CODE = (
    "import torch._dynamo",
    "from torch.utils._pytree import tree_map",
    "from torch.nn.modules.batchnorm import _BatchNorm",
    "torch._foreach_add_(a, b)",
    "metric._update_count = 1",
    "layer._buffers",
    "getattr(optimizer, '_opt_called', False)",
    "class Own(DDPStrategy):\n    def _configure_launcher(self): pass",
)


def test_private_names_are_found() -> None:
    assert [code for code in PRIVATE_CODE if not list(foreign_names(ast.parse(code)))] == []


#: What tests may know of the inside of the product. A limit only falls: it is what has been reached.
MOST_FILES_WITH_PRIVATE_MODULES = 60
MOST_PRIVATE_NAMES = 40
#: Modules whose names are private, however they are imported: in code that a test writes for another process, too.
PRIVATE_IMPORT = re.compile(
    r"^\s*(?:from|import) lockstep\.(?!launch\.engines\.spec\b)(?:(?:engine|launch|data)\.|(?:engine|launch)\b)", re.M
)

TESTS = sorted((ROOT / "tests").rglob("*.py"))


def test_few_tests_import_private_modules() -> None:
    """Public: ``lockstep``, ``lockstep.data``, the interface of engines, the command line, and a run folder."""
    files = [str(file.relative_to(ROOT)) for file in TESTS if PRIVATE_IMPORT.search(file.read_text(encoding="utf-8"))]
    assert len(files) <= MOST_FILES_WITH_PRIVATE_MODULES, "\n".join(files)


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of private names of the product: attributes of objects other than ``self``, and imports."""
    of_tests = frozenset(own_names(tree))
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.ImportFrom(module=str(module)) if module.startswith("lockstep"):
                names = [alias.name for alias in node.names]
            case ast.Attribute(value=value, attr=name) if not isinstance(value, ast.Name | ast.Call) or (
                ast.unparse(value) not in ("self", "cls", "super()")
            ):
                names = [name]
        yield from ((node.lineno, name) for name in names if is_private(name) and name in ours() - of_tests)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_few_tests_use_private_names() -> None:
    uses = [f"{file.relative_to(ROOT)}:{line}: {name}" for file in TESTS for line, name in private_uses(tree(file))]
    assert len(uses) <= MOST_PRIVATE_NAMES, "\n".join(uses)


@pytest.mark.slow
def test_private_names_of_the_product_are_found() -> None:
    uses = {
        "from lockstep.data.loader import _groups": 1,
        "update._on_host = True": 1,
        "class Own:\n    def _on_host(self): ...\nOwn()._on_host()": 0,
        "trainer._logger_connector": 0,
    }
    assert {code: len([*private_uses(ast.parse(code))]) for code in uses} == uses


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WALKS = re.findall(r"^### (One \w.*)\n\n((?:\d+\. .*\n)+)", ARCHITECTURE, re.MULTILINE)


def definition(file: str, name: str) -> ast.AST:
    """The class or function of this name, with the names of its classes before it."""
    node: ast.AST = tree(PACKAGE / file)
    for part in name.split("."):
        [node] = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part]
    return node


def called_names(node: ast.AST) -> set[str]:
    functions = (child.func for child in ast.walk(node) if isinstance(child, ast.Call))
    return {getattr(function, "attr", getattr(function, "id", "")) for function in functions}


@pytest.mark.parametrize(("value", "steps"), WALKS, ids=[value for value, _ in WALKS])
def test_values_are_followed_through_functions_that_call_each_other(value: str, steps: str) -> None:
    functions = re.findall(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`:", steps, re.MULTILINE)
    assert len(functions) == len(steps.splitlines()) <= 10
    called: set[str] = set()
    for number, (file, name) in enumerate(functions, 1):
        assert number == 1 or name.rpartition(".")[2] in called, name
        called |= called_names(definition(file, name))


_, _, ADDITIONS = ARCHITECTURE.partition("## Where to add what")
PLACES = re.findall(r"^\| (?!to add|---)(.+?) \| (.+) \|$", ADDITIONS.partition("\n## ")[0], re.MULTILINE)
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FILE = re.compile(r"[\w/.-]+(/|\.(py|js|toml|md))")


def named_files(word: str) -> list[Path]:
    """The file, or the modules of the folder, of the package or else of the repository."""
    path = next(root / word for root in (PACKAGE, ROOT) if (root / word).exists())
    return [path] if path.is_file() else [*path.rglob("*.py")]


@pytest.mark.parametrize(("addition", "place"), PLACES, ids=[addition for addition, _ in PLACES])
def test_the_names_of_a_place_to_add_something_are_in_its_files(addition: str, place: str) -> None:
    words = re.findall(r"`([^`]+)`", place)
    files = [file for word in words if FILE.fullmatch(word) for file in named_files(word)]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    names = {word.rpartition(".")[2] for word in words if NAME.fullmatch(word) and not FILE.fullmatch(word)}
    missing = {name for name in names - {"jsonl"} if not re.search(rf"\b{name}\b", text)}
    assert "](#" in place or missing == set(), addition


@pytest.mark.long
def test_the_concepts_before_the_first_step_are_few_classes() -> None:
    assert {value for value, _ in WALKS} == {"One batch", "One gradient", "One metric value"}
    table = ARCHITECTURE.partition("| of | concepts |")[2].partition("\n\n")[0]
    concepts = re.findall(r"`(\w+)`", table)
    classes = {node.name for file in FILES for node in ast.walk(tree(file)) if isinstance(node, ast.ClassDef)}
    assert len(set(concepts)) == len(concepts) <= 25
    assert set(concepts) <= classes
