"""``training.compile``: the same training as without it, up to rounding, and weights that know nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config import resolve
from lockstep.errors import ConfigError
from tests.gloo import ROOT

SCRIPT = """
import json
import lockstep
from lockstep.checkpoint.store import CheckpointStore
from tests.toys import Toy

def train(name, **training):
    run = lockstep.train(Toy, {
        "save_dir": name,
        "hardware": {"selected_devices": ["cpu"]},
        "telemetry": {"progress": "silent", "log_interval": 1, "tensorboard": "off"},
        "training": {"max_steps": 4, "threads": 1, **training},
    })
    rows = (run.run_dir / "steps.jsonl").read_text().splitlines()
    store = CheckpointStore(run.run_dir / "checkpoints")
    return {"losses": [json.loads(row)["loss"] for row in rows], "weights": sorted(store.load(4).model)}

mode = {"compile": True, "compile_mode": "reduce-overhead"}
print(json.dumps([train("plain"), train("compiled", **mode), train("whole", **mode, compile_loss=True)]))
"""


@pytest.mark.drill
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_a_compiled_model_trains_as_the_plain_one(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=590
    )
    assert done.returncode == 0, done.stderr
    plain, *others = json.loads(done.stdout.splitlines()[-1])
    assert len(plain["losses"]) == 4
    for compiled in others:
        assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert compiled["weights"] == plain["weights"]
    assert list((tmp_path / "cache").rglob("*.cpp")), "nothing was compiled"


def test_a_mode_without_compiling_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile is off"):
        resolve({"training": {"compile_mode": "reduce-overhead"}})
    with pytest.raises(ConfigError, match="compile_loss is set, but compile is off"):
        resolve({"training": {"compile_loss": True}})
