"""Runs of ``lockstep lightning fit`` with the verbs of other runs: resume, evaluate, export."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lockstep import Run
from lockstep.cli.main import main
from lockstep.lightning.cli import run
from lockstep.studio.details import describe
from lockstep.telemetry.rundir import RunDir
from tests.lightning.test_cli import write_config
from tests.lightning.trainings import Breaking

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Of a fit that failed in its second epoch, and would not fail again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = write_config(tmp_path, model={"class_path": "tests.lightning.trainings.Breaking"})
    (tmp_path / "broken").write_text("epoch 1")
    with pytest.raises(ValueError, match="no luck in epoch 1"):
        run(["fit", "-c", str(config), "--run_dir", "out"])
    (tmp_path / "broken").unlink()
    return RunDir.open(tmp_path / "out")


def test_a_failed_fit_is_resumed_then_evaluated_and_exported(
    folder: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert describe(folder, {"status": "failed"}, None)["resumable"], "the page offers it"
    assert main(["resume", "./out", "--devices", "cpu,cpu"]) == 0
    assert [(row["epoch"], row["attempt"], row["step"]) for row in folder.epochs()] == [(1, 1, 4), (2, 2, 8)]
    assert (folder.read().status, folder.read().placement["world_size"]) == ("completed", 2)
    capsys.readouterr()
    assert main(["evaluate", "./out", "--split", "val", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["split"], found["step"], found["metrics"]) == ("val", 8, {"val_loss": 1.0, "own_val": 1.0})
    assert Run("./out").evaluate(split="val", checkpoint=8) == found["metrics"]
    assert main(["export", "./out", "--out", "exported"]) == 0
    module = Breaking.load_from_checkpoint(tmp_path / "exported" / "module.ckpt")
    assert module.layer.weight.shape == (1, 2)
    assert not (tmp_path / "lightning_logs").exists()


def test_what_cannot_be_done_is_refused_with_the_command_that_can(
    folder: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", "./out", "--set", "training.epochs=3"]) == 2
    assert "lockstep lightning fit --config" in capsys.readouterr().err
    assert main(["evaluate", "./out", "--checkpoint", "7"]) == 2
    assert "has no checkpoint 7" in capsys.readouterr().err
    assert main(["export", "./out", "--program"]) == 2
    assert "load_from_checkpoint" in capsys.readouterr().err
    folder.cli_config_file.write_text(folder.cli_config_file.read_text() + "\n")
    assert main(["resume", "./out"]) == 2
    assert "was not written by a fit of yours on this machine" in capsys.readouterr().err
