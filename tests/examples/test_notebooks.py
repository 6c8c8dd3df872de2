"""The notebooks run from top to bottom, draw, and are committed without outputs; their cells assert what they teach."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gloo import ROOT, clean_environment

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
#: In a process of its own: the kernel's client leaves threads and an event loop behind.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""


def cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem[0] in "13" else pytest.mark.drill) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    environment = clean_environment(PYTHONPATH=str(ROOT / "src"), IPYTHONDIR=str(tmp_path / "ipython"))
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = [output for cell in cells(tmp_path / "executed.ipynb") for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2, "plots"
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    if path.stem.startswith(("1", "4", "5")):
        assert "run folder" in printed, "the lines of a run"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_without_outputs(path: Path) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(path)), "run nbstripout"


def test_each_has_exercises_with_folded_solutions() -> None:
    assert len(NOTEBOOKS) == 6
    for path in NOTEBOOKS:
        everything = json.loads(path.read_text(encoding="utf-8"))["cells"]
        solutions = [cell for cell in everything if "solution" in cell["metadata"].get("tags", [])]
        assert len(solutions) == sum("".join(cell["source"]).count("### Exercise") for cell in everything) == 2
        assert all(cell["metadata"]["jupyter"]["source_hidden"] for cell in solutions)
