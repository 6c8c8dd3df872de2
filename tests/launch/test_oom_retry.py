"""Out of memory with ``training.on_oom: retry``: a smaller micro-batch, the same losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.errors import RankOutOfMemory
from lockstep.rundir.folder import RunDir
from tests.toys import Toy

pytestmark = pytest.mark.processes


class Large(Toy):
    """A training step of more than four samples on a rank does not fit."""

    since = 2

    def loss(self, model: Any, batch: Any) -> Any:
        if self.context.is_training and self.context.step >= self.since and len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(model, batch)


class Late(Large):
    since = 4


def settings(folder: Path, devices: str, **training: Any) -> dict[str, Any]:
    return {
        "save_dir": str(folder),
        "hardware": {"selected_devices": devices},
        "training": {"max_steps": 5, "threads": 1, "on_oom": "retry", **training},
        "checkpoint": {"every_steps": 1},
        "telemetry": {"progress": "off", "system_metrics": False, "log_interval": 1},
    }


def losses(run: lockstep.Run) -> list[float]:
    return list({row["step"]: row["loss"] for row in run.steps}.values())


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "size", "tries"), [("cpu", 64, 4), ("cpu,cpu", 8, 1)])
def test_the_micro_batch_is_halved_until_it_fits(tmp_path: Path, devices: str, size: int, tries: int) -> None:
    run = lockstep.train(Large, settings(tmp_path / "run", devices, batch_size=size))
    assert run.status == "completed" and run.step == 5
    assert run.config.training.batch_size == 4
    ranks = devices.count("cpu")
    assert run.plan.batch.global_batch == size * ranks
    assert [note.key for note in run.plan.notes].count("out_of_memory") == 1
    small = settings(tmp_path / "small", "cpu", batch_size=4, global_batch_size=size * ranks)
    assert losses(run) == pytest.approx(losses(lockstep.train(Large, small)), abs=1e-6)
    plans = [json.loads(file.read_text()) for file in sorted(run.run_dir.glob("attempts/*/plan.json"))]
    assert sum(note["key"] == "out_of_memory" for plan in plans for note in plan["notes"]) == tries


@pytest.mark.slow
def test_what_is_too_large_at_one_sample_or_not_to_be_retried_fails(tmp_path: Path) -> None:
    with pytest.raises(RankOutOfMemory):
        lockstep.train(Large, settings(tmp_path / "fail", "cpu", batch_size=8, on_oom="fail"))
    with pytest.raises(RankOutOfMemory):
        lockstep.train(Large, settings(tmp_path / "far", "cpu", batch_size=200, epochs=9))
    with pytest.raises(RankOutOfMemory):
        lockstep.train(Late, settings(tmp_path / "late", "cpu", batch_size=8, on_oom="start"))
    run = lockstep.train(Large, settings(tmp_path / "start", "cpu", batch_size=8, on_oom="start"))
    assert run.status == "completed"


@pytest.mark.slow
def test_the_micro_batch_is_halved_before_a_restart_is_used(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", "cpu,cpu", batch_size=8) | {"launch": {"max_restarts": 2}}
    run = lockstep.train(Large, config)
    assert (run.status, run.config.training.batch_size) == ("completed", 4)
    assert [folder.name for folder in sorted((run.run_dir / "attempts").iterdir())] == ["1", "2"]
    assert RunDir(run.run_dir).read().restarts == []
