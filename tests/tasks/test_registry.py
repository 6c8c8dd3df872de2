"""From a name to a task, and what is said where a user's file or class does not fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lockstep import Datasets, Loss, Task
from lockstep.errors import TaskError
from lockstep.tasks.registry import configured, find_task, make_task
from tests.conftest import RunCli

FILE = """
import torch
from torch import nn
import lockstep

class First(lockstep.Task):
    def datasets(self):
        inputs = torch.randn(8, 4)
        return lockstep.Datasets(train=torch.utils.data.TensorDataset(inputs, inputs.sum(1)))
    def model(self):
        return nn.Linear(4, 1)
    def loss(self, model, batch):
        return lockstep.Loss(self.distance(model(batch[0][:, :self.columns]).squeeze(1), batch[1]), len(batch[1]))
    def distance(self, a, b):
        return ((a - b) ** 2).sum()
    def evaluate(self, model, batch):
        return (batch[1],)
    def metrics(self):
        return None
    columns = 4

class Narrow(First):
    columns = 3

class Detached(First):
    def distance(self, a, b):
        return torch.tensor(super().distance(a, b).item())
"""


class Sized(Task):
    def __init__(self, width: int) -> None:
        self.width = width


class WithDefault(Task):
    def __init__(self, width: int = 8) -> None:
        self.width = width


class Configured(WithDefault):
    class Config(BaseModel):
        samples: int = 3


def test_a_task_that_does_not_call_super_has_its_settings() -> None:
    assert make_task(WithDefault, {}).width == 8
    assert isinstance(make_task(WithDefault, {}).config, Task.Config)
    assert isinstance(configured(Sized(4)).config, Task.Config)


class Second(WithDefault):
    def __init__(self, width: int = 3, config: Any = None) -> None:
        super().__init__(width)
        self.config = config


class Loose(WithDefault):
    def __init__(self, width: int, **others: Any) -> None:
        super().__init__(width)


def test_settings_are_passed_by_name() -> None:
    assert make_task(Second, {}).width == 3


@pytest.mark.parametrize("kind", [Sized, Configured, Loose])
def test_an_init_that_takes_other_arguments_than_the_settings_is_refused(kind: type[Task]) -> None:
    with pytest.raises(TaskError, match=r"__init__ has (no parameter `config`|the required parameter)") as refused:
        make_task(kind, {})
    assert "super().__init__(config)" in refused.value.fix


def test_a_file_alone_is_answered_with_its_tasks(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    result = run_cli("train", "mine.py")
    assert result.code == 2
    assert "its tasks are Detached, First, Narrow" in result.err
    assert "lockstep train mine.py:Detached" in result.err


def test_both_spellings_import_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "study" / "tasks"
    package.mkdir(parents=True)
    (package / "mine.py").write_text(
        FILE.replace("import lockstep\n", "import lockstep\nfrom study.names import NAME\n")
    )
    (tmp_path / "study" / "names.py").write_text("NAME = 'x'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert find_task("study/tasks/mine.py:First").__name__ == "First"
    assert find_task("study.tasks.mine:First").__name__ == "First"
    for name in [name for name in sys.modules if name.split(".")[0] == "study"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Narrow", ["mine.py", "in loss", "frame(s) of torch", "shapes cannot be multiplied"]),
        ("Detached", ["does not have a grad_fn", "fix: return the loss as the tensor"]),
    ],
)
def test_an_error_in_a_task_on_one_device_is_one_block(
    tmp_path: Path, run_cli: RunCli, name: str, expected: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    result = run_cli("train", f"mine.py:{name}", "--devices", "cpu", "--save-dir", "run")
    assert result.code == 1
    block = result.err[result.err.index("error: the run failed") :]
    assert all(words in block for words in expected), block
    assert len(block.splitlines()) < 25
    assert "in _wrapped_call_impl" in (tmp_path / "run" / "logs" / "rank-0.log").read_text() or name == "Detached"


def test_datasets_as_a_tuple_are_refused() -> None:
    from lockstep import make_plan

    class Pair(Task):
        def datasets(self) -> Datasets:
            return ([1], [2])  # type: ignore[return-value]

        def loss(self, model: object, batch: object) -> Loss:
            raise NotImplementedError

    with pytest.raises(TaskError, match="did not return Datasets"):
        make_plan(Pair(), {"hardware": {"selected_devices": "cpu"}})
