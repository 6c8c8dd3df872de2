"""``reproducibility: exact``: equal bits on every world size that divides the lanes, kills and resumes included."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from lockstep.rundir.folder import RunDir
from tests.e2e.test_train import finish, start, train
from tests.gloo import ROOT

EXACT = (
    *("--reproducibility", "exact", "--set", "task.batchnorm=true", "--set", "task.dropout=0.3"),
    *("--global-batch-size", "48", "--max-grad-norm", "0.5", "--warmup-epochs", "1", "--set", "task.samples=203"),
)


def fingerprint(run: Path) -> str:
    return hashlib.sha256((run / "checkpoints" / "last" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(folder, "--devices", "cpu", *EXACT)
    return folder / "run"


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.drill), 4])
def test_weights_are_equal_bit_for_bit_on_any_world_size(alone: Path, tmp_path: Path, ranks: int) -> None:
    train(tmp_path, "--devices", ",".join(["cpu"] * ranks), *EXACT)
    assert fingerprint(tmp_path / "run") == fingerprint(alone)
    ours, theirs = (RunDir.open(run).epochs() for run in (tmp_path / "run", alone))
    for row, other in zip(ours, theirs, strict=True):
        assert (row["val_loss"], row["val_accuracy"]) == (other["val_loss"], other["val_accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "cpu,cpu,cpu"), r"\b3 ranks .*\b8 lanes"),
        (("--devices", "cpu", "--set", "training.compile=true"), "training.compile"),
        (("--devices", "cpu,cpu", "--set", "distributed.sync_batchnorm=on"), "sync_batchnorm"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    output = train(tmp_path, *arguments, "--reproducibility", "exact", code=2)
    assert re.search(words, output)
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("devices", ["cpu", pytest.param("cpu,cpu", marks=pytest.mark.drill)])
def test_an_operator_without_a_deterministic_kernel_is_refused_by_name(tmp_path: Path, devices: str) -> None:
    task = f"{ROOT / 'tests' / 'toys.py'}:Nondeterministic"
    flags = ("--save-dir", "run", "--devices", devices, "--reproducibility", "exact")
    output = finish(start("train", task, *flags, cwd=tmp_path), code=2)
    assert re.search(r"reproducibility: exact .*\bput_", output)
    assert RunDir.open(tmp_path / "run").read().status == "failed"
