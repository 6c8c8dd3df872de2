"""Lightning's own demonstration modules, data modules and loaders, unchanged, on one device and two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
    RandomDataset,
    RandomIterableDatasetWithLen,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

import lockstep
from lockstep.errors import ConfigError, TaskError, UnsupportedError
from lockstep.lightning import fit
from lockstep.rundir.folder import RunDir
from tests.e2e.test_train import weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*no .val_dataloader.*"),
    pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.*"),
]


def settings(folder: Path, *devices: str, **training: Any) -> dict[str, Any]:
    return {
        "hardware": {"selected_devices": devices or ("cpu",)},
        "training": {"threads": 1, "epochs": 2, **training},
        "telemetry": {"log_interval": 8, "progress": "silent", "tensorboard": "off", "system_metrics": False},
        "save_dir": str(folder),
    }


def loader(samples: int = 64, **options: Any) -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, samples), batch_size=4, **options)


class NoData(BoringModel):
    """Its data are given to ``fit``."""

    train_dataloader = pl.LightningModule.train_dataloader
    val_dataloader = pl.LightningModule.val_dataloader


class SeveralValidations(BoringModel):
    def val_dataloader(self) -> Any:
        return [loader(), loader(32)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", 1.0 + dataloader_idx + self.current_epoch)


class LoggedByHand(ManualOptimBoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("train_loss", super().training_step(batch, batch_idx))


class SaysNothing(ManualOptimBoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


class Untrained(BoringModel):
    def configure_optimizers(self) -> Any:
        return None


class Paired(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch["a"]) + self.step(batch["b"])


class AsksTheTrainer(BoringModel):
    """Divides its batch among the ranks itself."""

    def setup(self, stage: str) -> None:
        self.size = 8 // self.trainer.world_size

    def train_dataloader(self) -> Any:
        assert self.trainer.max_epochs == 2
        return DataLoader(RandomDataset(32, 64), batch_size=self.size, shuffle=True)


@pytest.mark.slow
def test_boring_models_and_loaders_are_trained_as_the_trainer_takes_them(tmp_path: Path) -> None:
    calls: list[tuple[int, Callable[[dict[str, Any]], Any]]] = [
        (128, lambda config: fit(BoringModel(), config=config)),
        (128, lambda config: fit(BoringModel(), BoringDataModule(), config=config)),
        (128, lambda config: fit(NoData(), datamodule=BoringDataModule(), config=config)),
        (32, lambda config: fit(NoData(), loader(), loader(32), config=config)),
        (32, lambda config: fit(DemoModel(), train_dataloaders=loader(), config=config)),
        (16, lambda config: fit(AsksTheTrainer(), config=config)),
    ]
    for number, (steps, call) in enumerate(calls):
        result = call(settings(tmp_path / str(number)))
        assert (result.status, result.step) == ("completed", steps)
    with pytest.raises(TaskError, match=r"\bNoData\b"):
        fit(NoData(), config=settings(tmp_path / "none"))
    with pytest.raises(ConfigError, match="data module and loaders"):
        fit(NoData(), BoringDataModule(), loader(), config=settings(tmp_path / "none"))


def test_what_is_not_known_of_the_trainer_yet_is_named(tmp_path: Path) -> None:
    class Curious(BoringModel):
        def setup(self, stage: str) -> None:
            self.trainer.estimated_stepping_batches  # noqa: B018

    with pytest.raises(TaskError, match=r"self\.trainer\.estimated_stepping_batches .*\n.*world_size"):
        fit(Curious(), config=settings(tmp_path))


class TellsItsEpochs(BoringModel):
    known: ClassVar[list[int]] = []

    def train_dataloader(self) -> Any:
        self.known.append(self.trainer.max_epochs)
        return loader()


@pytest.mark.slow
def test_the_trainer_of_a_plan_has_the_settings_of_the_run_that_is_resumed(tmp_path: Path) -> None:
    lockstep.train(TellsItsEpochs, settings(tmp_path, epochs=1))
    TellsItsEpochs.known.clear()
    lockstep.train(TellsItsEpochs, settings(tmp_path, epochs=2), resume=True)
    assert set(TellsItsEpochs.known) == {2}


def test_setup_may_ask_for_the_strategy(tmp_path: Path) -> None:
    devices = []

    class Placed(BoringModel):
        def setup(self, stage: str) -> None:
            assert isinstance(self.trainer.strategy, SingleDeviceStrategy)
            devices.append(self.trainer.strategy.root_device)

    assert fit(Placed(), config=settings(tmp_path)).status == "completed"
    assert set(devices) == {torch.device("cpu")}


@pytest.mark.slow
def test_two_ranks_take_loaders_and_a_batch_that_the_module_divides(tmp_path: Path) -> None:
    fit(AsksTheTrainer(), config=settings(tmp_path / "one"))
    result = fit(AsksTheTrainer(), val_dataloaders=loader(32), config=settings(tmp_path / "two", "cpu", "cpu"))
    assert (result.status, result.step) == ("completed", 16)
    plans = [RunDir.open(tmp_path / name).plan()["batch"] for name in ("one", "two")]
    assert [plan["global_batch"] for plan in plans] == [8, 8]
    for train in (loader(sampler=range(64)), {"a": loader(), "b": loader()}):
        with pytest.raises(UnsupportedError):
            fit(NoData(), train, config=settings(tmp_path / "refused", "cpu", "cpu"))


@pytest.mark.slow
def test_on_one_device_loaders_keep_their_own_order(tmp_path: Path) -> None:
    pair = {"a": loader(), "b": loader(32)}
    cases: list[tuple[pl.LightningModule, Any]] = [
        (Paired(), pair),
        (Paired(), CombinedLoader(pair, "min_size")),
        (NoData(), DataLoader(RandomIterableDatasetWithLen(32, 62), batch_size=4)),
    ]
    for number, ((module, train), steps) in enumerate(zip(cases, (32, 16, 32), strict=True)):
        result = fit(module, train, config=settings(tmp_path / str(number)))
        assert (result.status, result.step) == ("completed", steps)
    with pytest.raises(UnsupportedError, match=r"fix: .*training\.max_steps"):
        fit(NoData(), BoringDataModuleNoLen(), config=settings(tmp_path / "endless"))
    result = fit(NoData(), BoringDataModuleNoLen(), config=settings(tmp_path / "ended", max_steps=600))
    assert (result.status, result.step) == ("completed", 600), "the 512 batches are read again"
    with pytest.raises(ConfigError, match=r"training\.accumulate=3 .*\b16\b"):
        fit(Paired(), pair, config=settings(tmp_path / "ragged", accumulate=3))


def test_samples_of_a_loaders_own_batches_are_counted(tmp_path: Path) -> None:
    drawn = BatchSampler(RandomSampler(range(64)), 4, drop_last=False)
    train = DataLoader(RandomDataset(32, 64), batch_sampler=drawn)
    result = fit(BoringModel(), train, config=settings(tmp_path, epochs=1))
    assert (result.status, result.step) == ("completed", 16)
    run = RunDir.open(tmp_path)
    assert run.plan()["batch"]["global_batch"] == 4
    assert [row["samples_seen"] for row in run.epochs()] == [64]


def test_a_loaders_own_order_is_resumed_in_mid_epoch(tmp_path: Path) -> None:
    samples = RandomDataset(32, 64)
    for name, steps in (("whole", [None]), ("parts", [5, None])):
        for max_steps in steps:
            torch.manual_seed(1)
            drawn = DataLoader(samples, batch_size=4, sampler=WeightedRandomSampler([1.0, 3.0] * 32, 64))
            config = settings(tmp_path / name, max_steps=max_steps)
            result = fit(BoringModel(), drawn, config=config, resume=max_steps is None)
        assert result.step == 32
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_what_modules_log_decides_what_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def trained(module: pl.LightningModule, **trainer: Any) -> tuple[Any, str, list[dict[str, Any]]]:
        folder = tmp_path / type(module).__name__
        config = settings(folder, epochs=1) | {"telemetry": {"log_interval": 8, "progress": "plain"}}
        result = fit(module, config=config, trainer=trainer)
        return result, capfd.readouterr().out, RunDir.open(folder).steps()

    result, output, _ = trained(SeveralValidations(), callbacks=[RichProgressBar()])
    assert result.best_metric == {"val_loss/dataloader_idx_0": 1.0, "val_loss/dataloader_idx_1": 2.0}
    assert "val_loss/dataloader_idx_0 " in output
    result, output, rows = trained(LoggedByHand())
    assert "nan" not in output
    assert all(row["loss"] > 0 for row in rows)
    result, output, rows = trained(SaysNothing())
    assert not any("loss" in line for line in output.splitlines() if " step " in line)
    assert [row["loss"] for row in rows] == [None] * 8
    assert "do not report 'val_loss'" in output
    result, _, rows = trained(Untrained())
    assert (result.status, rows[-1]["lr"]) == ("completed", None)
    config = settings(tmp_path / "half", epochs=1)
    config["hardware"]["precision"] = "16-mixed"
    fit(BoringModel(), config=config)
    assert "precision_changed" in {note["key"] for note in RunDir.open(tmp_path / "half").plan()["notes"]}
