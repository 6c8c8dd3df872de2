"""``build_trainer``: the table of supported configurations, as a real Trainer has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, DeviceError
from lockstep.lightning import build_trainer, get_available_gpus, resolve_hardware

# A machine with SLURM makes Lightning remark on every Trainer.
pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command")

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def test_the_cpu_is_one_process_and_precision_and_folder_are_as_asked(tmp_path: Path) -> None:
    config = {
        "hardware": {"selected_devices": ["cpu"], "precision": "bf16-mixed"},
        "trainer": QUIET,
        "training": {"epochs": 3, "max_grad_norm": 0.5, "batch_size": 8},
        "model": {"width": 4},
    }
    trainer = build_trainer(tmp_path, config)
    assert type(trainer.accelerator).__name__ == "CPUAccelerator"
    assert (trainer.num_devices, trainer.world_size, trainer.max_epochs) == (1, 1, 3)
    assert (trainer.precision, trainer.gradient_clip_val) == ("bf16-mixed", 0.5)
    assert Path(trainer.default_root_dir) == tmp_path


def test_the_default_is_the_first_gpu_else_the_cpu_in_single_precision(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, {"trainer": QUIET})
    expected = resolve_hardware(["gpu:0"] if get_available_gpus() else ["cpu"])
    assert trainer.num_devices == 1
    assert (type(trainer.accelerator).__name__ == "CUDAAccelerator") == (expected["accelerator"] == "gpu")
    assert trainer.precision == "32-true"


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"hardware": {"selected_devices": []}}, DeviceError, "no device"),
        ({"hardware": {"selected_devices": ["gpu:900"]}}, DeviceError, "gpu:900"),
        ({"hardware": {"selected_devices": ["cpu", "cpu"]}}, DeviceError, "twice"),
        ({"hardware": {"precision": "64"}}, ConfigError, "precision"),
        ({"hardware": {"device": "cpu"}}, ConfigError, "device"),
        ({"trainer": {"devices": 2}}, ConfigError, "trainer.devices"),
    ],
)
def test_what_is_refused(tmp_path: Path, config: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        build_trainer(tmp_path, config)
