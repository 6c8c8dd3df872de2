from __future__ import annotations

import pytest

from lockstep import make_plan
from lockstep.config import load, resolve
from lockstep.recipes.speech.task import SpeechTask
from lockstep.tasks.registry import make_task
from tests.gloo import ROOT

FOLDER = ROOT / "configs/speech"


@pytest.mark.parametrize("name", ["base_config", "multi_gpu"])
def test_each_configuration_is_that_of_the_document(name: str) -> None:
    config = resolve(SpeechTask.defaults, load([FOLDER / f"{name}.yaml"]))
    task = make_task(SpeechTask, config.task.settings)
    assert sum(p.numel() for p in task.model().parameters()) == 7_156_253
    assert (config.scheduler.warmup_steps, config.scheduler.decay, config.scheduler.decay_steps) == (1000, 0.96, 10_000)
    assert config.training.max_grad_norm == 0.5


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_device_gets_the_documents_batch_and_the_rate_grows(speech_manifest: str, ranks: int) -> None:
    devices = ",".join(["cpu"] * ranks)
    settings = load(
        [FOLDER / "multi_gpu.yaml"],
        ["task.size=tiny", f"task.train_manifest={speech_manifest}", f"hardware.selected_devices={devices}"],
    )
    plan = make_plan("speech", settings)
    assert (plan.batch.global_batch, plan.batch.batch_size, plan.schedule.lr) == (16 * ranks, 16, 1e-3 * ranks)
    assert plan.placement["backend"] == "gloo"


def test_no_configuration_is_left_untested() -> None:
    assert sorted(file.stem for file in FOLDER.iterdir()) == ["base_config", "distributed", "multi_gpu"]
