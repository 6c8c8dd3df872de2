"""Arguments and settings of a task object: recorded with the run, and used where a command makes the task again."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import lockstep
from lockstep.cli.main import main
from lockstep.errors import ConfigError, LockstepError, RunFolderError, TaskError
from tests.conftest import RunCli

FILE = """
import dataclasses
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

import lockstep


class Base(lockstep.Task):
    factor = 1.0

    def datasets(self):
        inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True) * self.factor)
        return lockstep.Datasets(train=data, val=data, test=data)

    def model(self):
        return nn.Linear(4, 1)

    def loss(self, model, batch):
        return lockstep.Loss(((model(batch[0]) - batch[1]) ** 2).sum(), len(batch[0]))

    def predict(self, model, batch):
        return {"output": model(batch[0])[:, 0]}


class Scaled(Base):
    def __init__(self, scale=1.0, shape: tuple[int, ...] = (1,), folder: Path | None = None, net=None, **others):
        super().__init__()
        assert type(shape) is tuple
        assert folder is None or isinstance(folder, Path)
        self.factor = scale * shape[0] * others.get("times", 1)
        self.data, self.context = [1, 2], 128


class WithTuple(Base):
    def __init__(self, factors=(1.0, 1.0)):
        super().__init__()
        self.factor = factors[0] * factors[1]


class WithDataclass(Base):
    @dataclasses.dataclass
    class Config:
        scale: float = 1.0

    def __init__(self, config=None):
        super().__init__(config)
        self.factor = self.config.scale


class WithMapping(Base):
    def __init__(self, cfg=None):
        super().__init__()
        self.factor = (cfg or {"scale": 1.0})["scale"]


class WithOmegaConf(Base):
    def __init__(self, cfg: DictConfig = OmegaConf.create({"scale": 1.0, "factor": "${scale}"})):
        super().__init__()
        self.factor = cfg.factor


class WrongLoss(Base):
    def loss(self, batch):
        return None


class AttributeInInit(Base):
    def __init__(self):
        self.metrics = []


class AttributeInModel(Base):
    def model(self):
        self.model = nn.Linear(4, 1)
        return self.model


class ClassAttribute(Base):
    optimizer = None


class Measured(Base):
    kind = list

    def metrics(self):
        return {"list": [], "none": None, "class": nn.Linear}[self.kind]

    def evaluate(self, model, batch):
        return (batch[1],)


class WithList(Measured):
    kind = "list"


class WithNone(Measured):
    kind = "none"


class WithClass(Measured):
    kind = "class"


class WithoutBatch(Base):
    def collate(self, samples):
        torch.utils.data.default_collate(samples)
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "tasks_with_settings.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import tasks_with_settings  # type: ignore[import-not-found]

    yield tasks_with_settings
    del sys.modules["tasks_with_settings"]


def _train(task: Any, **settings: Any) -> lockstep.Run:
    return lockstep.train(task, devices="cpu", epochs=1, batch_size=16, save_dir="run", **settings)


@pytest.mark.parametrize("kind", ["Scaled", "WithTuple", "WithDataclass", "WithMapping", "WithOmegaConf"])
def test_later_commands_make_the_task_with_its_arguments(kind: str, tasks: Any) -> None:
    made = {
        "Scaled": lambda: tasks.Scaled(50.0, (2,), folder=Path("here"), times=1),
        "WithTuple": lambda: tasks.WithTuple([100.0, 1.0]),
        "WithDataclass": lambda: tasks.WithDataclass(tasks.WithDataclass.Config(scale=100.0)),
        "WithMapping": lambda: tasks.WithMapping({"scale": 100.0}),
        "WithOmegaConf": lambda: tasks.WithOmegaConf(OmegaConf.create({"scale": 100.0, "factor": "${scale}"})),
    }[kind]
    run = _train(made())
    assert run.metrics["test_loss"] > 1e4
    again = lockstep.Run("run")
    assert again.evaluate() == {"test_loss": pytest.approx(run.metrics["test_loss"])}
    assert again.predict(loss=True)["loss"].mean() == pytest.approx(run.metrics["test_loss"])
    assert again.load_model(task=getattr(tasks, kind)) is not None
    assert again.resume(epochs=2).metrics["val_loss"] > 1e4, "it is made of the configuration, not of defaults"
    assert again.resume(made(), epochs=3).metrics["val_loss"] > 1e4
    with pytest.raises(ConfigError, match=r"(?s)settings.*--init-from"):
        again.resume(getattr(tasks, kind)(), epochs=4)


def test_arguments_are_settings_on_the_command_line(tasks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "tasks_with_settings:Scaled", "--devices", "cpu"]
    assert main([*words, "--set", "task.scale=3", "--set", "task.shape=[2]"]) == 0
    assert main([*words, "--set", "task.shape=wide"]) == 2
    assert "task.shape" in capsys.readouterr().err
    assert main(["plan", "tasks_with_settings:WithDataclass", "--set", "task.sclae=3"]) == 2
    assert "task.scale?" in capsys.readouterr().err


def test_an_object_among_the_arguments_is_named_at_the_start_and_refused_later(tasks: Any) -> None:
    task = tasks.Scaled(net=object(), folder=Path("here"))
    run = _train(task)
    (note,) = (note for note in run.plan.notes if note.key == "arguments_unrecorded")
    assert "net" in note.text and note.level == "warning"
    for call in (
        lambda again: again.evaluate(),
        lambda again: again.predict(),
        lambda again: again.load_model(),
        lambda again: again.load_model(task=tasks.Scaled),
        lambda again: again.resume(epochs=2),
        lambda again: lockstep.train("tasks_with_settings:Scaled", again.config),
    ):
        with pytest.raises(TaskError, match=r": net\b"):
            call(lockstep.Run("run"))
    assert lockstep.Run("run").evaluate(task=task) == pytest.approx(run.evaluate())
    assert run.resume(epochs=2).status == "completed"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("WrongLoss", "loss"),
        ("AttributeInInit", "metrics"),
        ("AttributeInModel", "model"),
        ("ClassAttribute", "optimizer"),
    ],
)
def test_methods_that_cannot_be_called_are_named_before_training(kind: str, name: str, tasks: Any) -> None:
    with pytest.raises(LockstepError) as refused:
        lockstep.train(f"tasks_with_settings:{kind}", devices="cpu", save_dir="run")
    assert isinstance(refused.value, TaskError) and kind in refused.value.what and name in refused.value.what
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("kind", "words"),
    [("WithList", "a list"), ("WithNone", "a NoneType"), ("WithClass", "the class Linear"), ("WithoutBatch", "None")],
)
def test_wrong_metrics_and_batches_are_refused_before_the_first_step(kind: str, words: str, tasks: Any) -> None:
    with pytest.raises(TaskError, match=words):
        _train(f"tasks_with_settings:{kind}")
    assert not Path("run", "steps.jsonl").exists()


def test_a_home_that_cannot_be_written_is_named_with_a_way_out(
    tasks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    _train("tasks_with_settings:Base")
    assert "XDG_STATE_HOME" in capsys.readouterr().err
    assert main(["evaluate", "run"]) == 2
    command = re.search(r"XDG_STATE_HOME=DIR lockstep (.*) \(DIR", capsys.readouterr().err)
    assert command is not None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main([*command[1].split(), "--devices", "cpu"]) == 0
    assert main(["evaluate", "run"]) == 0


HEAD = """
import os

os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "4"
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
"""


@pytest.mark.slow
def test_a_file_named_as_a_module_of_python_with_the_head_of_a_tutorial(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "logging.py").write_text(HEAD + FILE)
    settings = ("--epochs", "1", "--batch-size", "16", "--save-dir", "run", "--devices", "cpu,cpu")
    assert run_cli("train", "tasks/logging.py:Base", *settings).code == 0
    result = run_cli("resume", "run", "--set", "training.epochs=2")
    assert result.code == 0, result.err
    assert len(lockstep.Run(tmp_path / "run").history) == 2


def test_a_run_that_failed_before_its_first_checkpoint_does_not_block_its_folder(tasks: Any) -> None:
    with pytest.raises(TaskError):
        _train("tasks_with_settings:WithoutBatch")
    failed = lockstep.Run("run").id
    assert _train("tasks_with_settings:Base").status == "completed"
    assert lockstep.Run(f"run-{failed}").status == "failed"
    with pytest.raises(RunFolderError):
        _train("tasks_with_settings:Base")
