"""``make test`` brings the browser that its tests need, where it may; stubs stand for what it would call."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gloo import ROOT


def make_browser(folder: Path, user: int, *programs: str) -> str:
    """What ``make browser`` prints for that user where there are only these ``programs``; they tell of their calls."""
    make = shutil.which("make")
    assert make is not None
    for name in programs:
        code = "exit 1" if name == "broken-apt-get" else ""
        write(folder / name.removeprefix("broken-"), f'echo "$0 $*" >> {folder}/calls; {code}')
    write(folder / "id", f"echo {user}")
    command = [make, "-f", str(ROOT / "Makefile"), "browser"]
    done = subprocess.run(command, env={"PATH": str(folder)}, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def write(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def calls(folder: Path) -> list[str]:
    file = folder / "calls"
    return file.read_text().replace(f"{folder}/", "").splitlines() if file.exists() else []


def test_root_installs_a_browser_that_is_missing(tmp_path: Path) -> None:
    assert make_browser(tmp_path, 0, "apt-get") == "installing chromium for the browser tests\n"
    update, install = calls(tmp_path)
    assert update.startswith("apt-get ")
    assert update.endswith(" update")
    assert install.endswith(" install -y chromium")


@pytest.mark.parametrize("name", ["chromium", "chromium-browser"])
def test_a_browser_that_is_there_costs_nothing(tmp_path: Path, name: str) -> None:
    assert make_browser(tmp_path, 0, "apt-get", name) == ""
    assert calls(tmp_path) == []


@pytest.mark.parametrize(("user", "programs"), [(1000, ("apt-get", "sudo")), (0, ()), (0, ("broken-apt-get",))])
def test_who_cannot_install_it_is_told_and_goes_on(tmp_path: Path, user: int, programs: tuple[str, ...]) -> None:
    assert "the browser tests are skipped" in make_browser(tmp_path, user, *programs)
    assert user == 0 or calls(tmp_path) == []
