"""From a name to a task, and what is said where a user's file or class does not fit."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import nn

import lockstep
from lockstep import Datasets, Loss, Task
from lockstep.cli.main import main
from lockstep.config import resolve
from lockstep.config.named import code_in, named
from lockstep.errors import ConfigError, TaskError
from lockstep.tasks.registry import configured, find_task, make_task, pack_task
from tests.conftest import cli_environment
from tests.gloo import ROOT

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


def test_a_task_that_has_a_parametrized_model_is_sent_to_other_processes() -> None:
    class HasModel(Task):
        def __init__(self) -> None:
            self.net = nn.Sequential(
                nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
                nn.utils.parametrizations.spectral_norm(nn.Conv1d(2, 2, 1)),
            )

    task = HasModel()
    config = resolve({"task": {"name": f"{__name__}:HasModel"}})
    sent: Any = pack_task(task, config)()
    assert [name for name, _ in sent.net.named_parameters()] == [name for name, _ in task.net.named_parameters()]
    inputs = torch.randn(5, 3)
    for ours, theirs in zip(task.net.eval(), sent.net.eval(), strict=True):
        assert torch.equal(ours.weight, theirs.weight)
    theirs.weight = torch.eye(2)[:, :, None]  # is assigned through the parametrization
    assert "weight" not in theirs._parameters
    assert torch.equal(task.net[0](inputs), sent.net[0](inputs))


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


class Modelled(Task):
    def __init__(self, net: nn.Module) -> None:
        self.net = net


def test_settings_are_passed_by_name() -> None:
    assert make_task(Second, {}).width == 3


@pytest.mark.parametrize("kind", [Configured, Modelled])
def test_an_init_that_takes_other_arguments_than_the_settings_is_refused(kind: type[Task]) -> None:
    with pytest.raises(TaskError, match=r"__init__: (no parameter `config`|missing .* 'net')") as refused:
        make_task(kind, {})
    assert "super().__init__(config)" in refused.value.fix


@pytest.mark.parametrize("kind", [Sized, Loose])
def test_arguments_are_settings(kind: type[Task]) -> None:
    with pytest.raises(ConfigError, match="width") as refused:
        make_task(kind, {})
    assert "--set task.width=" in refused.value.fix
    assert make_task(kind, {"width": 3}).width == 3


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with nothing left of ``mine.py`` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("lockstep_task_mine", None)


def test_a_file_alone_is_answered_with_its_tasks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.py").write_text(FILE)
    assert main(["train", "mine.py"]) == 2
    said = capsys.readouterr().err
    assert "Detached, First, Narrow" in said
    assert "FILE.py:CLASS" in said


@pytest.mark.parametrize(("required", "asked"), [("", ""), (", required=True", "sys.exit(2)")])
def test_a_script_that_parses_arguments_when_imported_gets_none_of_ours(
    required: str, asked: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = "import argparse\nparser = argparse.ArgumentParser()\n"
    (here / "mine.py").write_text(
        f"{parser}parser.add_argument('--width', default=4{required})\nWIDTH = parser.parse_args().width\n{FILE}"
    )
    code = main(["train", "mine.py:First", "--devices", "cpu", "--epochs", "1", "--save-dir", "run"])
    said = capsys.readouterr().err
    assert (code == 2 and asked in said and "__main__" in said) if asked else (code == 0)


def test_a_model_is_no_task(here: Path) -> None:
    (here / "mine.py").write_text("import torch\nclass Net(torch.nn.Linear):\n    pass\n")
    with pytest.raises(TaskError, match=r"(?s)\bNet .*why: .*model.*Net\(\.\.\.\)"):
        find_task("mine.py:Net")


def test_what_inherits_from_nothing_is_no_task() -> None:
    class Duck:
        datasets = model = loss = None

    for given in (Duck, Duck(), nn.Linear(2, 2), 3):
        with pytest.raises(TaskError, match=r"^(Duck|Linear|int) "):
            lockstep.plan(given)  # type: ignore[arg-type]


def test_a_task_without_a_loss_is_told_so_and_its_defaults_may_have_dotted_keys(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "class First(lockstep.Task):"
    file = FILE.replace(head, f"{head}\n    defaults = {{'training.batch_size': 2, 'training': {{'epochs': 3}}}}")
    (here / "mine.py").write_text(file)
    assert main(["plan", "mine.py:First", "--devices", "cpu"]) == 0
    assert "3 epochs × 4 steps" in capsys.readouterr().out
    start, end = file.index("    def loss"), file.index("    def distance")
    (here / "mine.py").write_text(file[:start] + file[end:])
    assert main(["train", "mine.py:First", "--devices", "cpu", "--save-dir", "run"]) == 2
    said = capsys.readouterr()
    assert re.match(r"error: .*\bFirst\b.*\bloss\(\)", said.err) and "Traceback" not in said.err
    assert not (here / "run").exists()


@pytest.mark.slow
def test_a_crash_of_native_code_on_one_device_shows_its_line(here: Path) -> None:
    crash = "        import ctypes\n        ctypes.string_at(0)  # here\n"
    before, loss, after = FILE.partition("    def loss(self, model, batch):\n")
    (here / "mine.py").write_text(before + loss + crash + after)
    command = [sys.executable, "-m", "lockstep", "train", "mine.py:First", "--devices", "cpu"]
    done = subprocess.run(command, env=cli_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "mine.py" in done.stderr and "in loss" in done.stderr


def test_a_package_that_cannot_be_imported_is_named_with_the_line_of_the_file(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "needs_audio.py").write_text("raise OSError('Could not load this library: x.so')\n")
    (here / "mine.py").write_text("import lockstep\nimport needs_audio\n")
    monkeypatch.syspath_prepend(here)
    with pytest.raises(TaskError) as caught:
        find_task("mine.py:Mine")
    assert re.search(r"x\.so, .*\b2: .*needs_audio", str(caught.value)) and "installation" in str(caught.value)


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
        ("Narrow", ["mine.py", "in loss", "2 frames of torch", "shapes cannot be multiplied"]),
        ("Detached", ["does not have a grad_fn", "fix: return the loss as the tensor"]),
    ],
)
def test_an_error_in_a_task_on_one_device_is_one_block(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, expected: list[str]
) -> None:
    (here / "mine.py").write_text(FILE)
    assert main(["train", f"mine.py:{name}", "--devices", "cpu", "--save-dir", "run"]) == 1
    said = capsys.readouterr().err
    block = said[said.index("error: the run failed") :]
    assert all(words in block for words in expected), block
    assert len(block.splitlines()) < 25
    assert "in _wrapped_call_impl" in (here / "run" / "logs" / "rank-0.log").read_text() or name == "Detached"


def test_methods_with_a_misspelt_name_are_named_in_the_plan() -> None:
    from lockstep import plan
    from tests.toys import Toy

    class Misspelt(Toy):
        def optimiser(self, model: object) -> None: ...

        def distance(self) -> None: ...

    notes = {note.key: note for note in plan(Misspelt(), devices="cpu").notes}
    assert notes["unknown_method"].level == "warning"
    assert notes["unknown_method"].text.startswith("optimiser() ")
    assert "unknown_method" not in {note.key for note in plan(Toy(), devices="cpu").notes}


def test_datasets_as_a_tuple_are_refused() -> None:
    from lockstep import make_plan

    class Pair(Task):
        def datasets(self) -> Datasets:
            return ([1], [2])  # type: ignore[return-value]

        def loss(self, model: object, batch: object) -> Loss:
            raise NotImplementedError

    with pytest.raises(TaskError, match=r"datasets\(\) .*Datasets"):
        make_plan(Pair(), {"hardware": {"selected_devices": "cpu"}})


TASK = """
from pathlib import Path
from tests.toys import Toy
Path({canary!r}).touch()
class Mine(Toy):
    pass
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(TASK.format(canary=str(tmp_path / "canary")))
    return f"{tmp_path / 'mine.py'}:Mine"


@pytest.mark.slow
def test_a_class_in_a_file_needs_to_have_been_named_by_the_user(
    here: Path, task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "config.yaml").write_text(f"task:\n  name: {task}\n")
    canary = here / "canary"

    def call(user: str, *words: str) -> tuple[int, str]:
        monkeypatch.setenv("XDG_STATE_HOME", str(here / user))
        code = main(list(words))
        return code, capsys.readouterr().err

    code, said = call("stranger", "plan", "--config", "config.yaml")
    assert (code, "lockstep plan" in said, canary.exists()) == (2, True, False)
    code, said = call("own", "train", task, "--config", "config.yaml", "--max-steps", "2", "--save-dir", "run")
    assert code == 0, said
    assert call("own", "plan", "--config", "config.yaml")[0] == 0, "once named, a file may name it too"
    assert call("own", "evaluate", "run", "--split", "val")[0] == 0

    canary.unlink()
    shutil.copytree(here / "run", here / "sent", symlinks=True)
    for verb in (["resume", "sent"], ["evaluate", "sent"], ["export", "sent"], ["transcribe", "sent", "x.wav"]):
        code, said = call("stranger", *verb)
        assert code == 2, verb
        assert f"task.name {task}" in said, verb
        assert "Traceback" not in said
        assert not canary.exists(), verb
    assert call("stranger", "show", "sent")[0] == 0, "looking at a run needs none of its code"


def test_the_fix_for_an_unknown_module_and_its_data_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "lightning" / "own.py", folder / "theirs.py")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    module, data = (f"{folder / 'theirs.py'}:{name}" for name in ("Classifier", "Numbered"))
    Path("config.yaml").write_text(f"task:\n  name: {module}\n  datamodule: {data}\n")
    named.add(code_in({"task": {"name": module}}))
    assert main(["plan", "--config", "config.yaml"]) == 2
    fix = capsys.readouterr().err.partition("name it: ")[2].strip()
    assert shlex.split(fix) == ["lockstep", "plan", module, "--set", f"task.datamodule={data}"]
    assert main([*shlex.split(fix)[1:], "--config", "config.yaml"]) == 0, "what the command line names is named"
    assert main(["plan", "--config", "config.yaml"]) == 0, "and remembered"
    assert main(["plan", data]) == 2
    assert f"--set task.datamodule={data}" in capsys.readouterr().err, "alone it is no task"
