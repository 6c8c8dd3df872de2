"""Examples, documentation and benchmarks use public names only."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gloo import ROOT

#: Packages and modules whose names users may import; those with an ``__all__`` offer what it lists.
PUBLIC = {
    "lockstep",
    "lockstep.lab.bench",
    "lockstep.config",
    "lockstep.data",
    "lockstep.data.download",
    "lockstep.errors",
    "lockstep.hardware",
    "lockstep.lightning",
    "lockstep.lightning.callbacks",
    "lockstep.lightning.cli",
    "lockstep.recipes.text.gpt",
    "lockstep.tasks.har.models",
    "lockstep.recipes.speech.lmu",
    "lockstep.recipes.speech.recogniser",
    "lockstep.tasks.har.vision",
    "lockstep.recipes.autoencoder",
    "lockstep.recipes.autoencoder.model",
    "lockstep.recipes.images.resnet",
    "lockstep.tasks.har",
}
#: Benchmarks that measure an internal part, and which.
INTERNAL = {
    "benchmarks/checkpoint_stall.py": "writing a checkpoint in the background, without a run",
    "benchmarks/compression.py": "all-reduce of compressed gradients, on ranks without a task",
    "benchmarks/evaluation.py": "one evaluation, on ranks without a run",
    "benchmarks/forecast.py": "the predictions' parts against their measurements",
    "benchmarks/gpu_workloads.py": "predictions of memory and speed against their measurements",
    "benchmarks/monitor.py": "the monitor's own cost",
    "benchmarks/order.py": "the orders of samples, by blocks",
    "benchmarks/scale.py": "the requests of a meeting, by ranks that have no torch",
    "benchmarks/sharded_checkpoint.py": "writing and reading a divided checkpoint, without a run",
    "benchmarks/sources.py": "reading of each source, without training",
    "benchmarks/studio.py": "the page with thousands of runs, whose folders it writes itself",
    "benchmarks/studio_page.py": "the page with a live run, whose folder it writes itself",
}


def programs() -> Iterator[tuple[str, str]]:
    """Name and text of each program that users read."""
    for folder in ("examples", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if ".venv" not in file.parts:
                yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, code in enumerate(code_of(file), 1):
            yield f"{file.relative_to(ROOT)}, program {number}", code


def code_of(file: Path) -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```", file.read_text(encoding="utf-8"), re.S | re.M)
    return [textwrap.dedent(block) for block in blocks]


def imported(code: str) -> Iterator[tuple[str, str | None]]:
    """Module and name of each import of Lockstep; no name for a module's own."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a part of a program, in the documentation: its lines that import
        tree = ast.parse("\n".join(line.strip() for line in code.splitlines() if re.match(r"\s*(from|import) ", line)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "lockstep")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lockstep":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lockstep":
            yield "lockstep", node.attr


PROGRAMS = [pytest.param(name, code, id=name) for name, code in programs() if any(imported(code))]


@pytest.mark.parametrize(("name", "code"), PROGRAMS)
def test_only_public_names_are_imported(name: str, code: str) -> None:
    private = [
        f"{module}.{attribute or ''}"
        for module, attribute in imported(code)
        if module not in PUBLIC
        or (attribute is not None and attribute not in getattr(importlib.import_module(module), "__all__", [attribute]))
    ]
    if name in INTERNAL:
        assert private, f"{name} uses public names only: remove it from INTERNAL"
    else:
        assert private == []


def test_every_exception_is_a_program() -> None:
    assert INTERNAL.keys() <= {str(param.id) for param in PROGRAMS}
