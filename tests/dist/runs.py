"""Whole runs for tests, by the library: one device in this process, several in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.config.load import merge
from lockstep.rundir.folder import RunDir
from tests.e2e.test_train import assert_close, losses

#: A learning rate that does not depend on how many steps are still to come: these runs are stopped by their steps.
_QUIET = {
    "scheduler": {"name": "constant", "warmup_steps": 0},
    "telemetry": {"progress": "silent", "tensorboard": "off", "record_samples": True, "system_metrics": False},
    "launch": {"hang_timeout_s": 300},
}


def train(task: str, folder: Path, devices: str, settings: dict[str, Any]) -> RunDir:
    """A run of ``task`` in ``folder``, as far as the settings say."""
    where = {"save_dir": str(folder), "hardware": {"selected_devices": devices}}
    result = lockstep.train(task, merge(_QUIET, merge(where, settings)))
    assert result.exit_code == 0, RunDir.open(folder).read().error
    return RunDir.open(folder)


def go_on(run: RunDir, devices: str, settings: dict[str, Any]) -> None:
    """The same run on other devices, or by another strategy."""
    resumed = lockstep.Run(run.path).resume(config=settings, devices=devices)
    assert resumed.exit_code == 0, run.read().error


def used(run: RunDir) -> dict[int, list[int]]:
    """The samples of each epoch that went into the weights, over all ranks and attempts, sorted."""
    found: dict[int, list[int]] = {}
    for file in run.path.glob("samples-rank*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found.setdefault(row["epoch"], []).extend(row["indices"])
    return {epoch: sorted(indices) for epoch, indices in found.items()}


def assert_equal_runs(ours: RunDir, theirs: RunDir) -> None:
    """Equal to rounding: losses, metrics, learning rates, weights, and what the test set says."""
    assert ours.read().status == theirs.read().status == "completed"
    for a, b in zip(losses(ours.path), losses(theirs.path), strict=True):
        for key in ("train_loss", "val_loss", "val_accuracy", "lr"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
    assert ours.read().final_metrics == pytest.approx(theirs.read().final_metrics, rel=1e-5)
    assert_close(ours.path, theirs.path)
