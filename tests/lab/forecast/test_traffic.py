"""What DDP and FSDP2 send and hold at 256 ranks, by torch's fake process group, against the forecast's arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gloo import ROOT, clean_environment

RANKS = 256


@pytest.mark.slow
def test_traffic_and_memory_of_256_ranks() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.lab.forecast.world_of_256"]
    environ = clean_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ddp"] == found["ddp_predicted"]
    assert len(found["ddp"]) > 2
    blocks, fsdp = [size for size in found["blocks"] if size], found["fsdp"]
    # Gathered for the forward, gathered again for the backward, scattered after it.
    assert fsdp["collectives"] == 3 * len(blocks)
    assert sorted(fsdp["sizes"]) == sorted(3 * blocks)
    sent = sum(fsdp["sizes"]) * (RANKS - 1) / RANKS
    assert found["fsdp_sent_predicted"] == pytest.approx(sent)
    assert found["fsdp_held_predicted"] == pytest.approx(fsdp["held"], rel=0.15)
