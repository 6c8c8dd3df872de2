from __future__ import annotations

import pytest

from lockstep.config import load, resolve
from lockstep.tasks.har import HarTask
from lockstep.tasks.registry import make_task
from tests.gloo import ROOT

FOLDER = ROOT / "configs/har"


@pytest.mark.parametrize(
    ("name", "gpus", "global_batch", "lr", "warmup"),
    [("one", 1, 32, 1e-3, 2), ("two", 2, 64, 2e-3, 2), ("four", 4, 128, 4e-3, 3), ("eight", 8, 128, 8e-3, 5)],
)
def test_each_configuration_is_valid_and_holds_the_recommended_values(
    name: str, gpus: int, global_batch: int, lr: float, warmup: float
) -> None:
    config = resolve(HarTask.defaults, load([FOLDER / f"{name}_gpu.yaml"]))
    make_task(HarTask, config.task.settings)
    assert config.hardware.selected_devices == tuple(f"gpu:{index}" for index in range(gpus))
    assert config.training.batch_size * gpus == global_batch
    assert (config.optimizer.lr, config.scheduler.warmup_epochs) == (lr, warmup)
    assert global_batch == (config.optimizer.base_batch_size or config.training.batch_size)
    assert (config.training.epochs, config.training.early_stopping_patience) == (20, 7)


def test_no_configuration_is_left_untested() -> None:
    assert sorted(file.stem for file in FOLDER.iterdir()) == ["base", "eight_gpu", "four_gpu", "one_gpu", "two_gpu"]
