"""A user's LightningModule and LightningDataModule on Lockstep's devices, order and run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

import lockstep
from lockstep.cli.main import main
from lockstep.errors import ConfigError, DataError, DeviceError, RankFailed, TaskError, UnsupportedError
from lockstep.lightning import fit
from lockstep.lightning.module_evaluation import evaluate_module
from lockstep.lightning.module_task import ModuleTask
from lockstep.rundir.folder import RunDir
from tests import commands
from tests.e2e.test_train import finish, start, wait_for_step, weights
from tests.engine.test_fit import interval_means
from tests.gloo import ROOT, clean_environment
from tests.lightning import own
from tests.lightning.test_data import RandomInWorkers

FILE = ROOT / "tests" / "lightning" / "own.py"
MODULE = f"{FILE}:Classifier"
DATA = ("--set", f"task.datamodule={FILE}:Numbered")
ONE = {"selected_devices": ["cpu"]}
PLACEMENT = {"devices": ("cpu",), "backend": None, "precision": "32"}

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


def settings(folder: Path, **training: Any) -> dict[str, Any]:
    return {
        "training": {"threads": 1, "epochs": 2, **training},
        "telemetry": {"log_interval": 1, "progress": "silent"},
        "save_dir": str(folder / "run"),
    }


def noted(folder: Path) -> Path:
    path = folder / "seen"
    path.mkdir(exist_ok=True)
    return path


def test_a_number_that_the_run_adds_to_rows_is_monitored(tmp_path: Path) -> None:
    module = own.Classifier(str(noted(tmp_path)))
    config = settings(tmp_path) | {"checkpoint": {"monitor": "samples_per_s", "mode": "max"}}
    result = fit(module, own.Numbered(), hardware=ONE, config=config)
    assert result.best_epoch == max(result.history, key=lambda row: row["samples_per_s"])["epoch"]


class DrawsInWorkers(pl.LightningModule):
    """Keeps the numbers that its data set draws in a loader's worker, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.drawn: dict[int, list[float]] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.drawn.setdefault(self.current_epoch, []).extend(batch.flatten().tolist())
        return self.weight * batch.float().mean()

    def train_dataloader(self) -> Any:
        return DataLoader(RandomInWorkers(torch.zeros(6)), batch_size=2, num_workers=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
def test_workers_draw_other_numbers_in_each_epoch_and_the_same_in_a_repeated_run(tmp_path: Path) -> None:
    modules = DrawsInWorkers(), DrawsInWorkers()
    for number, module in enumerate(modules):
        fit(module, hardware=ONE, config=settings(tmp_path / str(number)))
    first, repeated = (module.drawn for module in modules)
    assert repeated == first
    assert len({value for values in first.values() for value in values}) == 2 * 6 * 3


class EpochOf(TensorDataset):
    """Its samples are the epoch that the module sets."""

    epoch = 0.0

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.epoch)


class ChangesItsData(DrawsInWorkers):
    """Changes the data set before each epoch; its loader keeps its order and its workers."""

    def __init__(self) -> None:
        super().__init__()
        self.data = EpochOf(torch.zeros(4))

    def on_train_epoch_start(self) -> None:
        self.data.epoch = float(self.current_epoch)

    def train_dataloader(self) -> Any:
        batches = BatchSampler(RandomSampler(self.data), 2, drop_last=False)
        return DataLoader(self.data, batch_sampler=batches, num_workers=1, persistent_workers=True)


@pytest.mark.slow
def test_persistent_workers_see_the_data_set_of_each_epoch(tmp_path: Path) -> None:
    module = ChangesItsData()
    fit(module, hardware=ONE, config=settings(tmp_path, epochs=3))
    assert module.drawn == {0: [0.0] * 4, 1: [1.0] * 4, 2: [2.0] * 4}


class Recorded(own.Classifier):
    """Keeps the sum of its losses and the samples of each batch, by epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.setdefault(self.current_epoch, []).append((loss.item() * len(batch[0]), len(batch[0])))
        return loss


def test_one_device_trains_the_object_itself_and_fills_the_run_folder(tmp_path: Path) -> None:
    module, data = Recorded(str(noted(tmp_path))), own.Numbered()
    module.losses = {}
    before = {name: value.clone() for name, value in module.state_dict().items()}
    config = settings(tmp_path, accumulate=2) | {"checkpoint": {"monitor": "val/number", "mode": "max"}}
    result = fit(module, data, hardware=ONE, config=config)
    assert result.status == "completed"
    assert [row["epoch"] for row in result.history] == [1, 2], "what lockstep.train returns"
    assert any(not torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert "train_dataloader" not in vars(data), "the user's objects are as before"
    used = own.seen(tmp_path / "seen")
    assert [len(used[epoch]) for epoch in (0, 1)] == [50, 50]
    assert set(used[0]) == set(used[1])
    assert len(set(used[0])) == 50
    run = RunDir.open(tmp_path / "run")
    assert run.status() == "completed"
    rows = run.epochs()
    assert [row["epoch"] for row in rows] == [1, 2]
    assert [row["epoch_hook"] for row in rows] == [0.0, 1.0], "what the module's own epoch-end hook logs is in its row"
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    for row, (totals, sizes) in zip(
        rows, (zip(*losses, strict=True) for losses in module.losses.values()), strict=True
    ):
        assert row["train_loss"] == pytest.approx(sum(totals) / sum(sizes)), "of all micro-batches"
    assert rows[-1]["val_number"] == 2.0
    steps = run.steps()
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert steps[-1]["samples_seen"] == 100
    assert steps[0]["lr"] == pytest.approx(0.1)
    assert run.progress().step == 8
    assert result.best_epoch == 2, "it is the same in both, and the loss is less"
    assert result.best_metric.keys() == {"val_loss", "val_number", "val_count"}, "not val/number, as it is logged"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["best", "last", "step-00000004", "step-00000008"]
    for name, value in weights(tmp_path / "run").items():
        assert torch.equal(value, module.state_dict()[name])


class ValidatesItself(own.Classifier):
    def val_dataloader(self) -> Any:
        return DataLoader(own._numbered(5, 2), batch_size=2)


def test_loaders_that_are_not_given_are_those_of_the_module(tmp_path: Path) -> None:
    loader = DataLoader(own._numbered(16, 1), batch_size=8)
    run = fit(ValidatesItself(), loader, hardware=ONE, config=settings(tmp_path, epochs=1))
    assert run.history[-1]["val_number"] == 2.0
    assert run.evaluate("val")["val_number"] == 2.0


@pytest.mark.slow
def test_a_named_module_stopped_on_two_ranks_goes_on_with_one_and_three(tmp_path: Path) -> None:
    """Every epoch uses every sample once, whatever number of ranks takes which part of it."""
    (noted(tmp_path) / "slow").touch()
    model = ("--set", f"task.model.seen={tmp_path / 'seen'}", "--set", "task.model.unused=true")
    model += ("--set", "task.model.frozen=true")
    model += ("--set", "distributed.find_unused_parameters=true")
    common = ("--set", "task.data.samples=253", "--epochs", "2", "--log-interval", "1")
    command = ("train", MODULE, "--devices", "cpu,cpu", "--save-dir", "run", *DATA, *model, *common)
    process = start(*command, cwd=tmp_path, lightning=True)
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGTERM)
    finish(process, code=143)
    (tmp_path / "seen" / "slow").unlink()
    run = RunDir.open(tmp_path / "run")
    assert run.read().status == "stopped"
    first = run.progress().step
    assert 2 <= first < 16, "in mid-epoch: 253 samples are 16 steps of 16"
    assert run.plan()["batch"]["global_batch"] == 16
    lockstep.Run(run.path).resume(devices="cpu", training={"max_steps": 20})
    assert run.progress().step == 20
    assert run.plan()["batch"]["accumulate"] == 2, "the global batch of 16 stays, in two micro-batches of one rank"
    again = ("resume", "run", "--devices", "cpu,cpu,cpu", "--set", "training.max_steps=null")
    finish(start(*again, cwd=tmp_path, lightning=True))
    assert run.read().status == "completed"
    used = own.seen(tmp_path / "seen")
    assert sorted(used[0]) == sorted(used[1]), "the module's random split is the same in every attempt"
    assert len(used[0]) == len(set(used[0])) == 253
    assert used[0] != used[1], "another order in each epoch"
    steps = run.steps()
    assert [row["step"] for row in steps] == list(range(1, 33))
    assert steps[-1]["samples_seen"] == 506
    # The module's own schedule went on as if the run had never stopped, over the steps of the whole run.
    assert [row["lr"] for row in steps[:first]] == pytest.approx([0.1 * (1 - k / 33) for k in range(first)])
    assert [row["lr"] for row in steps[21:]] == pytest.approx([0.1 * (1 - k / 33) for k in range(21, 32)])
    assert run.epochs()[-1]["val_number"] == 2.0
    assert run.epochs()[-1]["val_count"] == 5.0
    assert [len(row["ranks"]) for row in run.ranks() if row["step"] in (1, 20, 32)] == [2, 1, 3]


def test_moments_are_restored_in_the_layout_of_their_weights(tmp_path: Path) -> None:
    """Stopped and resumed or not: the same weights bit for bit, of a channels_last model with a fused optimizer."""
    task: dict[str, Any] = {"hardware": ONE, "task": {"datamodule": f"{FILE}:Numbered"}}
    task["averaging"] = {"name": "ema", "decay": 0.5, "every_steps": 2}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    lockstep.train(f"{FILE}:Pixels", settings(whole, epochs=1) | task)
    lockstep.train(f"{FILE}:Pixels", settings(stopped, epochs=1, max_steps=3) | task)
    lockstep.Run(stopped / "run").resume(training={"max_steps": None})
    ours, theirs = weights(stopped / "run"), weights(whole / "run")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Averaging(pl.Callback):
    """Averages the weights after each step, and notes those that a validation sees."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.average = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        for name, value in pl_module.state_dict().items():
            self.average[name] = 0.5 * self.average[name] + 0.5 * value

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.seen = {name: value.clone() for name, value in pl_module.state_dict().items()}


def test_averaged_weights_are_validated_and_saved(tmp_path: Path) -> None:
    watch, module = Averaging(), own.Classifier(str(noted(tmp_path)))
    config = settings(tmp_path) | {"averaging": {"name": "ema", "decay": 0.5, "warmup": False}}
    fit(module, own.Numbered(), hardware=ONE, config=config, trainer={"callbacks": [watch]})
    for found in (weights(tmp_path / "run"), watch.seen, dict(module.state_dict())):
        torch.testing.assert_close(found, watch.average)


class Large(own.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_the_advice_on_memory_is_on_the_modules_loader(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="out of memory") as found:
        fit(Large(), own.Numbered(), hardware=ONE, config=settings(tmp_path))
    assert "DataLoader" in found.value.fix
    assert "training.batch_size" not in found.value.fix


class Counted(torch.nn.Linear):
    calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        Counted.calls += self.training
        return super().forward(values)


def test_activations_are_computed_again_for_the_same_weights(tmp_path: Path) -> None:
    found, calls = [], []
    for recompute in (False, True):
        folder, Counted.calls = tmp_path / str(recompute), 0
        torch.manual_seed(0)
        module = own.Classifier(str(noted(tmp_path)))
        module.net = torch.nn.Sequential(torch.nn.Linear(4, 8), Counted(8, 8), torch.nn.Linear(8, 2))
        training = {"epochs": 1, "activation_checkpointing": recompute, "on_oom": "retry"}
        result = fit(module, own.Numbered(), hardware=ONE, config=settings(folder, **training))
        found.append(weights(folder / "run"))
        calls.append(Counted.calls)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert calls[1] == 2 * calls[0] > 0
    texts = [note["text"] for note in RunDir.open(result.run_dir).plan()["notes"] if note["key"] == "settings_unused"]
    assert any("training.on_oom" in text for text in texts)


@pytest.mark.slow
def test_a_run_of_a_module_is_evaluated_and_exported_by_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"datamodule": f"{FILE}:Ragged", "model": {"batchnorm": True}, "data": {"samples": 51}}
    lockstep.train(MODULE, settings(tmp_path, epochs=1) | {"hardware": ONE, "task": task})
    run = lockstep.Run(tmp_path / "run")
    command = ["evaluate", str(run.run_dir), "--json"]
    assert main(command) == 0
    tested = json.loads(capsys.readouterr().out)
    assert main([*command, "--split", "val", "--checkpoint", "last"]) == 0
    validated = json.loads(capsys.readouterr().out)
    assert (tested["samples"], tested["metrics"]) == (11, {"test_number": 5.0})
    assert (validated["samples"], validated["step"]) == (5, 7)
    assert validated["metrics"]["val_loss"] == pytest.approx(run.history[-1]["val_loss"])
    with pytest.raises(UnsupportedError):
        run.evaluate(devices="cpu,cpu")
    run.export(tmp_path / "out")
    done = subprocess.run([sys.executable, str(tmp_path / "out" / "load_example.py")], capture_output=True, text=True)
    assert done.stdout == "output: (2, 2)\n", done.stderr
    again = own.Classifier.load_from_checkpoint(tmp_path / "out" / "module.ckpt")
    assert again.hparams == {"seen": None, "manual": False, "batchnorm": True, "unused": False, "frozen": False}
    for name, value in weights(tmp_path / "run").items():
        assert torch.equal(again.state_dict()[name], value)
    assert own.Ragged.load_from_checkpoint(tmp_path / "out" / "module.ckpt").hparams.samples == 51


def test_a_module_that_does_not_show_its_input_is_exported_without_a_program(tmp_path: Path) -> None:
    task = {"datamodule": f"{FILE}:Numbered"}
    lockstep.train(f"{FILE}:Unshown", settings(tmp_path, epochs=1) | {"hardware": ONE, "task": task})
    run = lockstep.Run(tmp_path / "run")
    with pytest.raises(DataError, match="example_input_array"):
        run.export(tmp_path / "out", program=True)
    run.export(tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"weights.safetensors", "module.ckpt", "metadata.json", "load_example.py"}


SCRIPT = """
import threading
import torch
from torch import nn
from lockstep.lightning import fit
from tests.lightning.own import Classifier, Numbered

class Mine(Classifier):
    def __init__(self):
        super().__init__(manual=True, batchnorm=True)

module, results = Mine(), []
before = module.net[0].weight.detach().clone()
hardware = {"selected_devices": ["cpu", "cpu"], "precision": "bf16-mixed"}
config = {"save_dir": "run", "training": {"epochs": 1}}

def train():
    results.append(fit(module, Numbered(val_samples=3), hardware=hardware, config=config))

thread = threading.Thread(target=train)
thread.start()
thread.join()
assert results[0].status == "completed", results
assert results[0].step == 4, results
assert not torch.equal(module.net[0].weight, before), "the caller's module has the trained weights"
print("val_number", results[0].best_metric["val_number"])
"""


@pytest.mark.slow
def test_a_program_on_standard_input_trains_a_class_of_its_own_on_two_ranks_from_a_thread(tmp_path: Path) -> None:
    """No main guard, no file to run again; a module that optimizes manually, with BatchNorm, in mixed precision."""
    env = clean_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
    printed = finish(commands.start("-", cwd=tmp_path, env=env, stdin=SCRIPT, merged=True, lightning=True))
    assert "val_number 1.0" in printed, "3 validation samples on two ranks count once each"


def test_a_named_module_starts_from_the_seed_of_the_run(tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        config = settings(tmp_path / name, seed=seed, epochs=1) | {"hardware": ONE}
        config["task"] = {"datamodule": f"{FILE}:Numbered", "model": {"batchnorm": True}}
        lockstep.train(MODULE, config)
        found.append(weights(tmp_path / name / "run"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not torch.equal(found[0]["net.0.weight"], found[2]["net.0.weight"])


class StopAfter(pl.Callback):
    """Sends this process a real SIGTERM when so many steps are done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class Told(own.Classifier):
    """Validates as it was told to: worst, best, then never better."""

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("val_score", {2: 3.0, 4: 1.0}.get(self.global_step, 2.0))


def test_validations_in_mid_epoch_decide_what_is_best_and_when_to_stop(tmp_path: Path) -> None:
    config = settings(tmp_path, early_stopping_patience=2) | {"validation": {"every_steps": 2}}
    config["checkpoint"] = {"monitor": "val_score", "mode": "min"}
    result = fit(Told(), own.Numbered(), hardware=ONE, config=config)
    run = RunDir.open(tmp_path / "run")
    assert (result.status, result.step) == ("completed", 7), "seven steps an epoch; without gain at 6 and at its end"
    assert result.best_metric["val_score"] == 1.0
    assert run.epochs()[0]["val_score"] == 2.0
    assert (run.checkpoints / "best").readlink() == Path("step-00000004")
    assert [(row["step"], row["improved"]) for row in run.evaluations()] == [(2, True), (4, True), (6, False)]


def test_a_validation_at_the_end_of_max_steps_does_not_count_for_patience(tmp_path: Path) -> None:
    """It is at step 5, where none is due; the run that goes on ends as one without that limit."""
    config = settings(tmp_path, early_stopping_patience=2, max_steps=5) | {"validation": {"every_steps": 2}}
    config["checkpoint"] = {"monitor": "val_score", "mode": "min"}
    assert fit(Told(), own.Numbered(), hardware=ONE, config=config).step == 5
    config["training"]["max_steps"] = None
    assert fit(Told(), own.Numbered(), config=config, resume=True).step == 7


def test_validations_between_epochs_come_besides_those_at_their_ends(tmp_path: Path) -> None:
    """Four steps an epoch, of two micro-batches each."""
    steps: list[int] = []

    class Watch(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            steps.append(trainer.global_step)

    config = settings(tmp_path, accumulate=2) | {"validation": {"every_steps": 3, "every_epochs": 2, "sanity_steps": 0}}
    fit(own.Classifier(), own.Numbered(), hardware=ONE, config=config, trainer={"callbacks": [Watch()]})
    assert steps == [3, 6, 8]
    with pytest.raises(ConfigError, match=r"validation\.every_steps .*check_val_every_n_epoch"):
        config["save_dir"] = str(tmp_path / "other")
        fit(own.Classifier(), own.Numbered(), hardware=ONE, config=config, trainer={"check_val_every_n_epoch": 1})
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("stopped_after", [3, 7])
def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(tmp_path: Path, stopped_after: int) -> None:
    """In mid-epoch and at the end of one: optimizer, schedule and order go on where they were."""
    folders = {name: tmp_path / name for name in ("whole", "parts")}
    modules = {}
    for name, folder in folders.items():
        folder.mkdir()
        torch.manual_seed(5)
        modules[name] = own.Classifier(str(noted(folder)), batchnorm=True)
    fit(modules["whole"], own.Numbered(), hardware=ONE, config=settings(folders["whole"]))
    config, stop = settings(folders["parts"]), {"callbacks": [StopAfter(stopped_after)]}
    stopped = fit(modules["parts"], own.Numbered(), hardware=ONE, config=config, trainer=stop)
    assert (stopped.status, stopped.exit_code) == ("stopped", 143)
    assert stopped_after <= stopped.step <= stopped_after + 1
    again = own.Classifier(str(folders["parts"] / "seen"), batchnorm=True)
    result = fit(again, own.Numbered(), config=config, resume=True)
    assert (result.status, result.step) == ("completed", 14)
    assert own.seen(folders["parts"] / "seen") == own.seen(folders["whole"] / "seen")
    ours, theirs = weights(folders["parts"] / "run"), weights(folders["whole"] / "run")
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    rows = [RunDir.open(folder / "run").epochs() for folder in folders.values()]
    for key in ("train_loss", "val_loss", "lr"):
        assert [row[key] for row in rows[0]] == pytest.approx([row[key] for row in rows[1]], rel=1e-6), key


class AtEpochEnds(own.Classifier):
    """Changes a buffer in each hook of an epoch's end; its validation gets worse after the first epoch."""

    def __init__(self) -> None:
        super().__init__(batchnorm=True)
        self.register_buffer("ends", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.ends += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class NotesEpochEnds(AtEpochEnds):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, int]] = []

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.noted.append((self.current_epoch, self.global_step))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_hooks_of_an_epoch_that_max_steps_divides_are_called_as_by_a_trainer(tmp_path: Path) -> None:
    """At the stop and at the epoch's end; the Trainer's state has both, a run's the second alone."""
    ends = {}
    modules = [NotesEpochEnds() for _ in range(4)]
    last = tmp_path / "last.ckpt"
    for module, steps, source in ((modules[0], 10, None), (modules[1], 14, last)):
        saving = ModelCheckpoint(tmp_path, save_last=True)
        trainer = pl.Trainer(
            accelerator="cpu",
            plugins=[LightningEnvironment()],
            logger=False,
            callbacks=[saving],
            max_steps=steps,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, own.Numbered(), ckpt_path=source)
    ends["trainer"] = float(modules[1].ends)
    config = settings(tmp_path, epochs=2, max_steps=10)
    fit(modules[2], own.Numbered(), hardware=ONE, config=config)
    config["training"]["max_steps"] = None
    fit(modules[3], own.Numbered(), config=config, resume=True)
    ends["run"] = float(modules[3].ends)
    noted = [module.noted for module in modules]
    assert noted[:2] == noted[2:] == [[(0, 7), (1, 10)], [(1, 14)]]
    assert ends == {"trainer": 3, "run": 2}


@pytest.mark.parametrize("by", ["signal", "max_steps"])
def test_a_stop_within_an_epoch_saves_the_state_before_its_end(tmp_path: Path, by: str) -> None:
    """The Trainer's early stopping, a scheduler and a buffer count epochs, not attempts."""
    folders = {name: tmp_path / name for name in ("whole", "parts")}
    stopping = {name: EarlyStopping("val_loss", patience=3) for name in (*folders, "again")}
    ends = []
    for name, folder in folders.items():
        torch.manual_seed(5)
        config = settings(folder, epochs=8)
        callbacks: list[Any] = [stopping[name]]
        if name == "parts" and by == "signal":
            callbacks.append(StopAfter(17))
        elif name == "parts":
            config["training"]["max_steps"] = 17
        result = fit(AtEpochEnds(), own.Numbered(), hardware=ONE, config=config, trainer={"callbacks": callbacks})
        ends.append(result.step)
    assert ends[0] == 28, "four epochs of seven steps: three without improvement"
    assert ends[1] in (17, 18)
    trainer = {"callbacks": [stopping["again"]]}
    config["training"]["max_steps"] = None
    result = fit(AtEpochEnds(), own.Numbered(), config=config, trainer=trainer, resume=True)
    assert (result.status, result.step) == ("completed", 28)
    ours, theirs = weights(folders["parts"] / "run"), weights(folders["whole"] / "run")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["ends"] == 4
    assert stopping["again"].state_dict() == stopping["whole"].state_dict()


def test_a_callback_that_stops_at_a_validation_within_an_epoch_saves_the_state_before_its_end(tmp_path: Path) -> None:
    module = NotesEpochEnds()
    config = settings(tmp_path, epochs=8) | {"validation": {"every_steps": 2}}
    stopping = EarlyStopping("val_loss", patience=1, check_on_train_epoch_end=False)
    result = fit(module, own.Numbered(), hardware=ONE, config=config, trainer={"callbacks": [stopping]})
    assert (result.status, result.step) == ("completed", 4), (
        "of seven steps an epoch; without improvement at the fourth"
    )
    assert module.noted == [(0, 4)]
    assert weights(tmp_path / "run")["ends"] == 0


def test_the_command_line_cannot_resume_an_object_of_a_script(tmp_path: Path) -> None:
    fit(own.Classifier(), own.Numbered(), hardware=ONE, config=settings(tmp_path, max_steps=1))
    with pytest.raises(TaskError, match=r"(?s)\bLightningModule\b.*fit\(…, resume=True\)"):
        lockstep.Run(tmp_path / "run").resume(training={"max_steps": 2})


def test_workers_change_nothing(tmp_path: Path) -> None:
    losses = []
    for workers in (0, 1):
        folder = tmp_path / str(workers)
        folder.mkdir()
        torch.manual_seed(3)
        module = own.Classifier(batchnorm=True)
        data = own.Numbered(workers=workers, val_samples=9)
        fit(module, data, hardware=ONE, config=settings(folder))
        losses.append([(row["train_loss"], row["val_loss"]) for row in RunDir.open(folder / "run").epochs()])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"trainer": {"devices": 2}}, ConfigError, "selected_devices"),
        ({"trainer": {"use_distributed_sampler": True}}, ConfigError, "order"),
        ({"trainer": {"limit_train_batches": 3}}, ConfigError, "max_steps; .*Subset"),
        ({"trainer": {"min_epochs": 2}}, ConfigError, "early_stopping_patience"),
        ({"trainer": {"callbacks": GradientAccumulationScheduler({0: 2})}}, ConfigError, "training.accumulate"),
        ({"hardware": {"selected_devices": ["gpu:900"]}}, DeviceError, "gpu:900"),
        ({"training": {"reproducibility": "exact"}}, UnsupportedError, "exact"),
        ({"training": {"compile": True}}, UnsupportedError, "compile"),
    ],
)
def test_what_is_refused_before_anything_is_trained(
    tmp_path: Path, more: dict[str, Any], error: type, words: str
) -> None:
    config = settings(tmp_path, **more.get("training", {}))
    with pytest.raises(error, match=words):
        fit(
            own.Classifier(),
            own.Numbered(),
            hardware=more.get("hardware", ONE),
            config=config,
            trainer=more.get("trainer"),
        )
    assert not (tmp_path / "run").exists()


def test_the_trainers_own_callbacks_profiler_and_sanity_check_are_there(tmp_path: Path) -> None:
    calls: list[str] = []

    class Watch(pl.Callback):
        def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            calls.append("sanity")

        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            calls.append("epoch")
            trainer.should_stop = True

    config = settings(tmp_path) | {"validation": {"sanity_steps": 2}}
    config |= {"optimizer": {"lr": 0.5}, "data": {"num_workers": 3}}
    profiler = SimpleProfiler(tmp_path, "profile")
    given = {"callbacks": [Watch()], "enable_checkpointing": False, "profiler": profiler}
    result = fit(own.Classifier(), own.Numbered(), hardware=ONE, config=config, trainer=given)
    assert calls == ["sanity", "epoch"]
    assert (result.status, result.step) == ("completed", 7)
    assert "run_training_epoch" in next(tmp_path.glob("*profile*")).read_text()
    run = RunDir.open(tmp_path / "run")
    assert (run.checkpoints / "last").exists(), "the run keeps its checkpoints, not the Trainer"
    notes = " ".join(note["text"] for note in run.plan()["notes"])
    assert "optimizer.lr " in notes
    assert "data.num_workers " in notes


def test_a_failure_in_the_module_is_the_runs_error(tmp_path: Path) -> None:
    class Broken(own.Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("the module broke, as it was told to")

    with pytest.raises(RankFailed, match="as it was told to"):
        fit(Broken(), own.Numbered(), hardware=ONE, config=settings(tmp_path))
    run = RunDir.open(tmp_path / "run")
    assert run.status() == "failed"
    assert "as it was told to" in (run.read().error or "")


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(own._numbered(5, 2))


@pytest.mark.parametrize("several", [False, True])
def test_validation_data_of_unknown_size_are_evaluated(several: bool) -> None:
    class Streamed(own.Numbered):
        def val_dataloader(self) -> Any:
            loader = super().val_dataloader()
            return CombinedLoader([loader], "sequential") if several else DataLoader(Endless(), batch_size=2)

    task = ModuleTask(module=own.Classifier(), datamodule=Streamed())
    values, samples = evaluate_module(task, "val", PLACEMENT, seed=1)
    assert (values["val_number"], samples) == (2.0, None)


def test_an_evaluated_module_may_use_its_logger() -> None:
    class Pictured(own.Classifier):
        def on_validation_epoch_end(self) -> None:
            assert self.logger is not None
            self.logger.experiment.add_image("validation", torch.zeros(3, 2, 2), self.current_epoch)

    task = ModuleTask(module=Pictured(), datamodule=own.Numbered())
    assert "val_number" in evaluate_module(task, "val", PLACEMENT, seed=1)[0]


def test_a_module_without_the_step_of_a_split_is_one_error() -> None:
    class Untested(own.Classifier):
        test_step = pl.LightningModule.test_step

    task = ModuleTask(module=Untested(), datamodule=own.Numbered())
    with pytest.raises(TaskError, match=r"Untested .*test_step\(\)"):
        evaluate_module(task, "test", PLACEMENT, seed=1)


class Unusual(own.Classifier):
    """Saves what a checkpoint can hold, and what it cannot."""

    loaded: dict[str, Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(
            {"sizes": [np.float64(1)], "shape": (1, [2, "x"]), "by": {Path("x"): 1}, "make": object()}
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["center"], checkpoint["places"] = {"mean": np.arange(3.0), "n": np.int64(3)}, {"first": Path("x")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint


def test_what_a_module_adds_to_its_checkpoints_is_kept_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path) | {"telemetry": {"log_interval": 1, "progress": "plain"}}
    with pytest.raises(ConfigError, match=r"(?s)hardware\b.*devices="):
        fit(Unusual(), own.Numbered(), hardware=ONE, config=config, devices="cpu")
    fit(Unusual(), own.Numbered(), devices="cpu", config=config, trainer={"callbacks": [StopAfter(3)]})
    assert "places (dict)" in capsys.readouterr().out
    again = Unusual()
    assert fit(again, own.Numbered(), config=config, resume=True).status == "completed"
    assert again.loaded is not None
    assert again.loaded["center"]["mean"].tolist() == [0, 1, 2]
    assert again.loaded["center"]["n"] == 3
    assert "places" not in again.loaded
    hyper_parameters = again.loaded["hyper_parameters"]
    assert {"sizes", "shape"} <= hyper_parameters.keys()
    assert not {"by", "make"} & hyper_parameters.keys()


def test_the_loss_of_an_interval_takes_in_the_steps_before_an_epochs_end(tmp_path: Path) -> None:
    rows = []
    for interval in (1, 3):
        config = settings(tmp_path / str(interval)) | {"hardware": ONE, "task": {"datamodule": f"{FILE}:Numbered"}}
        config["telemetry"]["log_interval"] = interval
        lockstep.train(MODULE, config)
        rows.append(RunDir.open(tmp_path / str(interval) / "run").steps())
    each, some = rows
    assert [row["step"] for row in some] == [3, 6, 9, 12, 14], "of seven steps an epoch: the third is in both"
    assert [row["loss"] for row in some] == pytest.approx(interval_means(each, some), rel=1e-6)


class Growing(own.Numbered):
    """More samples in each epoch, and a count of the loaders that were made."""

    made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        epoch = self.trainer.current_epoch
        return DataLoader(own._numbered(20 + 10 * (epoch // 2), 1), batch_size=8)


def test_a_training_set_that_changes_its_length_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = {"reload_dataloaders_every_n_epochs": 1}
    with pytest.raises(DataError, match=r"\b30 .*\b3, .*\b20\b"):
        fit(own.Classifier(), Growing(), hardware=ONE, config=settings(tmp_path, epochs=4), trainer=trainer)
    assert not (tmp_path / "run").exists()
    data = Growing()
    result = fit(own.Classifier(), data, hardware=ONE, config=settings(tmp_path), trainer=trainer)
    assert (result.step, data.made) == (6, 3), "one for the plan, two for two epochs"
