"""The verbs that train and what follows, on a task of the user's own, in real processes."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lockstep import Run, Task
from lockstep.cli.main import main
from lockstep.config import RunConfig
from lockstep.errors import LockstepError
from lockstep.rundir.folder import RunDir
from tests import commands
from tests.conftest import RunCli, cli_environment

TASK = """
import os
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lockstep import ArrayDataset, Datasets, Loss, Task


class Tiny(Task):
    def datasets(self):
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
        data = ArrayDataset(x, (x[:, 0] > 0).long())
        return Datasets(data, data, data)

    def model(self):
        return nn.Linear(8, 2)

    def loss(self, model, batch):
        x, y = batch
        return Loss(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))

    def evaluate(self, model, batch):
        x, y = batch
        if "SEEN" in os.environ:
            with Path(os.environ["SEEN"], os.environ.get("RANK", "alone")).open("a") as file:
                print(len(x), file=file)
        return model(x), y

    def metrics(self):
        return MetricCollection({"accuracy": MulticlassAccuracy(2, average="micro")})


class Masking(nn.Linear):
    def forward(self, x, *, mask, scale=None):
        return super().forward(x * mask)


class Masked(Tiny):
    def model(self):
        return Masking(8, 2)

    def loss(self, model, batch):
        x, y = batch
        return Loss(nn.functional.cross_entropy(model(x, mask=x > 0), y, reduction="sum"), len(y))

    def evaluate(self, model, batch):
        x, y = batch
        return model(x, mask=x > 0), y


class Output(OrderedDict):
    # As transformers' ModelOutput: a type of a library, whose name would go into the program.
    pass


torch.utils._pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: Output(zip(names, values)),
    serialized_type_name="tiny.Output",
)


class Naming(nn.Linear):
    def forward(self, x):
        return Output(logits=super().forward(x), hidden=None)


class Named(Tiny):
    def model(self):
        return Naming(8, 2)

    def loss(self, model, batch):
        x, y = batch
        return Loss(nn.functional.cross_entropy(model(x)["logits"], y, reduction="sum"), len(y))

    def evaluate(self, model, batch):
        x, y = batch
        return model(x)["logits"], y


class OnlyTrained(Tiny):
    def datasets(self):
        return Datasets(super().datasets().train)


class Broken(Tiny):
    def loss(self, model, batch):
        raise ValueError("the loss of this task is broken")
"""
PLAIN = ["--devices", "cpu", "--set", "telemetry.tensorboard=off"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``tiny.py`` and the finished run ``run`` of it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.py").write_text(TASK)
    command = ["-m", "lockstep", "train", "tiny.py:Tiny", *PLAIN, "--epochs", "2", "--lr", "0.1"]
    process = commands.start(*command, "--save-dir", "run", "--log-interval", "4", cwd=folder, env=cli_environment())
    output, errors = process.communicate(timeout=90)
    assert (process.returncode, errors) == (0, ""), errors
    (folder / "output.txt").write_text(output)
    return folder


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def test_training_prints_plan_lines_and_one_summary(trained: Path) -> None:
    output = (trained / "output.txt").read_text()
    assert "\x1b" not in output
    assert "global batch" in output and "step 4/16" in output and "epoch 2/2  train_loss" in output
    assert output.count("summary") == 1
    assert str(trained / "run") in output[output.index("summary") :]


def test_training_leaves_a_complete_record(trained: Path) -> None:
    run = RunDir.open(trained / "run")
    assert run.status() == "completed"
    assert [row["epoch"] for row in run.epochs()] == [1, 2]
    assert run.steps()[-1]["step"] == 16
    assert run.config().optimizer.lr == 0.1
    assert json.loads((run.path / "training_results.json").read_text())["best_val_acc"] > 0.5


def test_plan_as_json_starts_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(here.iterdir())
    assert main(["plan", "tiny.py:Tiny", "--devices", "cpu,cpu", "--batch-size", "16", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["batch"]["global_batch"], plan["placement"]["strategy"]) == (32, "ddp")
    assert [entry for entry in sorted(here.iterdir()) if entry not in before and entry.name != "__pycache__"] == []


def test_plan_says_why(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny.py:Tiny", "--devices", "cpu,cpu"]) == 0
    output = capsys.readouterr().out
    assert "64 (32 × 2 " in output
    assert "note: " in output and "why" in output


def test_evaluate_agrees_with_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    final = RunDir.open(here / "run").read().final_metrics
    assert found["metrics"]["test_accuracy"] == pytest.approx(final["test_accuracy"])
    assert main(["evaluate", "run", "--split", "val", "--checkpoint", "16"]) == 0
    assert "val_accuracy" in capsys.readouterr().out


def test_evaluate_names_a_split_only_where_there_is_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.py:OnlyTrained", *PLAIN, "--epochs", "1", "--save-dir", "trained only"]) == 0
    assert main(["evaluate", "trained only", "--split", "val"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"^error: .*\bval\b.*^fix: .*Task\.datasets\(\)", error, re.MULTILINE | re.DOTALL)
    assert "choose --split" not in error


@pytest.mark.slow
def test_evaluate_on_two_ranks_gives_the_metrics_of_one(here: Path, tmp_path: Path, run_cli: RunCli) -> None:
    before = sorted((here / "run").rglob("*"))
    results = []
    for devices in ("cpu", "cpu,cpu"):
        done = run_cli("evaluate", "run", "--json", "--devices", devices, cwd=here, env={"SEEN": str(tmp_path)})
        assert done.code == 0, done.err
        results.append(json.loads(done.out))
    assert results[1]["metrics"] == pytest.approx(results[0]["metrics"])
    assert [found["samples"] for found in results] == [256, 256]
    seen = {file.name: sum(map(int, file.read_text().split())) for file in tmp_path.iterdir()}
    assert seen == {"alone": 256, "0": 128, "1": 128}
    assert sorted((here / "run").rglob("*")) == before, "the run is only read"


def test_evaluate_refuses_a_device_that_is_not_here(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "run", "--devices", "cpu,gpu:77"]) == 2
    assert "gpu:77" in capsys.readouterr().err


@pytest.mark.slow
def test_export_writes_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run", "--out", "weights", "--no-program"]) == 0
    modes = {file.stat().st_mode & 0o777 for file in Path("weights").iterdir()}
    assert len(modes) == 1, "who may read one may read all"
    assert "weights.safetensors" in capsys.readouterr().out
    assert (here / "weights" / "weights.safetensors").exists()
    # As a user goes on from the example: the hint in its last line, with a model.
    example = here / "weights" / "load_example.py"
    text = example.read_text().replace("# model = YourModel(…)", "model = torch.nn.Linear(8, 2)")
    example.write_text(f"{text}print(model)\n")
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("2 tensors, 18 values\nLinear("), done.stderr
    assert main(["export", "run", "--out", "weights"]) == 2, "an export never overwrites"
    assert "fix: " in capsys.readouterr().err
    with pytest.raises(LockstepError, match="weight"):
        Run("run").export("other", program=False, task=OtherModel)
    assert not Path("other").exists()


class OtherModel(Task):
    """Its model is not the run's."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(8, 3)


@pytest.mark.slow
def test_a_program_needs_no_library_but_torch(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["train", "tiny.py:Named", *PLAIN, "--max-steps", "2", "--save-dir", str(folder)]) == 0
    assert main(["export", str(folder), "--out", str(tmp_path / "out")]) == 0
    done = subprocess.run([sys.executable, str(tmp_path / "out" / "load_example.py")], capture_output=True, text=True)
    assert done.stdout == "output: {'logits': (2, 2)}\n", done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of torch 2.11
def test_the_program_of_a_model_with_keyword_arguments_takes_any_batch(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["train", "tiny.py:Masked", *PLAIN, "--max-steps", "2", "--save-dir", str(folder)]) == 0
    assert main(["export", str(folder), "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    runpy.run_path(str(tmp_path / "out" / "load_example.py"))
    assert capsys.readouterr().out == "output: (2, 2)\n"
    model = Run(folder).load_model()
    x, mask = torch.randn(5, 8), torch.ones(5, 8, dtype=torch.bool)
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    assert torch.equal(program(x, mask=mask), model(x, mask=mask))


def test_a_finished_run_is_not_overwritten_and_says_how_to_train_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "tiny.py:Tiny", *PLAIN, "--save-dir", "run"]) == 2
    assert re.match(r"error: .* run-\w+\n(.|\n)*fix: ", capsys.readouterr().err)
    assert main(["resume", "run"]) == 0
    assert "--epochs N" in capsys.readouterr().out
    shutil.copytree("run", "longer")
    assert main(["resume", "longer", "--epochs", "3", "--max-steps", "18"]) == 0
    assert Run("longer").step == 18


def test_stop_of_a_run_that_ends_at_that_moment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path / "run", RunConfig(), run_id="run-00000001", command=[])
    code = "import sys; from pathlib import Path; from lockstep.rundir.folder import RunDir\n"
    code += "from lockstep.rundir.heartbeat import Heartbeat\n"
    code += f"run = RunDir.open(Path({str(run.path)!r})); run.update(status='running'); "
    code += "Heartbeat().start(run.heartbeat_file, 3, 10); print('go', flush=True); sys.stdin.read()"
    kill = os.kill
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"go\n"

        def too_late(pid: int, number: int) -> None:
            assert (pid, number) == (process.pid, signal.SIGTERM)
            kill(pid, signal.SIGKILL)
            process.wait()
            kill(pid, number)

        monkeypatch.setattr("lockstep.launch.api.os.kill", too_late)
        assert main(["stop", str(run.path)]) == 0
    assert capsys.readouterr().out == "run-00000001: lost\n"


def test_stop_wants_a_running_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "run"]) == 2
    assert "completed" in capsys.readouterr().err


def test_a_task_that_fails_shows_its_line_and_leaves_a_failed_run(
    here: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "tiny.py:Broken", *PLAIN, "--save-dir", str(tmp_path / "run")]) == 1
    assert "tiny.py" in capsys.readouterr().err
    record = RunDir.open(tmp_path / "run").read()
    assert record.status == "failed"
    assert record.error and "the loss of this task is broken" in record.error


@pytest.mark.slow
def test_stop_and_ctrl_c_end_a_run_that_can_be_resumed(
    here: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = RunDir(folder)
    with started("train", "tiny.py:Tiny", *PLAIN, "--epochs", "1000000", "--save-dir", str(folder)) as process:
        wait_for(run.run_file.exists, process)
        assert main(["stop", str(folder)]) == 0, "it is starting"
        assert capsys.readouterr().out == f"{run.read().id}: stopped\n"
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    before = len(run.epochs())
    with started("resume", str(folder)) as process:
        wait_for(lambda: len(run.epochs()) >= before + 2, process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT, output
    assert "attempt 2" in output and "Traceback" not in output
    assert run.status() == "stopped"
    epochs = [row["epoch"] for row in run.epochs()]
    assert epochs == list(range(1, len(epochs) + 1))


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs beside the test, and not beyond it."""
    process = commands.start("-m", "lockstep", *arguments, cwd=Path.cwd(), env=cli_environment(), merged=True)
    try:
        with process:
            yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "the run did not get going"
        time.sleep(0.05)


@pytest.mark.slow
def test_threads_of_a_command_do_not_spin_while_they_wait_unless_they_are_told_to(run_cli: RunCli) -> None:
    shown = run_cli("plan", "har", "--devices", "cpu", env={"OMP_DISPLAY_ENV": "true"})
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in shown.err
    env = {"OMP_DISPLAY_ENV": "true", "OMP_WAIT_POLICY": "active"}
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in run_cli("plan", "har", "--devices", "cpu", env=env).err
