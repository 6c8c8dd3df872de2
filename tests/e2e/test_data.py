"""What a task draws in opening its data and in its samples is the same on any ranks and in every attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep import Run
from lockstep.errors import CheckpointError
from lockstep.launch.api import resume
from lockstep.launch.finished.evaluation import evaluate
from lockstep.rundir.folder import RunDir
from tests.drawing import Drawing, Noisy, Unseeded
from tests.e2e.test_exact import fingerprint
from tests.e2e.test_train import assert_close


def settings(folder: Path, *devices: str, **training: Any) -> dict[str, Any]:
    return {
        "hardware": {"selected_devices": list(devices)},
        "save_dir": str(folder),
        "training": {"epochs": 3, "batch_size": 8, "global_batch_size": 8, "threads": 1, **training},
        "scheduler": {"name": "constant", "warmup_epochs": 0},
        "telemetry": {"progress": "silent"},
    }


def test_draws_without_a_generator_are_those_of_one_device_on_two_and_after_a_resume(tmp_path: Path) -> None:
    """Splits, augmentation, mixing in ``collate``, and the weights that training starts from."""
    exact = {"reproducibility": "exact"}
    alone = lockstep.train(Drawing, settings(tmp_path / "alone", "cpu", **exact))
    assert lockstep.train(Drawing, settings(tmp_path / "run", "cpu", max_steps=13, **exact)).step == 13
    run = RunDir.open(tmp_path / "run")
    together = resume(run, devices="cpu,cpu", overrides={"training": {"max_steps": None}})
    assert together.step == alone.step == 27
    assert fingerprint(run.path) == fingerprint(tmp_path / "alone")
    assert together.metrics == alone.metrics
    found = evaluate(run, split="test")["metrics"]
    assert found["test_accuracy"] == alone.metrics["test_accuracy"]


def test_noise_does_not_stop_a_resume_and_other_data_do_until_they_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settings(tmp_path / "run", "cpu", max_steps=3)
    lockstep.train(Noisy, made)

    def longer(steps: int, **how: Any) -> Run:
        return lockstep.train(Noisy, settings(tmp_path / "run", "cpu", max_steps=steps), resume=True, **how)

    assert longer(4).step == 4, "what differs each time is left out of the comparison"
    monkeypatch.setattr(Unseeded, "scale", 0)
    with pytest.raises(CheckpointError, match="the training data is not what this run was trained on") as caught:
        longer(5)
    assert "--accept-data" in caught.value.fix
    assert longer(5, accept_data=True).step == 5
    notes = RunDir.open(tmp_path / "run").plan()["notes"]
    assert any(note["key"] == "other_data" for note in notes)
    assert longer(6).step == 6, "from here on, these are the run's data"


def test_in_fast_mode_and_with_workers_samples_draw_the_same(tmp_path: Path) -> None:
    mixing = {"task": {"mixes": False}}
    lockstep.train(Drawing, {**settings(tmp_path / "alone", "cpu"), **mixing})
    workers = {"data": {"num_workers": 2}}
    lockstep.train(Drawing, {**settings(tmp_path / "pair", "cpu", "cpu"), **mixing, **workers})
    assert_close(tmp_path / "alone", tmp_path / "pair")
