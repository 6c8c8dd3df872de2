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
from tests.gloo import ROOT, clean_environment

SCRIPT = """
import json
import lockstep
import torch
from lockstep.checkpoint.store import CheckpointStore
from lockstep.data import filled
from tests.toys import Toy
from torch._dynamo.utils import counters

class Filled(Toy):
    def pad(self, batch, samples):
        return filled(batch, samples, 1)

    def _misbehave(self):
        pass  # counts its calls: another graph for each number

    def loss(self, model, batch):
        return lockstep.Loss(super().loss(model, batch).total, (batch[1] != -100).sum())

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


COMPILED_BY_THE_USER = """
import sys
from dataclasses import replace
from pathlib import Path
import lockstep
import torch
from lockstep.checkpoint.store import CheckpointStore
from tests.toys import Toy

CALLS = []

def backend(graph, inputs):
    return lambda *given: CALLS.append(1) or graph(*given)

class Compiled(Toy):
    def model(self):
        model = super().model()
        model[4] = torch.compile(model[4], backend=backend)
        model[0].weight.requires_grad_(False)
        return torch.compile(model, backend=backend)

class Plain(Toy):
    def model(self):
        model = super().model()
        model[0].weight.requires_grad_(False)
        return model

def loop(folder, task, **how):
    with lockstep.Session(global_batch_size=16, save_dir=folder, **how) as session:
        torch.manual_seed(0)
        model = task().model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        train = Toy().datasets().train
        for _ in session.epochs(2):
            for x, y in session.batches(train):
                session.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), count=len(y))
                session.step(optimizer)
    return session

def named_as_before(path):
    # As checkpoints of earlier versions are.
    def old(value):
        if isinstance(value, dict):
            return {f"_orig_mod.{k}" if k in names else k: old(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(f"_orig_mod.{v}" if isinstance(v, str) and v in names else old(v) for v in value)
        return value
    store = CheckpointStore(Path(path, "checkpoints"))
    found = store.load(store.step_of("last"))
    names = {*found.model}
    saved = {"model": old(found.model), "trainer": old(found.trainer), "frozen": ()}
    assert all(name.startswith("_orig_mod.") for name in saved["model"])
    store.save(replace(found, **saved))

quiet = {"telemetry.progress": "silent"}
ema = {"averaging.name": "ema", "scheduler.name": "constant", "scheduler.warmup_steps": 0}
start = {"max_steps": 5}
plain = lockstep.train(Plain(), quiet | ema, save_dir="plain")
lockstep.train(Compiled(), quiet | ema, save_dir="compiled", **start)
assert CALLS
for steps in (12, 26):
    named_as_before("compiled")
    lockstep.Run("compiled").resume(Compiled(), max_steps=steps)
loop("session", Plain, config=quiet)
loop("compiled session", Compiled, config=quiet | {"training.max_steps": 5})
named_as_before("compiled session")
loop("compiled session", Compiled, config=quiet | {"training.max_steps": 12}, resume=True)
loop("compiled session", Plain, config=quiet, resume=True)  # and without the compiler
for one, other in (("plain", "compiled"), ("session", "compiled session")):
    saved = [CheckpointStore(Path(path, "checkpoints")).load(26).model for path in (one, other)]
    torch.testing.assert_close(*saved)
named_as_before("compiled")
model = lockstep.Run("compiled").load_model("last", task=Compiled())
other = lockstep.Run("plain").load_model("last", task=Plain())
torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()))
print(type(model).__name__)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_model_that_the_user_compiles_is_saved_under_its_own_names(tmp_path: Path) -> None:
    environment = clean_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
    (tmp_path / "script.py").write_text(COMPILED_BY_THE_USER)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=190
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "Sequential"


def test_a_mode_without_compiling_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\bcompile_mode\b"):
        resolve({"training": {"compile_mode": "reduce-overhead"}})
    with pytest.raises(ConfigError, match=r"\bcompile_loss\b"):
        resolve({"training": {"compile_loss": True}})
