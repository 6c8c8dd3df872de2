"""``lockstep.train`` from a script, a notebook-like process and another program."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import lockstep
from lockstep.errors import ConfigError, TaskError
from lockstep.rundir.folder import RunDir
from tests import commands
from tests.e2e.test_train import finish, start
from tests.gloo import ROOT, clean_environment
from tests.toys import MeanLoss, Streaming, Toy

SCRIPT = """
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
import lockstep
from tests.toys import Toy

class Mine(Toy):
    def model(self):
        return nn.Linear(12, 3)

result = lockstep.train(Mine(), {"hardware": {"selected_devices": ["cpu", "cpu"]}, "save_dir": "run"})
assert result.status == "completed", result
print("accuracy", result.metrics["test_accuracy"])
"""


def run(*arguments: str, cwd: Path, stdin: str = "") -> str:
    env = clean_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
    done = commands.start(*arguments, cwd=cwd, env=env, stdin=stdin)
    out, err = done.communicate(timeout=90)
    assert done.returncode == 0, out + err
    return out


@pytest.mark.slow
def test_a_script_without_a_main_guard_trains_a_class_of_its_own_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert "accuracy" in run("script.py", cwd=tmp_path)


@pytest.mark.slow
def test_a_script_under_torchrun_trains_twice(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import lockstep\nfrom tests.toys import Toy\n"
        "for name in ('first', 'second'):\n"
        "    result = lockstep.train(Toy, {'save_dir': name, 'hardware': {'selected_devices': 'cpu,cpu'}, "
        "'training': {'epochs': 1}})\n"
        "    assert result.status == 'completed', result\n"
    )
    run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "script.py", cwd=tmp_path)
    assert RunDir.open(tmp_path / "second").read().status == "completed"


@pytest.mark.drill
def test_a_program_on_standard_input_does_too(tmp_path: Path) -> None:
    assert "accuracy" in run("-", cwd=tmp_path, stdin=SCRIPT)


def test_one_device_gives_the_caller_back_its_process(tmp_path: Path) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    settings = {
        "hardware": {"selected_devices": ["cpu"]},
        "save_dir": str(tmp_path / "run"),
        "training": {"threads": 1},
    }
    result = lockstep.train(Toy, settings)
    assert result.status == "completed"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), expected[0])
    assert (np.random.get_state()[1] == expected[1]).all()


def test_make_plan_starts_nothing(tmp_path: Path) -> None:
    plan = lockstep.make_plan(
        Toy, {"hardware": {"selected_devices": ["cpu", "cpu"]}, "runs_dir": str(tmp_path / "runs")}
    )
    assert plan.batch.global_batch == 32
    assert all(decision.reason for decision in plan.decisions.values())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("task", "settings", "error", "words"),
    [
        (Streaming, {}, ConfigError, r"\bStream\b"),
        (MeanLoss, {}, TaskError, "Loss"),
        (Toy, {"training": {"epochs": 0}}, ConfigError, "training.epochs"),
        (Toy, {"task": {"dropuot": 0.1}}, ConfigError, "task.dropout"),
        (Toy(), {"task": {"dropout": 0.1}}, ConfigError, "beside a task object"),
    ],
)
def test_what_is_refused(tmp_path: Path, task: object, settings: dict, error: type, words: str) -> None:
    base = {"hardware": {"selected_devices": ["cpu"]}, "save_dir": str(tmp_path / "run")}
    with pytest.raises(error, match=words):
        lockstep.train(task, {**base, **settings})


@pytest.mark.slow
def test_the_readme_example_of_a_users_own_model_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    example = next(block for block in blocks if "class " in block and "Task" in block)
    (tmp_path / "my_task.py").write_text(example)
    code = [line for line in example.splitlines() if line.strip()]
    assert len(code) <= 27, "the README promises 25 lines"
    finish(start("train", "my_task.py:MyTask", "--devices", "cpu", "--epochs", "1", cwd=tmp_path))
