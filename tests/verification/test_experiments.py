"""The runs for comparison: the user's training, without what it tells others or starts elsewhere."""

from __future__ import annotations

from pathlib import Path

import lockstep
from lockstep.config import resolve
from lockstep.rundir.folder import RunDir
from lockstep.verification.experiments import Lab, Variant
from tests.toys import Toy


def test_a_run_for_comparison_tells_nobody_and_waits_for_no_other_node(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = {
        "hardware": {"selected_devices": ["cpu", "cpu"]},
        "telemetry": {
            "mlflow": True,
            "mlflow_uri": store.as_uri(),
            "wandb": True,
            "wandb_mode": "offline",
        },
        "launch": {"nodes": "2", "rdzv": "127.0.0.1", "join_timeout_s": 0.1},
    }
    plan = lockstep.plan(Toy, settings)
    lab = Lab(Toy, resolve({**Toy.defaults, **settings}), plan, 2, 1, tmp_path / "lab", lambda line: None)
    assert len(lab.run(Variant("one")).loss) == 2
    run = RunDir.open(tmp_path / "lab" / "run-01")
    assert run.status() == "completed"
    assert not store.exists()
    assert list(run.logs.iterdir()) == []
