"""The promise on a real GPU: two ranks that share it compute what one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.verification import verify
from tests.toys import Toy

pytestmark = pytest.mark.gpu

DEVICES = {
    "hardware": {"selected_devices": ["gpu:0", "gpu:0"], "matmul_precision": "highest"},
    "task": {"batchnorm": True, "dropout": 0.3},
}


@pytest.mark.parametrize(
    ("sections", "outcome"),
    [({"training": {"reproducibility": "exact"}}, "identical"), ({}, "equal without dropout")],
    ids=["exact", "fast"],
)
def test_two_ranks_on_one_gpu_compute_what_one_computes(tmp_path: Path, sections: dict[str, Any], outcome: str) -> None:
    report = verify(Toy, {**DEVICES, "runs_dir": str(tmp_path), **sections}, steps=12)
    assert report.outcome == outcome, report.findings()
