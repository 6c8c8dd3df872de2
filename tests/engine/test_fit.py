"""What happens around the steps of a run, as its folder tells it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.launch.run import resume
from lockstep.telemetry.rundir import RunDir
from tests.toys import Toy

STEPS_PER_EPOCH = 13


def trained(folder: Path, log_interval: int = 50, **sections: Any) -> RunDir:
    """Two epochs of thirteen steps in this process."""
    lockstep.train(
        Toy,
        {
            "save_dir": str(folder),
            "hardware": {"selected_devices": "cpu"},
            "training": {"threads": 1},
            "telemetry": {"log_interval": log_interval, "tensorboard": "off", "progress": "off", "monitor": False},
            **sections,
        },
    )
    return RunDir.open(folder)


def interval_means(each: Sequence[dict[str, Any]], some: Sequence[dict[str, Any]]) -> list[float]:
    """Means over the items of the intervals that the rows ``some`` end, from ``each`` step's own row."""
    totals, items = [0.0], [0]
    for row in each:
        totals.append(totals[-1] + row["loss"] * (row["samples_seen"] - items[-1]))
        items.append(row["samples_seen"])
    ends = [0, *(row["step"] for row in some)]
    return [(totals[b] - totals[a]) / (items[b] - items[a]) for a, b in itertools.pairwise(ends)]


def test_the_loss_of_an_interval_takes_in_the_steps_before_an_epochs_end(tmp_path: Path) -> None:
    each, some = (trained(tmp_path / str(interval), interval).steps() for interval in (1, 5))
    assert [row["step"] for row in some] == [5, 10, 15, 20, 25, 26], "the third interval is in both epochs"
    assert [row["loss"] for row in some] == pytest.approx(interval_means(each, some), rel=1e-6)


def test_evaluations_between_epochs_are_kept_and_judged(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", validation={"every_steps": 5})
    found, epochs = run.evaluations(), run.epochs()
    assert [(row["epoch"], row["step"], row["attempt"]) for row in found] == [
        (1, 5, 1),
        (1, 10, 1),
        (2, 15, 1),
        (2, 20, 1),
        (2, 25, 1),
    ]
    assert {"val_loss", "val_accuracy"} <= found[0].keys()
    assert found[0]["improved"], "the first of all is the best so far"
    assert [row["step"] for row in epochs] == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    best = max([*found, *epochs], key=lambda row: row["val_accuracy"])
    assert run.read().best_metric["val_accuracy"] == best["val_accuracy"]


def test_a_resume_of_a_finished_run_leaves_it_finished(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    result = resume(run)
    progress = run.progress()
    assert progress is not None
    assert (result.step, progress.step, progress.total) == (26, 26, 26)
