"""Type checkers without plugins accept the README's programs, and find mistakes in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.test_public_names import code_of
from tests.gloo import ROOT

#: Names that the README's program for Lightning leaves to the reader.
PRELUDE = "from lightning.pytorch import LightningDataModule as MyDataModule, LightningModule as MyModule\n"
MISTAKES = """
import lockstep

lockstep.train("har", epoch=3)
lockstep.train("har", devices=2)
lockstep.Run("last").metrics["val_loss"].nonsense
lockstep.RunConfig(nonsense=1)
"""
#: Lines of MISTAKES that a checker must report.
WRONG = [4, 5, 6, 7]
# Of libraries and of what lies under the public face, mypy reads nothing here: that would take half a minute. pyright
# reads all of it, and `make lint` runs mypy on the package.
MYPY = """
[mypy]
follow_imports = silent
[mypy-torch.*,torchmetrics.*,lightning.*,numpy.*,rich.*,jinja2.*,fsspec.*,yaml.*,psutil.*,pynvml.*]
follow_imports = skip
follow_imports_for_stubs = True
ignore_missing_imports = True
[mypy-lockstep.launch.*,lockstep.telemetry.*,lockstep.checkpoint.*,lockstep.engine.session.*,lockstep.engine.strategies.*]
follow_imports = skip
[mypy-lockstep.tasks.*,lockstep.data.loader,lockstep.data.stream,lockstep.lightning.*,lockstep.engine.optim.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("typed")
    (path / "readme.py").write_text(PRELUDE + "\n".join(code_of(ROOT / "README.md")), encoding="utf-8")
    updates = [code for code in code_of(ROOT / "docs" / "own-loop.md") if "session.updates(" in code]
    (path / "updates.py").write_text("\n".join(updates), encoding="utf-8")
    (path / "mistakes.py").write_text(MISTAKES, encoding="utf-8")
    return path


@pytest.mark.slow
def test_pyright(folder: Path) -> None:
    settings = {"include": ["."], "extraPaths": [str(ROOT / "src")], "reportUnusedExpression": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(folder), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = {"readme.py": [], "updates.py": [], "mistakes.py": []}
    for item in found:
        lines[Path(item["file"]).name].append(f"{item['range']['start']['line'] + 1}: {item['message']}")
    assert lines["readme.py"] == lines["updates.py"] == []
    assert sorted({int(line.split(":")[0]) for line in lines["mistakes.py"]}) == WRONG, lines


@pytest.mark.slow
def test_mypy(folder: Path) -> None:
    (folder / "mypy.ini").write_text(MYPY, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "--cache-dir", str(ROOT / ".mypy_cache/readme")]
    done = subprocess.run(
        [*command, "readme.py", "updates.py", "mistakes.py"],
        cwd=folder,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line for line in errors if not line.startswith("mistakes.py:")] == []
    assert sorted({int(line.split(":")[1]) for line in errors}) == WRONG, done.stdout + done.stderr
