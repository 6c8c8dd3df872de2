"""The process of a command, before the command itself runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo import clean_environment

RUNS = f"{sys.executable} -m lockstep runs --runs-dir"


@pytest.mark.slow
def test_a_command_whose_standard_files_are_closed(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("")
    for closed in (">&-", "<&- >&- 2>&-"):
        command = f"{RUNS} {tmp_path} {closed}"
        result = subprocess.run(command, shell=True, env=clean_environment(), capture_output=True, check=False)
        assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_ctrl_c_while_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "cyclopts.py").write_text("raise KeyboardInterrupt")
    environ = clean_environment()
    environ["PYTHONPATH"] = f"{tmp_path}:{environ.get('PYTHONPATH', '')}"
    result = subprocess.run(f"{RUNS} .", shell=True, env=environ, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (130, b"")
