"""The documentation site builds without a warning, and what its first pages show is what commands print."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

import lockstep
from tests import commands
from tests.gloo import ROOT, clean_environment
from tests.rundir.test_schemas import check_folder

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.M | re.S)


def run(command: str, folder: Path, source: str = "") -> str:
    """What a shell prints for ``command``; ``source``: where it finds the package, if it is not installed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = clean_environment(PATH=path, PYTHONPATH=source)
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


#: What takes fewer steps in the suite than on the page: a small data set, few epochs. `make drills` takes them all.
SHORTER = [
    (r"har (.*--epochs 2 )", r"har \1--set task.source=synthetic --set task.synthetic_samples=64 "),
    (r"verify (.*)", r"verify \1 --steps 4"),
    (r"--epochs 10", "--epochs 1"),
]


def run_shown(command: str, folder: Path) -> str:
    """What a command of a page prints; Python is a fork that has imported torch and its compiler."""
    program, *arguments = shlex.split(command)
    if program not in ("lockstep", "python"):
        return run(command, folder)
    if program == "lockstep":
        arguments = ["-m", "lockstep", *arguments]
    environment = clean_environment(PYTHONPATH=str(ROOT / "src"), COLUMNS="200")
    process = commands.start(*arguments, cwd=folder, env=environment, merged=True, script=True)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, f"{command}\n{output}"
    return output


def form(line: str) -> str:
    """A line without its numbers and spaces: the same in every run."""
    return re.sub(r"[\d.,+e-]*\d", "#", re.sub(r"\s+", " ", line).strip())


def follow(page: str, folder: Path, shorter: list[tuple[str, str]]) -> None:
    """Write the files of a page, run its commands, and look for each line of output that it shows."""
    for language, title, text in BLOCK.findall((ROOT / "docs" / "start" / page).read_text(encoding="utf-8")):
        if title:
            (folder / title).write_text(text, encoding="utf-8")
        elif language == "console":
            for block in re.split(r"^\$ ", text, flags=re.M)[1:]:
                command, *shown = block.splitlines()
                for pattern, replacement in shorter:
                    command = re.sub(pattern, replacement, command)
                printed = [form(line) for line in run_shown(command, folder).splitlines()]
                for line in shown:
                    assert line == "…" or any(form(line) in other for other in printed), f"{command}: {line}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shorter", [SHORTER, pytest.param([], marks=pytest.mark.drill)], ids=["short", "whole"])
@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(["install.md", "first-run.md"], id="first"),
        pytest.param(["own-model.md", "several-devices.md"], id="model", marks=pytest.mark.slow),
        pytest.param(["own-loop.md"], id="loop", marks=pytest.mark.slow),
    ],
)
def test_readers_see_what_the_first_pages_show(
    pages: list[str], shorter: list[tuple[str, str]], tmp_path: Path
) -> None:
    for page in pages:
        follow(page, tmp_path, shorter)
    written = {"run", "heartbeat", "config", "plan", "metrics", "steps", "ranks", "system", "manifest"}
    checked = [check_folder(run.parent) for run in tmp_path.glob("runs/*/run.json")]
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


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install 'lockstep-train[docs]'")
    build = f"python -m mkdocs build --quiet --strict -f {ROOT / 'mkdocs.yml'} -d {tmp_path / 'site'}"
    run(build, tmp_path, source=str(ROOT / "src"))
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert not [page.name for page in (ROOT / "docs").rglob("*.md") if page.name not in nav], "pages without a place"
    page = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert ":class:" not in page
    promise = (tmp_path / "site" / "concepts" / "promise.html").read_text(encoding="utf-8")
    assert promise.count("<svg xmlns") >= 3, "drawings are part of the page"
    assert "is not a run folder" in (tmp_path / "site" / "errors.html").read_text(encoding="utf-8")
    assert (tmp_path / "site" / "schemas" / "run.schema.json").exists()
    assert "http" not in "".join(re.findall(r'<(?:script|link)[^>]*(?:src|href)="(https?:[^"]*)"', page))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_installed_wheel_needs_no_repository(tmp_path: Path) -> None:
    """The wheel is built from the sdist, and installed into an environment with the dependencies and nothing else."""
    run(f"cd {ROOT} && python -m hatchling build -t sdist -d {tmp_path}", tmp_path)
    run("python -m pip wheel --no-deps --no-build-isolation --quiet -w wheels *.tar.gz", tmp_path)
    run("python -m venv --without-pip env", tmp_path)
    site = tmp_path / "env" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A path in a .pth file does not execute that folder's .pth files: the project's editable installation stays out.
    (site / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    run("python -m pip --python env/bin/python install --no-deps --no-index --quiet wheels/*.whl", tmp_path)
    assert {"py.typed", "studio/static/index.html"} <= {
        str(file.relative_to(site / "lockstep")) for file in (site / "lockstep").rglob("*")
    }
    where = run("env/bin/python -P -c 'import lockstep; print(lockstep.__file__)'", tmp_path)
    assert where.startswith(str(site))
    assert "test_accuracy" in run("env/bin/lockstep train har --devices cpu,cpu --set training.max_steps=3", tmp_path)

    command = ["env/bin/lockstep", "studio", "--port", "0", "--no-browser"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as studio:
        assert studio.stdout is not None
        said = next((line for line in studio.stdout if "http://" in line), "")
        found = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert found, said
        with pytest.raises(urllib.error.HTTPError) as refused:  # without the token
            urllib.request.urlopen(found[0] + "/api/runs", timeout=60)
        assert refused.value.code == 401
        refused.value.close()
        studio.terminate()
        studio.communicate()


def test_the_version_is_the_same_everywhere() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", changes, re.M)
    assert versions[0] == str(citation["version"]) == lockstep.__version__
    assert versions == sorted(versions, key=lambda version: [int(part) for part in version.split(".")], reverse=True)


def test_forms_of_issues_ask_for_something() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    for form in (yaml.safe_load(file.read_text(encoding="utf-8")) for file in forms if file.name != "config.yml"):
        assert {"name", "description", "body"} <= form.keys()
        assert any(part.get("validations", {}).get("required") for part in form["body"])
