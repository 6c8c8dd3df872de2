"""Installing on a machine without internet, beside the torch that it has."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.gloo import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_requirements", ROOT / "scripts" / "gpu" / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any") -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as archive:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")


def test_nothing_replaces_the_torch_of_the_machine(script: ModuleType) -> None:
    wanted = [*script.requirements(["core", "tests", "peers", "studio", "colorama"]), *script.pins()]
    names = {script.name_of(entry) for entry in wanted}
    assert not names & {"torch", "numpy"}
    assert names >= {"pydantic", "cyclopts", "pytest-timeout", "hypothesis", "accelerate", "fastapi", "colorama"}


def test_only_what_is_missing_is_installed(script: ModuleType, tmp_path: Path) -> None:
    wheel(tmp_path, "lockstep_absent", "1.0", "torch>=99", "numpy>=99", "lockstep-needed>=2; extra != 'docs'")
    wheel(tmp_path, "lockstep_needed", "2.1", 'lockstep-other; extra == "all"', 'lockstep-never; python_version < "3"')
    wheel(tmp_path, "lockstep_other", "1.0")
    wheel(tmp_path, "lockstep_other", "3.0", tag="cp27-cp27m-win32")
    wheel(tmp_path, "pytest", "99.0")
    found = script.missing(tmp_path, ["lockstep-absent", "pytest>=7", "lockstep-needed[all]"])
    assert sorted(path.name.split("-")[0] for path in found) == ["lockstep_absent", "lockstep_needed", "lockstep_other"]
    assert sum("pytest" in path.name for path in script.missing(tmp_path, ["pytest>=99"])) == 1
    with pytest.raises(SystemExit, match=r"error: lockstep-never is neither installed nor in"):
        script.missing(tmp_path, ["lockstep-never"])


def test_stand_ins_have_the_version_of_the_pins(script: ModuleType, tmp_path: Path) -> None:
    script.write_stand_ins(tmp_path)
    names = {path.name.split("-")[0]: path.name.split("-")[1] for path in tmp_path.iterdir()}
    assert sorted(names) == ["numpy", "torch"]
    assert all(version.endswith("+stand.in") for version in names.values())
