"""Settings of a strategy that is not taken are called so, and a pipeline tells how long its devices wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.config import resolve
from lockstep.hardware.resolve import Placement
from lockstep.plan.batch import BatchPlan
from lockstep.plan.remarks import strategy_notes

PLACEMENT = Placement("cpu", ("cpu", "cpu"), "ddp", "gloo", 2, 1, "32", {})


def notes(strategy: Any, settings: dict[str, Any], accumulate: int = 1) -> str:
    config = resolve(settings)
    batch = BatchPlan(samples=100, global_batch=8, batch_size=4, accumulate=accumulate, ranks=2)
    return " ".join(strategy_notes(config, replace(PLACEMENT, strategy=strategy), batch))


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "fsdp"])
def test_settings_at_their_default_are_not_spoken_of(strategy: str) -> None:
    assert notes(strategy, {}) == ""


@pytest.mark.parametrize(
    ("strategy", "settings", "words"),
    [
        ("ddp", {"fsdp": {"cpu_offload": True}}, "fsdp.cpu_offload has no effect: the strategy is ddp, not fsdp."),
        ("fsdp", {"distributed": {"bucket_cap_mb": 50}}, "distributed.bucket_cap_mb has no effect"),
        ("single", {"pipeline": {"in_process": True, "schedule": "gpipe"}}, "pipeline.schedule, pipeline.in_process"),
        (
            "ddp",
            {"distributed": {"bucket_cap_mb": 50}, "training": {"reproducibility": "exact"}},
            "exact mode sums gradients",
        ),
    ],
)
def test_a_setting_without_effect_is_named(strategy: str, settings: dict[str, Any], words: str) -> None:
    assert words in notes(strategy, settings)


def test_a_pipeline_tells_how_long_its_devices_wait() -> None:
    assert "With 1 micro-batch a step, the 2 devices of a pipeline wait 50% of the time" in notes("pipeline", {})
    assert "3 micro-batches a step, the 2 devices of a pipeline wait 25%" in notes("pipeline", {}, 3)
    assert notes("pipeline", {}, 8) == ""
    assert "take turns" in notes("pipeline", {"pipeline": {"in_process": True}})
