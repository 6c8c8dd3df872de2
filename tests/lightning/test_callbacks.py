"""Every callback alone, in a real Trainer; those that matter with several ranks, on two."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lockstep.errors import ConfigError
from lockstep.lightning.callbacks import ConfigurationCheck, JSONMetricsLogger, Upload
from tests.gloo import run_ranks
from tests.lightning.trainings import Probe, be_rank, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


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


def test_an_upload_mirrors_the_folder(tmp_path: Path) -> None:
    local, target = tmp_path / "local", tmp_path / "remote" / "run"
    used: list[Callback] = [
        ModelCheckpoint(local / "checkpoints", save_last=True),
        JSONMetricsLogger(local),
        Upload(local, str(target), every_n_epochs=2),
    ]
    make_trainer(tmp_path, used, enable_checkpointing=True).fit(Probe())
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
    return [JSONMetricsLogger(folder), ConfigurationCheck(), Upload(target=remote)]


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


def test_the_clean_up_of_an_upload_hides_no_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:  # before its mirror exists
        make_trainer(tmp_path, [Upload(target=str(tmp_path / "remote"))]).fit(Probe())
    assert refusal.value.__context__ is None


def in_two_ranks(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    run, remote = folder / "run", folder / "remote"
    stream = io.StringIO()
    upload = Upload(run, str(remote))
    used = [JSONMetricsLogger(run), upload, ConfigurationCheck(stream)]
    losses = [[4.0, 3.0, 4.0, 5.0], [4.0, 3.0, 2.5, 2.2]][rank]
    make_trainer(folder, used, max_epochs=4, **be_rank(rank)).fit(Probe(val_loss=losses))
    return {
        "printed": stream.getvalue().count("DDPStrategy (2 ranks)"),
        "uploading": rank == 0 or upload.mirror._thread is None,  # type: ignore[union-attr]
    }


def test_rank_0_alone_writes(tmp_path: Path) -> None:
    zero, one = run_ranks(in_two_ranks, 2, tmp_path)
    assert (zero["printed"], one["printed"]) == (1, 0)
    assert one["uploading"]
    assert [row["epoch"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]
    assert [row["val_loss"] for row in rows(tmp_path / "run")] == [4, 3, 4, 5], "rank 0's own"
    assert rows(tmp_path / "remote") == rows(tmp_path / "run")
