"""``lockstep lightning``: its configuration, its errors, and ranks that are started from anywhere."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lockstep.checkpoint.store import CheckpointStore
from lockstep.cli.main import main
from lockstep.errors import ConfigError, RunFolderError, UnsupportedError
from lockstep.lightning.cli import run
from lockstep.lightning.settings import Hardware, hardware_settings, settings_of
from lockstep.rundir.folder import RunDir
from lockstep.rundir.summary import find_run
from tests.commands import start
from tests.conftest import RunCli, cli_environment
from tests.gloo import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

CONFIG: dict[str, Any] = {
    "seed_everything": False,
    "model": {"class_path": "tests.lightning.trainings.Probe", "init_args": {"val_loss": [3.0, 2.0, 1.0]}},
    "trainer": {"max_epochs": 2, "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1},
    "hardware": {"selected_devices": ["cpu"], "precision": "32"},
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.2}},
    "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.5}},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration file in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write_config(tmp_path)


def write_config(folder: Path, **sections: Any) -> Path:
    path = folder / "cli_config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **sections}))
    return path


def test_a_fit_is_a_run_and_other_subcommands_use_its_checkpoints(config: Path, tmp_path: Path) -> None:
    own = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "csv", "name": ""}}
    write_config(tmp_path, trainer={**CONFIG["trainer"], "logger": own})
    assert run(["fit", "-c", str(config), "--run_dir", "out"]) == 0
    assert "val_loss" in (tmp_path / "csv" / "version_0" / "metrics.csv").read_text()
    write_config(tmp_path)
    folder = RunDir.open(tmp_path / "out")
    record = folder.read()
    assert (record.status, record.task) == ("completed", "tests.lightning.trainings:Probe")
    assert (record.best_epoch, record.placement["devices"], record.placement["precision"]) == (2, ["cpu"], "32")
    assert [row["lr"] for row in folder.epochs()] == [0.2, 0.1], "optimizer and scheduler of the configuration"
    assert [row["own_train"] for row in folder.epochs()] == [1, 2]
    assert [row["step"] for row in folder.steps()] == [*range(1, 9)], "log_every_n_steps"
    assert folder.plan()["decisions"]["global_batch"]["value"] == 2
    assert list((tmp_path / "out" / "logs").glob("events.out.tfevents*"))
    assert list((tmp_path / "out").glob("system-*.jsonl"))
    for checkpoint in ("out", "out/checkpoints/last", "out/checkpoints/step-00000004"):
        assert run(["validate", "-c", str(config), "--ckpt_path", checkpoint]) == 0
    interval = ["--trainer.val_check_interval", "5", "--trainer.max_steps", "6"]
    assert main(["lightning", "fit", "-c", str(config), "--run_dir", "rare", *interval]) == 2
    assert (
        run(["fit", "-c", str(config), "--run_dir", "five", *interval, "--trainer.check_val_every_n_epoch", "null"])
        == 0
    )
    assert [row["step"] for row in RunDir.open(tmp_path / "five").evaluations()] == [5, 6]
    more = ["--trainer.max_epochs", "3"]
    with pytest.raises(ConfigError, match=r"--run_dir other\b"):
        run(["fit", "-c", str(config), "--run_dir", "other", "--ckpt_path", "out", *more])
    assert run(["fit", "-c", str(config), "--run_dir", "out", "--ckpt_path", "last", *more]) == 0
    assert [(row["epoch"], row["attempt"]) for row in folder.epochs()] == [(1, 1), (2, 1), (3, 2)]
    assert folder.read().best_metric == {"val_loss": 1.0}


UNLIMITED = {"max_steps": None, "max_time_s": None, "accumulate": 1, "max_grad_norm": None}


@pytest.mark.parametrize(
    ("trainer", "settings"),
    [
        ({}, {"epochs": 1000}),
        ({"max_steps": 7}, {"epochs": 7, "max_steps": 7}),
        ({"max_epochs": -1, "max_time": "00:01:00:30"}, {"epochs": 1_000_000, "max_time_s": 3630.0}),
        ({"gradient_clip_val": 0.5, "accumulate_grad_batches": 4}, {"max_grad_norm": 0.5, "accumulate": 4}),
    ],
)
def test_arguments_of_the_trainer_are_settings_of_the_run(trainer: dict[str, Any], settings: dict[str, Any]) -> None:
    found = settings_of({**trainer, "callbacks": None, "benchmark": True}, {"selected_devices": ["cpu"]})
    assert found["training"] == {"epochs": 1000, **UNLIMITED, **settings}
    assert found["hardware"] == {"selected_devices": ["cpu"]}


def test_devices_and_precision_of_the_trainer_are_those_of_the_run() -> None:
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_find_unused_parameters_true", "precision": "bf16"}
    trainer |= {"log_every_n_steps": 5, "fast_dev_run": True}
    found = settings_of(trainer, hardware_settings(trainer, Hardware(), ()))
    assert found["hardware"] == {"selected_devices": ["cpu", "cpu"], "precision": "bf16-mixed"}
    assert found["distributed"] == {"find_unused_parameters": True}
    assert (found["telemetry"], found["debug"]) == ({"log_interval": 5}, {"fast_dev_run": True})


@pytest.mark.parametrize(
    "trainer",
    [
        {"limit_train_batches": 3},
        {"min_epochs": 2},
        {"overfit_batches": 2},
        {"strategy": "fsdp", "accelerator": "cpu"},
        {"accelerator": "tpu"},
    ],
)
def test_what_no_run_can_have_is_refused(trainer: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=next(iter(trainer))):
        settings_of(trainer, hardware_settings(trainer, Hardware(), ()))


def test_print_config_round_trips(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = []
    for path in (config, tmp_path / "printed.yaml"):
        with pytest.raises(SystemExit) as end:
            run(["fit", "-c", str(path), "--print_config"])
        assert end.value.code == 0
        printed.append(capsys.readouterr().out)
        (tmp_path / "printed.yaml").write_text(printed[-1])
    assert printed[0] == printed[1]
    content = yaml.safe_load(printed[0])
    assert content.keys() >= {"model", "data", "trainer", "optimizer", "lr_scheduler", "hardware", "run_dir"}
    assert content["hardware"] == CONFIG["hardware"]


def test_the_sections_contradict_each_other(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lightning", "fit", "-c", str(config), "--trainer.accelerator", "cpu", "--trainer.devices", "2"]) == 2
    error = capsys.readouterr().err
    assert "trainer.accelerator=cpu" in error and "trainer.devices=2" in error
    assert "\nfix: " in error
    assert "Traceback" not in error


def test_a_plain_lightning_cli_is_refused_as_the_class(config: Path) -> None:
    from lightning.pytorch.cli import LightningCLI

    with pytest.raises(ConfigError, match=r"fix: .*\blockstep\b"):
        run(["fit", "-c", str(config)], cli_class=LightningCLI)  # type: ignore[arg-type]


def test_what_lightning_refuses_is_one_error(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(config.parent, hardware={})
    assert main(["lightning", "validate", "-c", str(config), "--trainer.max_time", "soon"]) == 2
    assert re.search(r"^error: .*\btrainer\b.*^why: ", capsys.readouterr().err, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hardware.selected_devices", "[gpu:7]"], "gpu:7"),
        (["--hardware.precision", "8"], "hardware.precision"),
        (["--trainer.epochs", "3"], "trainer.epochs"),
        (["--hardware.selected_devices", "null", "--trainer.strategy", "dp"], "trainer.strategy=dp "),
        (["--model", "no.such.Model"], "no.such.Model"),
        (["--ckpt_path", "missing.ckpt"], "missing.ckpt"),
    ],
)
def test_bad_values_are_told_in_words(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["lightning", "fit", "-c", str(config), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert "--trainer.max_time" not in error, "not every option before it"
    assert not (config.parent / "runs").exists()


def test_the_help_lists_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lightning", "--help"]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in ("fit", "validate", "test", "predict", "hardware"))
    assert main(["lightning", "fit", "--help"]) == 0
    page = capsys.readouterr().out
    for flag in ("--model", "--data", "--trainer.max_epochs", "--optimizer", "--lr_scheduler", "--ckpt_path"):
        assert flag in page
    for flag in ("--hardware.selected_devices", "--hardware.precision {32,16-mixed,bf16-mixed,bf16-true}", "--run_dir"):
        assert flag in page


def test_an_old_run_folder_is_not_written_into(config: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="out") as caught:
        run(["fit", "-c", str(config), "--run_dir", "out"])
    assert "another --run_dir" in caught.value.fix
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_a_fit_whose_module_fails_leaves_no_folder_and_a_second_one_has_its_own(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, model={"class_path": "tests.lightning.trainings.Breaking"})
    command = ["fit", "-c", str(config), "--run_dir", "out"]
    for where in ("init", "setup"):
        (tmp_path / "broken").write_text(where)
        with pytest.raises(ValueError, match=where):
            run(command)
        assert not (tmp_path / "out").exists()
    (tmp_path / "broken").unlink()
    assert run(command) == 0
    done = RunDir.open(tmp_path / "out").read()
    assert run(command) == 0
    assert "out-2" in capsys.readouterr().err
    assert RunDir.open(tmp_path / "out").read() == done
    assert RunDir.open(tmp_path / "out-2").read().status == "completed"


def test_predictions_come_with_the_indices_of_their_samples(config: Path, tmp_path: Path) -> None:
    settings = {**CONFIG["trainer"], "callbacks": [{"class_path": "tests.lightning.trainings.Written"}]}
    write_config(tmp_path, model={"class_path": "tests.lightning.trainings.Numbers"}, trainer=settings)
    assert run(["predict", "-c", str(config)]) == 0
    assert predicted(tmp_path, 0) == [[[0, 1], [0, 10]], [[2, 3], [20, 30]], [[4], [40]]]
    assert not list(tmp_path.rglob("predictions.pt")), "the callback has written them"


def test_predictions_are_in_the_run_folder_of_the_checkpoint(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, model={"class_path": "tests.lightning.trainings.Numbers"})
    assert run(["fit", "-c", str(config), "--run_dir", "out"]) == 0
    assert run(["predict", "-c", str(config), "--ckpt_path", "out"]) == 0
    file = tmp_path / "out" / "predictions.pt"
    assert f"predictions: {file}" in capsys.readouterr().out
    assert torch.load(file) == [[0, 10], [20, 30], [40]]


@pytest.mark.slow
def test_last_and_best_are_of_the_latest_run(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # restored after LightningCLI has set them
    write_config(tmp_path, model={"class_path": "tests.lightning.trainings.Weight"})
    for seed in ("1", "2"):
        assert run(["fit", "-c", str(config), "--seed_everything", seed]) == 0
    latest = find_run("last", tmp_path / "runs")
    trained = CheckpointStore(latest.checkpoints).load(latest.read().best_epoch * 6).model["layer.0.weight"].item()
    for word in ("last", "best", latest.read().id):
        assert run(["predict", "-c", str(config), "--ckpt_path", word, "--run_dir", word]) == 0
        assert torch.load(tmp_path / word / "predictions.pt") == [trained] * 3


@pytest.mark.parametrize("path", ["last", "best", "missing.ckpt", "cli_config.yaml", "runs/missing", ""])
def test_a_checkpoint_path_that_is_no_run_is_an_error(
    config: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    for command in ("fit", "validate", "test", "predict"):
        assert main(["lightning", command, "-c", str(config), "--ckpt_path", path]) == 2
        assert path in capsys.readouterr().err
    assert not (config.parent / "runs").exists()


def test_a_checkpoint_does_not_name_classes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "evil.py").write_text("from pathlib import Path\nPath('canary').touch()\n")
    write_config(config.parent, model={"class_path": "tests.lightning.trainings.Named"})
    assert run(["fit", "-c", str(config), "--run_dir", "out", "--trainer.max_steps", "2"]) == 0
    write_config(config.parent, model={"class_path": "tests.lightning.trainings.Numbers"})
    assert main(["lightning", "validate", "-c", str(config), "--ckpt_path", "out"]) == 2
    assert "evil.Model" in capsys.readouterr().err
    assert not (config.parent / "canary").exists()


def test_the_weights_of_another_module_are_one_error(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "-c", str(config), "--run_dir", "out", "--trainer.max_steps", "2"]) == 0
    write_config(config.parent, model={"class_path": "tests.lightning.trainings.Numbers"})
    assert main(["lightning", "predict", "-c", str(config), "--ckpt_path", "out"]) == 2
    error = capsys.readouterr().err
    assert "layer.0.weight" in error
    assert "Traceback" not in error


def test_a_run_by_class_is_predicted_with_its_arguments(config: Path) -> None:
    """Its checkpoint has no class beside the arguments: LightningCLI did not make the module."""
    made = ["tests.lightning.trainings:Kept", "--set", "task.model.samples=9", "--max-steps", "2"]
    assert main(["train", *made, "--devices", "cpu", "--save-dir", "out"]) == 0
    model = ["--model", "tests.lightning.trainings.Kept", "--ckpt_path", "out"]
    assert run(["predict", *model, "--seed_everything", "false"]) == 0
    assert torch.load(config.parent / "out" / "predictions.pt") == [[0, 10], [20, 30], [40]]


def predicted(folder: Path, rank: int) -> list[Any]:
    """Of each batch, the indices of its samples, and its predictions."""
    return [json.loads(line) for line in (folder / f"predicted-{rank}.jsonl").read_text().splitlines()]


def test_several_nodes_are_refused_before_anything_starts(config: Path) -> None:
    write_config(config.parent, hardware={})
    with pytest.raises(ConfigError, match=r"(?s)num_nodes.*torchrun\b.*\bsrun"):
        run(["fit", "-c", str(config), "--trainer.num_nodes", "2", "--trainer.devices", "2"])


# Ranks.


#: Nothing here can be executed again: it is read from standard input, has no main guard, and its model is its own.
NOTEBOOK = """
import torch
from lockstep.lightning.cli import run
from tests.lightning.trainings import Probe
with open("executed", "a") as file:
    file.write("once\\n")
class Own(Probe):
    def on_validation_epoch_end(self):
        pass
    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(5), batch_size=2)
    predict_dataloader = val_dataloader
    def predict_step(self, batch, batch_idx):
        return batch.tolist()
settings = SETTINGS
writer = {"class_path": "tests.lightning.trainings.Written"}
predicting = {**settings, "trainer": {**settings["trainer"], "callbacks": [writer]}}
fit = {**settings, "run_dir": "out", "trainer": {**settings["trainer"], "max_epochs": 1, "limit_val_batches": 0}}
assert max(run(each, model_class=Own) for each in ({"fit": fit}, {"predict": predicting})) == 0

# In a thread of a server, where a rank fails.
import http.server, threading, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        try:
            answer = f"code {run(['fit', '-c', 'cli_config.yaml', '--run_dir', 'failed'])}"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer.encode())
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}").read().decode())
server.shutdown()
"""


@pytest.mark.slow
def test_ranks_are_started_from_a_notebook_like_parent_and_a_servers_thread(tmp_path: Path) -> None:
    settings = {"seed_everything": False, "trainer": CONFIG["trainer"]}
    settings |= {"hardware": {"selected_devices": ["cpu", "cpu"]}}
    model = {"class_path": "tests.lightning.trainings.Probe", "init_args": {"fail_in_epoch": 1}}
    write_config(tmp_path, model=model, hardware=settings["hardware"])
    environ = cli_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
    program = NOTEBOOK.replace("SETTINGS", repr(settings))
    done = start("-", cwd=tmp_path, env=environ, stdin=program, lightning=True)
    out, err = done.communicate(timeout=110)
    assert done.returncode == 0, err
    assert (tmp_path / "executed").read_text() == "once\n"
    assert predicted(tmp_path, 0) == [[[0, 1], [0, 1]], [[2, 3], [2, 3]], [[4], [4]]]
    assert "custom batch sampler" not in err
    assert not (tmp_path / "runs").exists(), "only a fit has a run folder"
    assert RunDir.open(tmp_path / "out").read().status == "completed"

    assert "RankFailed: rank" in out
    assert "the probe broke, as it was told to" in out
    record = RunDir.open(tmp_path / "failed").read()
    assert record.status == "failed"
    assert "as it was told to" in (record.error or "")


@pytest.mark.parametrize(
    ("package", "logger"),
    [("wandb", "WandbLogger"), ("mlflow", "MLFlowLogger")],
)
@pytest.mark.drill
def test_other_loggers_work_offline(run_cli: RunCli, tmp_path: Path, package: str, logger: str) -> None:
    pytest.importorskip(package)
    offline = {"wandb": {"offline": True, "save_dir": "out-logs"}, "mlflow": {"tracking_uri": "file:./out-logs"}}
    own = {"class_path": f"lightning.pytorch.loggers.{logger}", "init_args": offline[package]}
    (tmp_path / "out-logs").mkdir()
    config = write_config(tmp_path, trainer={**CONFIG["trainer"], "logger": own})
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_SILENT": "true"}
    result = run_cli("lightning", "fit", "-c", config, "--run_dir", "out", env=env, lightning=True)
    assert result.code == 0, result.err
    kept = {"wandb": "out-logs/wandb/offline-run-*/run-*.wandb", "mlflow": "out-logs/*/*/metrics/val_loss"}[package]
    assert len(list(tmp_path.glob(kept))) == 1
