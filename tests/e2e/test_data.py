"""What a task draws in opening its data and in its samples is the same on any ranks and in every attempt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.utils.data import Subset

import lockstep
from lockstep import ArrayDataset, Datasets, Run
from lockstep.errors import CheckpointError, DataError
from lockstep.rundir.folder import RunDir
from tests.drawing import Drawing, Noisy, Unseeded
from tests.e2e.test_exact import fingerprint
from tests.e2e.test_train import assert_close
from tests.toys import SampleBySample, Toy, arrays


def settings(folder: Path, *devices: str, **training: Any) -> dict[str, Any]:
    return {
        "hardware": {"selected_devices": list(devices)},
        "save_dir": str(folder),
        "training": {"epochs": 3, "batch_size": 8, "global_batch_size": 8, "threads": 1, **training},
        "scheduler": {"name": "constant", "warmup_epochs": 0},
        "telemetry": {"progress": "silent"},
    }


@pytest.mark.slow
def test_draws_without_a_generator_are_those_of_one_device_on_two_and_after_a_resume(tmp_path: Path) -> None:
    """Splits, augmentation, mixing in ``collate``, and the weights that training starts from."""
    exact = {"reproducibility": "exact"}
    alone = lockstep.train(Drawing, settings(tmp_path / "alone", "cpu", **exact))
    assert lockstep.train(Drawing, settings(tmp_path / "run", "cpu", max_steps=13, **exact)).step == 13
    together = lockstep.Run(tmp_path / "run").resume(devices="cpu,cpu", training={"max_steps": None})
    assert together.step == alone.step == 27
    assert fingerprint(together.run_dir) == fingerprint(tmp_path / "alone")
    assert together.metrics == alone.metrics
    assert together.evaluate(split="test")["test_accuracy"] == alone.metrics["test_accuracy"]


def test_noise_does_not_stop_a_resume_and_other_data_do_until_they_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settings(tmp_path / "run", "cpu", max_steps=3)
    lockstep.train(Noisy, made)

    def longer(steps: int, **how: Any) -> Run:
        return lockstep.train(Noisy, settings(tmp_path / "run", "cpu", max_steps=steps), resume=True, **how)

    assert longer(4).step == 4, "what differs each time is left out of the comparison"
    monkeypatch.setattr(Unseeded, "scale", 0)
    with pytest.raises(CheckpointError) as caught:
        longer(5)
    assert "--accept-data" in caught.value.fix
    assert longer(5, accept_data=True).step == 5
    notes = RunDir.open(tmp_path / "run").plan()["notes"]
    assert any(note["key"] == "other_data" for note in notes)
    assert longer(6).step == 6, "from here on, these are the run's data"


@pytest.mark.slow
def test_in_fast_mode_and_with_workers_samples_draw_the_same(tmp_path: Path) -> None:
    mixing = {"task": {"mixes": False}}
    lockstep.train(Drawing, {**settings(tmp_path / "alone", "cpu"), **mixing})
    workers = {"data": {"num_workers": 2}}
    lockstep.train(Drawing, {**settings(tmp_path / "pair", "cpu", "cpu"), **mixing, **workers})
    assert_close(tmp_path / "alone", tmp_path / "pair")


class Uneven(Toy):
    """A ``split`` is ``shorter``, ``reordered`` or ``missing`` on rank 1; training samples are noisy."""

    def __init__(self, split: str = "", fault: str = "") -> None:
        super().__init__()
        self.split, self.fault = split, fault

    def datasets(self) -> Datasets:
        parts: dict[str, Any] = {
            "train": Noise(*arrays(64, 1)),
            "clean": ArrayDataset(*arrays(40, 2)),
            "noisy": ArrayDataset(*arrays(24, 3)),
            "test": ArrayDataset(*arrays(24, 4)),
        }
        if os.environ.get("RANK") == "1" and self.fault:
            part = parts[self.split]
            order = list(range(len(part)))[:: -1 if self.fault == "reordered" else 1]
            kept = Subset(part, order[:-1] if self.fault == "shorter" else order)
            parts[self.split] = None if self.fault == "missing" else kept
        val = {name: parts[name] for name in ("clean", "noisy")}
        return Datasets(train=parts["train"], val=val, test=parts["test"])


class Noise(SampleBySample):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = super().__getitem__(index)
        return inputs + 0.01 * float(np.random.default_rng().standard_normal()), label


@pytest.mark.parametrize(
    ("split", "fault", "name"),
    [
        ("train", "reordered", "train"),
        pytest.param("noisy", "reordered", "val noisy", marks=pytest.mark.slow),
        pytest.param("clean", "shorter", "val clean", marks=pytest.mark.slow),
        ("test", "missing", "test"),
    ],
)
def test_ranks_with_other_data_are_refused_before_the_first_step(
    split: str, fault: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"rank 1 .*\b{name}\b"):
        lockstep.train(Uneven(split, fault), settings(tmp_path / "run", "cpu", "cpu"))
    assert not RunDir.open(tmp_path / "run").steps()


def test_samples_that_vary_are_not_other_data(tmp_path: Path) -> None:
    run = lockstep.train(Uneven(), settings(tmp_path / "run", "cpu", "cpu", max_steps=2))
    assert run.step == 2
