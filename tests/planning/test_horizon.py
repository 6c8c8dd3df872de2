"""The learning rate that a plan shows is the one that runs, also where a task makes its own optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config import resolve
from lockstep.planning import BatchPlan, TaskFacts
from lockstep.planning.horizon import Course, resolve_course

BATCH = BatchPlan(samples=640, global_batch=64, batch_size=32, accumulate=1, ranks=2)


def course(own_lr: float | None, **optimizer: Any) -> Course:
    return resolve_course(
        resolve({"optimizer": optimizer}), BATCH, None, TaskFacts(name="toy", train_samples=1, optimizer_lr=own_lr)
    )


def rate(course: Course) -> tuple[object, str]:
    (decision,) = [decision for decision in course.decisions if decision.key == "lr"]
    return decision.value, decision.reason


def test_the_rate_of_a_tasks_own_optimizer_is_shown_and_scaled() -> None:
    assert rate(course(0.1, lr=0.5)) == (0.1, "the task's own optimizer (its first parameter group)")
    value, reason = rate(course(0.1, lr=0.5, lr_scaling="linear"))
    assert (value, "the task's own optimizer" in reason) == (0.2, True)
    assert "0.1 × 64/32 (linear scaling)" in reason


@pytest.mark.parametrize("own_lr", [None, 0.5])
@pytest.mark.parametrize("scaling", ["none", "linear", "sqrt"])
def test_a_schedule_knows_the_rate_before_scaling(own_lr: float | None, scaling: str) -> None:
    schedule = course(own_lr, lr=0.5, lr_scaling=scaling).schedule
    assert schedule.base_lr == pytest.approx(0.5)
    assert schedule.lr == pytest.approx({"none": 0.5, "linear": 1.0, "sqrt": 0.5 * 2**0.5}[scaling])


def test_a_run_that_ends_within_its_warm_up_says_so() -> None:
    def notes(**changes: Any) -> list[str]:
        found = resolve_course(resolve(changes), BATCH, None, TaskFacts(name="toy", train_samples=1)).notes
        return [note.text for note in found if note.key == "warmup_unfinished"]

    assert "all 20 steps" in notes(training={"epochs": 2}, scheduler={"warmup_epochs": 2})[0]
    assert notes(training={"max_steps": 5}, scheduler={"warmup_steps": 9})
    assert notes(training={"epochs": 3}, scheduler={"warmup_epochs": 2}) == []
    assert notes(training={"epochs": 1}, scheduler={"warmup_epochs": 0}) == []
    assert notes(training={"epochs": 1}, scheduler={"warmup_epochs": 2}, debug={"fast_dev_run": True}) == []


def test_the_default_warm_up_takes_at_most_a_tenth_of_the_run() -> None:
    def warmup(**changes: Any) -> int:
        return resolve_course(
            resolve(changes), BATCH, None, TaskFacts(name="toy", train_samples=1)
        ).schedule.warmup_steps

    steps = BATCH.steps_per_epoch
    assert warmup(training={"epochs": 40}) == 2 * steps
    assert warmup(training={"epochs": 2}) == 2 * steps // 10
    assert warmup(training={"max_steps": 5}) == 0
    assert warmup(training={"epochs": 2}, scheduler={"warmup_epochs": 1}) == steps
