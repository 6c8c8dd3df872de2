"""The contest of loops: everybody trains, in turn, and the report says what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gloo import ROOT


def contest(folder: Path, sides: tuple[str, ...], ranks: int) -> tuple[dict, str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--quick", "--clip", "on", "--out", str(folder)]
    command += ["--models", "mlp", "--ranks", str(ranks), "--sides", ",".join(sides)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "MPLBACKEND": "agg"})
    assert done.returncode == 0, done.stderr
    (report,) = folder.glob("*.json")
    (page,) = folder.glob("*.md")
    (picture,) = folder.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    return json.loads(report.read_text()), page.read_text()


def check(report: dict, page: str, sides: tuple[str, ...], ranks: int) -> None:
    (row,) = report["rows"]
    assert (row["model"], row["ranks"]) == ("mlp", ranks)
    for side in sides:
        assert row[side]["us_per_step"] > 0
        assert f" {side} |" in page
    assert row["lockstep"]["to_lockstep"]["ratio"] == 1.0
    assert report["versions"]["torch"]


@pytest.mark.timeout(600)
@pytest.mark.drill
def test_the_loops_take_turns(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sides = ("floor", "lockstep", "lightning") if find_spec("lightning") else ("floor", "lockstep")
    check(*contest(tmp_path, sides, 1), sides, 1)


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_that_are_installed(tmp_path: Path, ranks: int) -> None:
    packages = {"fabric": "lightning", "accelerate": "accelerate", "lightning": "lightning"}
    packages["transformers"] = "transformers"
    sides = ("floor", "hand", "lockstep", *(side for side, package in packages.items() if find_spec(package)))
    check(*contest(tmp_path, sides, ranks), sides, ranks)


@pytest.mark.slow
def test_a_contestant_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from pace.pacer import Contestant
    from pace.workload import Workload

    workload = Workload("hand", "no such model", 1, True, 50, 2, str(tmp_path / "pace"), str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    with pytest.raises(SystemExit, match=r"hand on 1 rank.*\n(.*\n)*KeyError: 'no such model'"):
        Contestant(workload, environment)
