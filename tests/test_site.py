"""The documentation site builds without a warning, and what its first pages show is what commands print."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo import ROOT, clean_environment
from tests.telemetry.test_schemas import check_folder

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.M | re.S)


def run(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=folder, env=clean_environment(PATH=path, COLUMNS="200"), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def form(line: str) -> str:
    """A line without its numbers and spaces: the same in every run."""
    return re.sub(r"[\d.,+e-]*\d", "#", re.sub(r"\s+", " ", line).strip())


def follow(page: str, folder: Path) -> None:
    """Write the files of a page, run its commands, and look for each line of output that it shows."""
    for language, title, text in BLOCK.findall((ROOT / "docs" / "start" / page).read_text(encoding="utf-8")):
        if title:
            (folder / title).write_text(text, encoding="utf-8")
        elif language == "console":
            for block in re.split(r"^\$ ", text, flags=re.M)[1:]:
                command, *shown = block.splitlines()
                printed = [form(line) for line in run(command, folder).splitlines()]
                for line in shown:
                    assert line == "…" or any(form(line) in other for other in printed), f"{command}: {line}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "pages",
    [["install.md", "first-run.md"], ["own-model.md", "several-devices.md"], ["own-loop.md"]],
    ids=["first", "model", "loop"],
)
def test_readers_see_what_the_first_pages_show(pages: list[str], tmp_path: Path) -> None:
    for page in pages:
        follow(page, tmp_path)
    written = {"run", "heartbeat", "config", "plan", "metrics", "steps", "ranks", "system", "manifest"}
    checked = [check_folder(run.parent) for run in tmp_path.glob("*/run.json")]
    assert checked and all(seen >= {"run", "config", "plan", "metrics", "manifest"} for seen in checked)
    assert set.union(*checked) >= written


def test_drawings_are_what_the_script_draws() -> None:
    spec = importlib.util.spec_from_file_location("docs_drawings", ROOT / "docs" / "drawings.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = {name: draw() for name, draw in module.DRAWINGS.items()}
    written = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "docs" / "drawings").iterdir()}
    assert drawn == written, "run: python docs/drawings.py"


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install 'lockstep-train[docs]'")
    run(f"python -m mkdocs build --quiet --strict -f {ROOT / 'mkdocs.yml'} -d {tmp_path / 'site'}", tmp_path)
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert not [page.name for page in (ROOT / "docs").rglob("*.md") if page.name not in nav], "pages without a place"
    page = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert ":class:" not in page
    promise = (tmp_path / "site" / "concepts" / "promise.html").read_text(encoding="utf-8")
    assert promise.count("<svg xmlns") >= 3, "drawings are part of the page"
    assert "is not a run folder" in (tmp_path / "site" / "errors.html").read_text(encoding="utf-8")
    assert (tmp_path / "site" / "schemas" / "run.schema.json").exists()
    assert "http" not in "".join(re.findall(r'<(?:script|link)[^>]*(?:src|href)="(https?:[^"]*)"', page))


def test_an_installed_wheel_needs_no_repository(tmp_path: Path) -> None:
    run(f"python -m pip wheel --no-deps --no-build-isolation --quiet -w wheels {ROOT}", tmp_path)
    run("python -m pip install --no-deps --no-index --quiet --target installed wheels/*.whl", tmp_path)
    code = "import sys; sys.path.insert(0, 'installed'); from lockstep.cli.main import main; sys.exit(main())"
    assert "ddp" in run(f'python -P -c "{code}" plan har --devices cpu,cpu', tmp_path)
    files = {str(path.relative_to(tmp_path / "installed")) for path in (tmp_path / "installed").rglob("*")}
    assert {"lockstep/py.typed", "lockstep/studio/static/index.html"} <= files
