"""Lightning's checkpoints from elsewhere, named with ``--ckpt_path``: one clear error, and none runs anything."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuzz import mutators as m
from tests.fuzz.test_hostile import SIZES, check, command
from tests.lightning.test_cli import CONFIG, write_config
from tests.lightning.trainings import Probe, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

TRAINER = {**CONFIG["trainer"], "logger": False, "limit_val_batches": 1}


def other_type(path: Path, rng: random.Random, canary: str) -> str:
    """One of its parts is gone, or something else than Lightning writes there."""
    state = torch.load(path, weights_only=True)
    key = rng.choice(["state_dict", "optimizer_states", "lr_schedulers", "pytorch-lightning_version", "loops"])
    value: Any = rng.choice([None, [], {"a": 1}, "text", 1.5, [1]])
    if rng.random() < 0.3:
        del state[key]
    else:
        state[key] = value
    torch.save(rng.choice([state, state, state, [state], value]), path)
    return f"{key}: {value!r}"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, and a checkpoint of one epoch that holds tensors and numbers only."""
    folder = tmp_path_factory.mktemp("lightning")
    trainer = make_trainer(folder, [], max_epochs=1)
    trainer.fit(Probe())
    trainer.save_checkpoint(folder / "good.ckpt")
    write_config(folder, trainer=TRAINER)
    return folder


@pytest.fixture
def here(healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = shutil.copytree(healthy, tmp_path / "here")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


def load(what: str, path: Path) -> tuple[int, str, str]:
    return command("lightning", what, "-c", "cli_config.yaml", "--ckpt_path", path)


@pytest.mark.slow
def test_a_checkpoint_that_holds_values_only_is_used(here: Path) -> None:
    code, _, error = load("fit", here / "good.ckpt")
    assert code == 0, error


def test_the_error_says_what_to_do(here: Path) -> None:
    bad, canary = here / "bad.ckpt", here / "canary"
    torch.save({"state_dict": m.Payload(__import__("os").system, m.command(str(canary)))}, bad)
    code, _, error = load("fit", bad)
    assert code == 2
    assert f"error: cannot load {bad}" in error
    assert "--weights_only false: it may then run code" in error
    assert not canary.exists()
    assert not (here / "runs").exists()


def test_a_checkpoint_does_not_name_classes(here: Path) -> None:
    (here / "evil.py").write_text("from pathlib import Path\nPath('canary').touch()\n")
    state = torch.load(here / "good.ckpt", weights_only=True)
    for hyperparameters in ({"_class_path": "evil.Model"}, {"encoder": [{"class_path": "evil.Model"}]}):
        torch.save({**state, "hyper_parameters": hyperparameters}, here / "bad.ckpt")
        code, _, error = load("fit", here / "bad.ckpt")
        assert code == 2
        assert "names a class that the configuration does not name: evil.Model" in error
        assert not (here / "canary").exists()


@pytest.mark.parametrize("numbers", [range(8), pytest.param(range(1000, 1120), marks=pytest.mark.drill)], ids=SIZES)
def test_a_spoilt_checkpoint(numbers: range, here: Path) -> None:
    for number in numbers:
        rng, bad, canary = random.Random(f"lightning {number}"), here / "bad.ckpt", here / "canary"
        shutil.copy(here / "good.ckpt", bad)
        mutate = rng.choice((m.pickled_code, other_type, other_type, *m.BYTES))
        how = f"{mutate.__name__}: {mutate(bad, rng, str(canary))}"
        try:
            code, out, error = load(("fit", "validate")[number % 2], bad)
            check(code, out, error)
            assert code in (0, 2), error
            assert not canary.exists(), "it ran code of the file's"
        except BaseException as problem:
            problem.add_note(f"case {number}: {how}")
            raise
        finally:
            shutil.rmtree(bad) if bad.is_dir() and not bad.is_symlink() else bad.unlink(missing_ok=True)
            shutil.rmtree(here / "runs", ignore_errors=True)
            (here / "config.yaml").unlink(missing_ok=True)  # a run that has begun leaves it, and refuses to replace it
