"""What a module logs in its evaluation: of the loader's own batches, the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import lockstep.lightning
from lockstep.errors import LockstepError
from tests.gloo import ROOT
from tests.lightning.logged import Logged

FILE = ROOT / "tests" / "lightning" / "logged.py"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def train(folder: Path, devices: str, **model: Any) -> dict[str, float]:
    """The row of the epoch."""
    run = lockstep.train(
        f"{FILE}:Logged",
        {"task": {"model": model}, "telemetry": {"progress": "silent"}},
        devices=devices,
        epochs=1,
        save_dir=folder,
    )
    return run.history[-1]


VALUES = {
    "val_loss": (2 + 5 + 6) / 3,
    "val_batches": 9 + 9 + 1 + 300,
    "val_number": 3.0,
    "val_first": 4.0,
    "val_second": 3.0,
    "val_some": 6.0,
    "val_six": 6.0,
    "val_most": 6.0,
    "val_x": float(ord("x")),
    "val_y": float(ord("y")),
}


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_the_loaders_batches_are_evaluated_whole_and_values_meet_under_their_names(
    tmp_path: Path, devices: str
) -> None:
    """The third batch is on one rank alone, and so is what it logs."""
    row = train(tmp_path / "run", devices)
    assert {name: row[name] for name in VALUES} == pytest.approx(VALUES, rel=1e-6)


def test_one_device_evaluates_as_the_trainer_does(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    module = Logged(drop_last=True)
    [theirs] = trainer.validate(module, verbose=False)
    row = train(tmp_path / "run", "cpu", drop_last=True)
    for name in ("val_loss", "val_batches", "val_first"):
        assert row[name] == theirs[name]
    assert row["val_loss"] == (2 + 5) / 2


class Unmonitored(Logged):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_other", batch[0].mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        pass


def test_the_callers_callbacks_have_their_state_and_the_run_its_metrics(tmp_path: Path) -> None:
    best = ModelCheckpoint(monitor="val_other", save_last=True)
    run = lockstep.lightning.fit(
        Unmonitored(),
        config={"telemetry": {"progress": "silent"}, "save_dir": tmp_path / "run"},
        devices="cpu,cpu",
        epochs=2,
        trainer={"callbacks": [best]},
    )
    assert run.metrics == {"val_other": pytest.approx(3.0)}
    assert Path(best.best_model_path).is_file()
    assert best.best_model_score == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"gathers": True}, "all_gather"),
        pytest.param({"mixes": "names"}, r"rank 0 train_0; rank 1 train_1", marks=pytest.mark.slow),
        pytest.param({"mixes": "number"}, r"rank 0 train_0; rank 1 train_0, train_1", marks=pytest.mark.slow),
        pytest.param({"differs": "train"}, r"rank 1 .*\btrain\b", marks=pytest.mark.slow),
        ({"differs": "val"}, r"rank 1 .*\bval\b"),
    ],
)
def test_what_ranks_do_not_share_is_refused(tmp_path: Path, model: dict[str, Any], words: str) -> None:
    with pytest.raises(LockstepError, match=words):
        train(tmp_path / "run", "cpu,cpu", **model)
