"""Runs of ``lockstep lightning fit`` with the verbs of other runs: resume, evaluate, export; older ones, too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningArgumentParser

from lockstep import Run
from lockstep.cli.main import main
from lockstep.config.named import named
from lockstep.errors import RankFailed
from lockstep.lightning.cli import LockstepCLI, run
from lockstep.rundir.folder import RunDir
from tests.lightning.test_cli import write_config
from tests.lightning.trainings import Breaking
from tests.studio.serving import studio

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return write_config(tmp_path, model={"class_path": "tests.lightning.trainings.Breaking"})


@pytest.mark.slow
def test_a_failed_fit_is_resumed_then_evaluated_and_exported(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").write_text("epoch 1")
    with pytest.raises(RankFailed, match="no luck in epoch 1") as caught:
        run(["fit", "-c", str(config), "--run_dir", "runs/out"])
    assert "FitRequested" not in str(caught.value)
    (tmp_path / "broken").unlink()
    folder = RunDir.open(tmp_path / "runs" / "out")
    with studio(tmp_path) as address:
        assert address.get("/api/runs/out")["resumable"], "the page offers it"
    assert main(["resume", "runs/out", "--epochs", "3"]) == 0
    assert [(row["epoch"], row["attempt"], row["step"]) for row in folder.epochs()] == [
        (1, 1, 4),
        (2, 2, 8),
        (3, 2, 12),
    ]
    capsys.readouterr()
    assert main(["evaluate", "runs/out", "--split", "val", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["split"], found["step"], found["metrics"]) == ("val", 4, {"val_loss": 1.0, "own_val": 1.0})
    assert Run("runs/out").evaluate(split="val", checkpoint=8) == found["metrics"]
    assert main(["export", "runs/out", "--out", "exported"]) == 0
    module = Breaking.load_from_checkpoint(tmp_path / "exported" / "module.ckpt")
    assert module.layer.weight.shape == (1, 2)
    # Elsewhere, whoever has not trained it has never named what its sections name.
    entries = [entry for entry in named.entries() if not entry.startswith("sha256:")]
    (tmp_path / "state" / "lockstep" / "known-tasks").write_text("\n".join(entries))
    assert main(["evaluate", "runs/out", "--split", "val"]) == 2
    assert "task.cli" in capsys.readouterr().err


class OwnCLI(LockstepCLI):
    """Has an argument that no other program knows."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--own", type=int, default=1)


def test_a_run_of_a_programs_own_cli_is_resumed_by_that_program(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(*arguments: str) -> int:
        return run(["fit", "-c", str(config), *arguments], model_class=Breaking, cli_class=OwnCLI)

    write_config(tmp_path, model={})
    assert fit("--run_dir", "out") == 0
    capsys.readouterr()
    assert main(["resume", "./out", "--epochs", "3"]) == 2
    error = capsys.readouterr().err
    assert "resume it there: PROGRAM fit" in error
    assert "usage:" not in error
    assert fit("--ckpt_path", "out", "--trainer.max_epochs", "3") == 0
    assert [row["epoch"] for row in RunDir.open(tmp_path / "out").epochs()] == [1, 2, 3]
