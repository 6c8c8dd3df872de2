"""Run folders as version 0.1.0 wrote them still open, resume and evaluate.

Each was trained to step 30, in the middle of its second epoch.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from lockstep.cli.main import main
from tests.e2e.test_train import finish, start

SAVED = Path(__file__).parent / "saved_runs"
#: A folder, and the test error that 0.1.0 itself reached after 30 more steps (two ranks have twice the global batch).
REACHED = {"one-rank": 0.0747, "two-ranks": 0.0731, "fsdp": 0.0731}


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("one-rank", None),
        pytest.param("one-rank", "cpu,cpu", marks=pytest.mark.drill),
        ("two-ranks", "cpu"),
        ("fsdp", None),
        pytest.param("fsdp", "cpu", marks=pytest.mark.drill),
    ],
)
def test_a_saved_run_opens_resumes_and_evaluates(
    name: str, devices: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAVED / name, tmp_path / "run", symlinks=True)
    assert main(["show", "run"]) == 0
    assert re.search(r"status +completed", capsys.readouterr().out)
    chosen = ("--devices", devices) if devices else ()
    assert "step 60" in finish(start("resume", "run", "--set", "training.max_steps=60", *chosen, cwd=tmp_path))
    assert main(["evaluate", "run"]) == 0
    evaluated = re.search(r"test_mse +(\S+)", capsys.readouterr().out)
    assert evaluated and float(evaluated[1]) == pytest.approx(REACHED[name], abs=2e-4)
