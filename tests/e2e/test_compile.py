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
import torch
from lockstep.checkpoint.store import CheckpointStore
from lockstep.data.arrays import NO_LABEL, filled
from tests.toys import Toy
from torch._dynamo.utils import counters

class Filled(Toy):
    def pad(self, batch, samples):
        return filled(batch, samples, 1)

    def _misbehave(self):
        pass  # counts its calls: another graph for each number

    def loss(self, model, batch):
        return lockstep.Loss(super().loss(model, batch).total, (batch[1] != NO_LABEL).sum())

def train(name, task=Filled, devices="cpu", strategy="auto", **training):
    torch.compiler.reset()
    counters.clear()
    run = lockstep.train(task, {
        "save_dir": name,
        "hardware": {"selected_devices": devices, "strategy": strategy},
        "telemetry": {"progress": "silent", "log_interval": 1, "tensorboard": "off"},
        "training": {"epochs": 2, "threads": 1, "batch_size": 16 // len(devices.split(",")), **training},
    })
    rows = (run.run_dir / "steps.jsonl").read_text().splitlines()
    store = CheckpointStore(run.run_dir / "checkpoints")
    return {
        "losses": [json.loads(row)["loss"] for row in rows],
        "weights": sorted(store.load(26).model),
        "graphs": counters["stats"]["unique_graphs"],
    }

mode = {"compile": True, "compile_mode": "reduce-overhead"}
ranks = {"devices": "cpu,cpu", "strategy": "fsdp", "compile": True}
whole = {**mode, "compile_loss": True}
print(json.dumps([train("plain", Toy), train("compiled", **mode), train("whole", **whole), train("blocks", **ranks)]))
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
    assert len(plain["losses"]) == 26
    assert [compiled["graphs"] for compiled in others] == [1, 1, 0], "the tail has the shape of other batches"
    for compiled in others:
        assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert compiled["weights"] == plain["weights"]
    assert list((tmp_path / "cache").rglob("*.cpp")), "nothing was compiled"


def test_a_mode_without_compiling_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile is off"):
        resolve({"training": {"compile_mode": "reduce-overhead"}})
    with pytest.raises(ConfigError, match="compile_loss is set, but compile is off"):
        resolve({"training": {"compile_loss": True}})
