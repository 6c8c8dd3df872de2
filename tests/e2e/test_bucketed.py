"""The length-bucketed order in real runs: equal work for ranks, and the same run on any number of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.errors import ConfigError
from lockstep.planning import OrderPlan
from lockstep.rundir.folder import RunDir
from tests.e2e.test_exact import fingerprint
from tests.gloo import ROOT
from tests.sequences import Recordings

TASK = f"{ROOT / 'tests' / 'sequences.py'}:Sequences"
#: A schedule that does not know how many steps there will be.
SETTINGS: dict[str, Any] = {
    "scheduler": {"name": "constant", "warmup_epochs": 0},
    "data": {"num_workers": 0},
    "telemetry": {"tensorboard": "off", "progress": "off", "record_samples": True},
}
EXACT = {"training": {"reproducibility": "exact", "epochs": 1}, "task": {"dropout": 0.3}}
SAMPLES, STEPS = 150, 14


def train(folder: Path, ranks: int, settings: Mapping[str, Any] | None = None) -> RunDir:
    """A run on so many ranks: one of them in this process, which is quick, several as a user starts them."""
    hardware = {"selected_devices": ["cpu"] * ranks}
    config = {**SETTINGS, **(settings or {}), "save_dir": str(folder / "run"), "hardware": hardware}
    assert lockstep.train(TASK, config).exit_code == 0
    return RunDir.open(folder / "run")


def losses(run: RunDir) -> list[float]:
    return [row[name] for row in run.epochs() for name in ("train_loss", "val_loss", "val_accuracy")]


def recorded(run: RunDir) -> dict[tuple[int, int], list[int]]:
    """The samples of every step on every rank, over all attempts: ``{(step, rank): indices}``."""
    rows = {}
    for file in run.path.glob("samples-rank*.jsonl"):
        rank = int(file.stem.removeprefix("samples-rank"))
        for row in map(json.loads, file.read_text().splitlines()):
            assert (row["step"], rank) not in rows
            rows[row["step"], rank] = row["indices"]
    return rows


def used(run: RunDir) -> dict[int, list[int]]:
    """The samples of every step, sorted."""
    steps: dict[int, list[int]] = {}
    for (step, _), indices in recorded(run).items():
        steps[step] = sorted(steps.get(step, []) + indices)
    return steps


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(tmp_path_factory.mktemp("alone"), 1)


def test_the_plan_says_how_samples_are_ordered(alone: RunDir) -> None:
    plan = alone.plan()
    assert plan["order"] == OrderPlan(window=512, block=64, lanes=8).model_dump()
    assert plan["decisions"]["order"]["value"] == "bucketed"
    manifest = json.loads((alone.checkpoints / "last" / "manifest.json").read_text())
    assert manifest["order"] == plan["order"]


def test_every_epoch_has_each_sample_once_and_a_step_has_samples_of_like_length(alone: RunDir) -> None:
    steps, lengths = used(alone), Recordings(SAMPLES, 1).lengths
    assert len(steps) == STEPS
    epochs = [[i for step in range(first, first + 7) for i in steps[step]] for first in (1, 8)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(SAMPLES))
    spread = np.mean([np.ptp(lengths[indices]) for indices in steps.values()])
    assert spread < 0.4 * np.mean([np.ptp(lengths[i : i + 24]) for i in range(0, SAMPLES, 24)])


@pytest.mark.slow
def test_three_ranks_and_then_two_compute_what_one_computes(alone: RunDir, tmp_path: Path) -> None:
    """Stopped in mid-epoch: the rest sees exactly the samples that are left, in windows and blocks of the run."""
    run = train(tmp_path, 3, {"training": {"max_steps": 3}})
    assert sorted(used(run)) == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"\b512 samples .*\b128 samples") as refused:
        lockstep.Run(run.path).resume(data={"bucket_window": 128})
    assert refused.value.exit_code == 2
    lockstep.Run(run.path).resume(devices="cpu,cpu", training={"max_steps": None})
    assert run.read().status == "completed"
    rows = recorded(run)
    for step in range(1, STEPS + 1):
        shares = [len(rows[step, rank]) for rank in range(3 if step <= 3 else 2)]
        assert sum(shares) == len(used(alone)[step]) and max(shares) - min(shares) <= 1
    assert used(run) == used(alone)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-6)


@pytest.mark.drill
def test_exact_mode_gives_equal_bits_on_one_two_and_four_ranks(tmp_path: Path) -> None:
    runs = [train(tmp_path / str(ranks), ranks, EXACT) for ranks in (1, 2, 4)]
    assert len({fingerprint(run.path) for run in runs}) == 1
    assert losses(runs[0]) == losses(runs[1]) == losses(runs[2])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bucketing": "on"}, "lengths"),
        ({"bucket_window": 100, "bucket_block": 32}, "cannot be cut into blocks"),
    ],
)
def test_an_order_that_cannot_be_is_refused_before_anything_starts(settings: dict[str, Any], words: str) -> None:
    task = {"give_lengths": "bucket_block" in settings}
    with pytest.raises(ConfigError, match=words):
        lockstep.make_plan(TASK, {"task": task, "data": settings})
