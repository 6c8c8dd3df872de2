"""A process killed at any stage of a save leaves a run that can be resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint.store import CheckpointStore
from tests.checkpoint import make_wrecks
from tests.conftest import cli_environment

pytestmark = pytest.mark.slow

#: What a save goes through, and a retention after it; compared with the code below.
WRITE = ["begun", "half model.safetensors", "model written", "half trainer.pt", "trainer written", "manifest written"]
BESIDE = [*WRITE, "renamed", "last linked", "last set", "best linked", "best set", "removing"]
OVER = [*WRITE, "predecessor set aside", "renamed", "removing", "last linked", "last set"]
RANDOM_KILLS = 6


@pytest.fixture(scope="module")
def wrecks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """Folders left by killed processes, and the stages that a save went through."""
    root = tmp_path_factory.mktemp("wrecks")
    command = [sys.executable, make_wrecks.__file__, str(root), str(RANDOM_KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=cli_environment())
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout)


def test_every_stage_is_drilled(wrecks: tuple[Path, dict[str, list[str]]]) -> None:
    assert wrecks[1] == {"beside": BESIDE, "over": OVER}


@pytest.mark.parametrize("stage", BESIDE)
def test_a_save_beside_an_older_checkpoint(wrecks: tuple[Path, dict[str, list[str]]], stage: str) -> None:
    store = CheckpointStore(wrecks[0] / "beside" / stage.replace(" ", "-"))
    expected = 1 if BESIDE.index(stage) < BESIDE.index("renamed") else 2
    assert_resumable(store, {expected: float(expected)})


@pytest.mark.parametrize("stage", OVER)
def test_a_save_over_the_only_checkpoint(wrecks: tuple[Path, dict[str, list[str]]], stage: str) -> None:
    store = CheckpointStore(wrecks[0] / "over" / stage.replace(" ", "-"))
    assert_resumable(store, {1: 1.0 if OVER.index(stage) < OVER.index("renamed") else 2.0})


@pytest.mark.parametrize("number", range(RANDOM_KILLS))
def test_a_kill_at_a_random_moment(wrecks: tuple[Path, dict[str, list[str]]], number: int) -> None:
    store = CheckpointStore(wrecks[0] / "random" / str(number))
    assert_resumable(store, dict.fromkeys(store.steps()))


def assert_resumable(store: CheckpointStore, newest: dict[int, float | None]) -> None:
    """The newest checkpoint is whole before and after cleaning, nothing broken is in sight, saving goes on."""
    for clean in (False, True):
        if clean:
            store.clean_temporary()
            allowed = {"last", "best", *(f"step-{step:08d}" for step in store.steps())}
            assert {path.name for path in store.folder.iterdir()} <= allowed
        heard: list[str] = []
        step = store.newest_verified(heard.append)
        assert step == max(newest) and heard == []
        snapshot = store.load(step)
        value = snapshot.manifest["value"]
        assert newest[step] in (None, value) and snapshot.trainer["value"] == value
        assert torch.equal(snapshot.model["w"], torch.full((5000,), value))
        for pointer in ("last", "best"):
            pointed = store.step_of(pointer)
            assert pointed is None or store.verify(pointed).step == pointed
    store.save(make_wrecks.snapshot(step + 1, 9.0), best=True)
    assert store.newest_verified(pytest.fail) == store.step_of("last") == store.step_of("best") == step + 1
