"""Every callback alone, in a real Trainer; those that matter with several ranks, on two."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn

from lockstep.errors import ConfigError
from lockstep.lightning.callbacks import (
    AgreedEarlyStopping,
    ConfigurationCheck,
    DeviceMonitor,
    JSONMetricsLogger,
    LearningRate,
    RunStatus,
    StopOnSignal,
    Upload,
)
from lockstep.rundir.folder import RunDir
from tests.gloo import run_ranks
from tests.lightning.trainings import Probe, be_rank, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class At(Callback):
    """Calls ``do`` after a batch of an epoch (both from 0)."""

    def __init__(self, epoch: int, batch: int, do: Any) -> None:
        self.epoch, self.batch, self.do = epoch, batch, do

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (self.epoch, self.batch):
            self.do()


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "metrics.json").read_text())["epochs"]
    return found


def test_a_row_has_what_the_module_logs_at_the_ends_of_that_epoch(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [JSONMetricsLogger(tmp_path / "run")], check_val_every_n_epoch=2, max_epochs=4)
    trainer.fit(Probe())
    found = rows(tmp_path / "run")
    assert [(row["epoch"], row["step"], row["own_train"]) for row in found] == [(n, 4 * n, n) for n in range(1, 5)]
    assert [row.get("own_val") for row in found] == [None, 2, None, 4], "no value of an earlier epoch"
    assert [row.get("val_loss") for row in found] == [None, 1, None, 1]
    assert [row["lr"] for row in found] == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    assert found[0].keys() == {"epoch", "step", "train_loss", "own_train", "lr", "duration_s"}


def test_a_resumed_training_keeps_the_rows_before(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    make_trainer(tmp_path, [JSONMetricsLogger(tmp_path), saved], enable_checkpointing=True).fit(Probe())
    first = rows(tmp_path)
    trainer = make_trainer(tmp_path, [JSONMetricsLogger(tmp_path)], max_epochs=4)
    trainer.fit(Probe(), ckpt_path=tmp_path / "epoch=1.ckpt", weights_only=False)
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert rows(tmp_path)[:2] == first[:2]


def test_status_best_and_final_values_of_a_training(tmp_path: Path) -> None:
    status = RunStatus(tmp_path / "run", monitor="val/loss")
    trainer = make_trainer(tmp_path, [status, JSONMetricsLogger(tmp_path / "run")])
    trainer.fit(Probe(val_loss=[2.0, 1.0, 3.0]))
    run = RunDir.open(tmp_path / "run")
    record = run.read()
    assert (record.status, record.best_epoch, record.best_metric) == ("completed", 2, {"val_loss": 1.0})
    assert record.final_metrics["own_train"] == 3
    assert record.completed_at is not None
    beat = run.progress()
    assert beat is not None
    assert (beat.step, beat.total, beat.ended) == (12, 12, True)
    assert [row["attempt"] for row in run.epochs()] == [1, 1, 1]


def test_status_of_a_training_that_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="as it was told to"):
        make_trainer(tmp_path, [RunStatus(tmp_path / "run")]).fit(Probe(fail_in_epoch=1))
    record = RunDir.open(tmp_path / "run").read()
    assert record.status == "failed"
    assert "Traceback" in (record.error or "")
    assert "as it was told to" in (record.error or "")


def test_the_learning_rate_is_that_of_the_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [LearningRate()], logger=CSVLogger(tmp_path, name="", version=""), max_epochs=2)
    trainer.fit(Probe())
    lines = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    place, step = lines[0].index("lr"), lines[0].index("step")
    found = [(int(line[step]), float(line[place])) for line in lines[1:] if line[place]]
    assert found == [(n, 0.1 if n <= 4 else 0.05) for n in range(1, 9)]


def test_the_monitor_writes_lines_and_ends(tmp_path: Path) -> None:
    make_trainer(tmp_path, [DeviceMonitor(tmp_path / "run", interval_s=0.01)]).fit(Probe())
    (file,) = (tmp_path / "run").glob("system-*.jsonl")
    for line in file.read_text().splitlines():
        row = json.loads(line)
        assert 0 <= row["host"]["cpu"] <= 1
        assert row["host"]["memory_gb"] > 0
        assert row["devices"] == []
    assert not [thread for thread in threading.enumerate() if thread.name == "lockstep-device-monitor"]


def test_the_check_is_printed_once(tmp_path: Path) -> None:
    stream = io.StringIO()
    trainer = make_trainer(tmp_path, [ConfigurationCheck(stream)], max_epochs=1)
    trainer.fit(Probe())
    trainer.validate(Probe())
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Training configuration check:"
    assert lines[1:] == [
        "- Accelerator: CPUAccelerator",
        "- Devices: [0] (cpu on rank 0)",
        "- Strategy: SingleDeviceStrategy (1 rank)",
        "- Precision: 32-true",
    ]


@pytest.mark.parametrize("how", ["signal", "request"])
def test_a_stop_ends_the_training_with_a_checkpoint(tmp_path: Path, how: str) -> None:
    stop = StopOnSignal(tmp_path, every_n_steps=1)
    ask = stop.request if how == "request" else lambda: os.kill(os.getpid(), signal.SIGTERM)
    trainer = make_trainer(
        tmp_path, [At(1, 1, ask), stop, RunStatus(tmp_path / "run"), JSONMetricsLogger(tmp_path / "run")]
    )
    trainer.fit(Probe())
    assert stop.stopped_by == signal.SIGTERM
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=False)["global_step"] == 6
    assert RunDir.open(tmp_path / "run").read().status == "stopped"
    assert [row["epoch"] for row in rows(tmp_path / "run")] == [1], "an epoch that was cut short makes no row"


def test_an_upload_mirrors_the_folder(tmp_path: Path) -> None:
    local, target = tmp_path / "local", tmp_path / "remote" / "run"
    callbacks = [
        ModelCheckpoint(local / "checkpoints", save_last=True),
        JSONMetricsLogger(local),
        Upload(local, str(target), every_n_epochs=2),
    ]
    make_trainer(tmp_path, callbacks, enable_checkpointing=True).fit(Probe())
    local_files = {path.relative_to(local): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    assert local_files.keys() >= {Path("metrics.json"), Path("checkpoints/last.ckpt")}
    assert {path: (target / path).read_bytes() for path in local_files} == local_files


def test_a_target_that_never_answers_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    upload = Upload(tmp_path / "run", str(tmp_path / "file" / "run"), wait_s=1.0)
    trainer = make_trainer(tmp_path, [JSONMetricsLogger(tmp_path / "run"), upload])
    trainer.fit(Probe())
    assert trainer.current_epoch == 3
    assert f"{tmp_path}/file/run" in caplog.text


def test_an_unknown_target_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere://bucket"):
        Upload(tmp_path, "nowhere://bucket/run")


def every_callback(folder: Path, remote: str) -> list[Callback]:
    recording = [RunStatus(folder), JSONMetricsLogger(folder), DeviceMonitor(folder), StopOnSignal(folder)]
    return [*recording, LearningRate(), AgreedEarlyStopping("val_loss"), ConfigurationCheck(), Upload(target=remote)]


class Refusing(Probe):
    """A fit succeeds, and every other stage fails."""

    def on_validation_epoch_start(self) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING:
            raise ValueError("the first error")


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_other_stages_than_fit_change_nothing_and_end_with_their_own_error(tmp_path: Path) -> None:
    root, run, remote = tmp_path / "root", tmp_path / "run", tmp_path / "remote"
    root.mkdir()
    # A fit would refuse this target, since it lies in the trainer's folder.
    trainer = make_trainer(root, every_callback(run, str(root / "remote")))
    trainer.validate(Probe())
    with pytest.raises(ValueError, match="the first error"):
        trainer.validate(Refusing())
    assert files(tmp_path) == {}
    trainer = make_trainer(root, every_callback(run, str(remote)))
    trainer.fit(Refusing())
    (root / "later").touch()
    before = files(tmp_path)
    with pytest.raises(ValueError, match="the first error"):
        trainer.validate(Refusing())
    assert files(tmp_path) == before
    assert RunDir.open(run).read().status == "completed"


class Misplaced(Probe):
    """Removes the run folder, then fails."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_epoch_end(self) -> None:
        shutil.rmtree(self.folder)
        raise ValueError("the first error")


def test_a_clean_up_that_fails_is_logged_and_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="the first error") as failure:
        make_trainer(tmp_path, [RunStatus(run)]).fit(Misplaced(run))
    assert failure.value.__context__ is None
    assert "RunStatus" in caplog.text
    with pytest.raises(ConfigError) as refusal:  # before its mirror exists
        make_trainer(tmp_path, [Upload(target=str(tmp_path / "remote"))]).fit(Probe())
    assert refusal.value.__context__ is None


def in_two_ranks(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    settings = be_rank(rank)
    # Rank 1's own value gets better and better, rank 0's does not; the mean does not improve after the second epoch.
    losses = [[4.0, 3.0, 4.0, 5.0, 6.0, 7.0], [4.0, 3.0, 2.5, 2.2, 2.1, 2.0]][rank]
    early = AgreedEarlyStopping("val_loss", patience=2)
    run, remote = folder / "run", folder / "remote"
    stream = io.StringIO()
    callbacks = [early, RunStatus(run), JSONMetricsLogger(run), DeviceMonitor(run), Upload(run, str(remote))]
    trainer = make_trainer(folder, [*callbacks, ConfigurationCheck(stream)], max_epochs=6, **settings)
    trainer.fit(Probe(val_loss=losses))
    stop = StopOnSignal(folder / "stop", every_n_steps=1)
    # The signal reaches rank 1 alone.
    ask = (lambda: os.kill(os.getpid(), signal.SIGINT)) if rank == 1 else (lambda: None)
    second = make_trainer(folder, [At(0, 1, ask), stop], **settings)
    second.fit(Probe())
    return {
        "epochs": trainer.current_epoch,
        "best": float(early.best_score),
        "printed": stream.getvalue().count("DDPStrategy (2 ranks)"),
        "stopped": (stop.stopped_by, second.global_step),
        "uploading": rank == 0 or callbacks[-1].mirror._thread is None,  # type: ignore[attr-defined]
    }


def test_two_ranks_agree_and_rank_0_alone_writes(tmp_path: Path) -> None:
    zero, one = run_ranks(in_two_ranks, 2, tmp_path)
    assert zero["epochs"] == one["epochs"] == 4, "epochs 3 and 4 did not improve the mean"
    assert zero["best"] == one["best"] == 3.0
    assert (zero["printed"], one["printed"]) == (1, 0)
    assert zero["stopped"] == one["stopped"] == (signal.SIGINT, 2)
    assert one["uploading"]
    assert [row["epoch"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]
    assert [row["val_loss"] for row in rows(tmp_path / "run")] == [4, 3, 4, 5], "rank 0's own"
    assert RunDir.open(tmp_path / "run").read().status == "completed"
    assert (tmp_path / "stop" / "stopped.ckpt").is_file()
    assert rows(tmp_path / "remote") == rows(tmp_path / "run")
    assert fsspec.filesystem("file").exists(str(tmp_path / "remote" / "run.json"))
