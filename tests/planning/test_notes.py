"""Settings of a strategy that is not taken are called so, and a pipeline tells how long its devices wait."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from lockstep.config import resolve
from lockstep.hardware.resolve import Placement
from lockstep.planning import TaskFacts
from lockstep.planning.batch import BatchPlan
from lockstep.planning.notes import optimizer_notes, strategy_notes

PLACEMENT = Placement("cpu", ("cpu", "cpu"), "ddp", "gloo", 2, 1, "32", {})


def notes(strategy: Any, settings: dict[str, Any], accumulate: int = 1) -> str:
    config = resolve(settings)
    batch = BatchPlan(samples=100, global_batch=8, batch_size=4, accumulate=accumulate, ranks=2)
    return " ".join(map(str, strategy_notes(config, replace(PLACEMENT, strategy=strategy), batch)))


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "fsdp"])
def test_settings_at_their_default_are_not_spoken_of(strategy: str) -> None:
    assert notes(strategy, {}) == ""


@pytest.mark.parametrize(
    ("strategy", "settings", "words"),
    [
        ("ddp", {"fsdp": {"cpu_offload": True}}, "fsdp.cpu_offload "),
        ("fsdp", {"distributed": {"bucket_cap_mb": 50}}, "distributed.bucket_cap_mb "),
        ("dp", {"training": {"compile": True}}, "training.compile "),
        ("single", {"pipeline": {"schedule": "gpipe"}}, "pipeline.schedule "),
        (
            "ddp",
            {"distributed": {"bucket_cap_mb": 50}, "training": {"reproducibility": "exact"}},
            "exact",
        ),
    ],
)
def test_a_setting_without_effect_is_named(strategy: str, settings: dict[str, Any], words: str) -> None:
    assert words in notes(strategy, settings)


def test_a_pipeline_tells_how_long_its_devices_wait() -> None:
    assert re.search(r"\b1 micro-batch .*\b2 devices .*\b50%", notes("pipeline", {}))
    assert re.search(r"\b3 micro-batches .*\b2 devices .*\b25%", notes("pipeline", {}, 3))
    assert notes("pipeline", {}, 8) == ""


def test_settings_beside_a_tasks_own_optimizer_are_named() -> None:
    config = resolve({"optimizer": {"lr": 0.5, "weight_decay": 0.1, "lr_scaling": "linear", "base_batch_size": 8}})
    own = TaskFacts(name="toy", train_samples=100, optimizer_lr=0.1)
    assert [note.text for note in optimizer_notes(config, own)] == [
        "optimizer.lr, optimizer.weight_decay has no effect: the task makes its optimizer."
    ]
    assert not list(optimizer_notes(resolve({}), own))
    assert not list(optimizer_notes(config, own.model_copy(update={"optimizer_lr": None})))


@pytest.mark.parametrize(
    ("changes", "unused"),
    [
        ({"optimizer": {"momentum": 0.5}}, ["optimizer.momentum"]),
        ({"optimizer": {"name": "sgd", "momentum": 0.5, "betas": [0.5, 0.9]}}, ["optimizer.betas"]),
        ({"optimizer": {"name": "torch.optim.RAdam", "eps": 1e-6}}, ["optimizer.eps"]),
        ({"scheduler": {"name": "step", "step_epochs": 3, "gamma": 0.5}}, []),
        ({"scheduler": {"step_epochs": 3, "gamma": 0.5}}, ["scheduler.step_epochs, scheduler.gamma"]),
        ({"averaging": {"decay": 0.9}}, ["averaging.decay"]),
        ({"averaging": {"name": "swa", "start_share": 0.5, "every_steps": 2}}, []),
    ],
)
def test_settings_that_the_chosen_kind_does_not_read_are_named(changes: dict[str, Any], unused: list[str]) -> None:
    notes = list(optimizer_notes(resolve(changes), TaskFacts(name="toy", train_samples=100)))
    assert [note.text.split(" has no effect")[0] for note in notes] == unused
    assert {note.key for note in notes} <= {"settings_unused"}
