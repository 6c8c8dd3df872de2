"""The costs of ``docs/scale.md`` that grow with the number of ranks, counted with real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo import ROOT, clean_environment


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_and_calls_grow_as_the_document_says(tmp_path: Path) -> None:
    """Requests for the meeting by N, for process groups by N²; what rank 0 calls in each step, not at all."""
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "ranks", "--sizes", "2,4", "--json", str(report)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(PYTHONPATH=path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    two, four = json.loads(report.read_text())["reports"]
    for ranks, counted in ((2, two), (4, four)):
        requests = {purpose: numbers["requests"] for purpose, numbers in counted["store"].items()}
        assert (ranks, requests["meeting"]) == (ranks, 5 * ranks - 1)
        assert (ranks, requests["process groups"]) == (ranks, 12 * ranks**2 + 9 * ranks)
        assert counted["store"]["meeting"]["requests_of_another"] <= 3
    collectives = ("all_gather", "all_gather_object", "all_reduce", "broadcast", "new_group")
    calls = [
        {name: number for name, number in counted["calls"].items() if name.rpartition(" ")[2] in collectives}
        for counted in (two, four)
    ]
    assert calls[0] == calls[1] != {}
