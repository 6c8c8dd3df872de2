"""Learning rates count optimizer steps of the plan; the one that a plan shows is the one that runs."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import SchedulerConfig, resolve
from lockstep.planning import BatchPlan
from lockstep.planning.schedule import Course, resolve_course, resolve_schedule, scale_lr


def schedule(name="cosine", total=100, per_epoch=10, lr=1.0, **settings):
    config = SchedulerConfig(name=name, **{"warmup_epochs": 0, "min_lr": 0.0, **settings})
    return resolve_schedule(config, lr=lr, total_steps=total, steps_per_epoch=per_epoch)[0]


def test_the_first_step_runs_at_the_warmed_up_rate_not_at_zero():
    s = schedule(warmup_epochs=1)
    assert [s.at(i) for i in range(10)] == pytest.approx([(i + 1) / 10 for i in range(10)])


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_floor():
    s = schedule(min_lr=0.1)
    assert s.at(0) == pytest.approx(1.0)
    assert s.at(50) == pytest.approx(0.55)
    assert s.at(100) == pytest.approx(0.1)
    assert s.at(10_000) == pytest.approx(0.1)


def test_step_and_multistep_count_epochs():
    s = schedule("step", step_epochs=2, gamma=0.5)
    assert [s.at(i) for i in (0, 19, 20, 39, 40)] == pytest.approx([1, 1, 0.5, 0.5, 0.25])
    m = schedule("multistep", milestones=(3, 7), gamma=0.1)
    assert [m.at(i) for i in (29, 30, 69, 70)] == pytest.approx([1, 0.1, 0.1, 0.01])


def test_poly_exponential_and_constant():
    assert schedule("poly", power=2).at(50) == pytest.approx(0.25)
    assert schedule("exponential", decay=0.96, decay_steps=10).at(20) == pytest.approx(0.96**2)
    assert schedule("constant").at(99) == 1.0


@given(
    name=st.sampled_from(["cosine", "step", "multistep", "poly", "exponential", "constant", "wsd", "onecycle"]),
    total=st.integers(1, 500),
    per_epoch=st.integers(1, 50),
    warmup=st.integers(0, 600),
    step=st.integers(0, 1000),
)
def test_any_rate_is_finite_and_between_the_floor_and_the_peak(name, total, per_epoch, warmup, step):
    s = schedule(name, total, per_epoch, lr=0.5, warmup_steps=warmup, min_lr=1e-6, milestones=(1, 2))
    value = s.at(step)
    assert math.isfinite(value)
    assert 0 < value <= 0.5 + 1e-12


@pytest.mark.parametrize("name", ["cosine", "poly", "step", "exponential", "wsd"])
def test_a_floor_above_the_rate_raises_nothing(name):
    rates = [schedule(name, lr=1e-7, min_lr=1e-6).at(step) for step in (0, 50, 100)]
    assert rates == pytest.approx([1e-7] * 3)


def test_a_warm_up_longer_than_the_run_is_cut_and_says_so():
    config = SchedulerConfig(warmup_steps=50)
    s, (_, warmup) = resolve_schedule(config, lr=1.0, total_steps=10, steps_per_epoch=5)
    assert s.warmup_steps == warmup.value == 10
    assert "10 steps" in warmup.reason


def test_scaling_rules():
    assert scale_lr(1e-3, "linear", global_batch=128, base_batch=32)[0].value == pytest.approx(4e-3)
    assert scale_lr(1e-3, "sqrt", global_batch=128, base_batch=32)[0].value == pytest.approx(2e-3)


def test_the_rate_never_changes_silently():
    decision, (note,) = scale_lr(1e-3, "none", global_batch=128, base_batch=32)
    assert decision.value == 1e-3
    assert note.key == "lr_not_scaled" and "0.004" in note.text
    assert scale_lr(1e-3, "none", global_batch=32, base_batch=32)[1] == []


def test_one_cycle_is_that_of_torch():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=100, final_div_factor=40.0)
    s = schedule("one-cycle", warmup_epochs=None, min_lr=1e-3)
    for step in range(100):
        assert s.at(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < 99:
            reference.step()


def test_wsd_is_constant_and_then_falls_to_the_floor():
    s = schedule("wsd", warmup_steps=10, decay_share=0.4, min_lr=0.2)
    assert [s.at(step) for step in (4, 9, 10, 60, 80, 100)] == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.6, 0.2])


BATCH = BatchPlan(samples=640, global_batch=64, batch_size=32, accumulate=1, ranks=2)


def course(task_lr: float | None, **optimizer: Any) -> Course:
    return resolve_course(resolve({"optimizer": optimizer}), BATCH, task_lr=task_lr)


def rate(course: Course) -> tuple[object, str]:
    (decision,) = [decision for decision in course.decisions if decision.key == "lr"]
    return decision.value, decision.reason


def test_the_rate_of_a_tasks_own_optimizer_is_shown_and_scaled() -> None:
    assert rate(course(0.1, lr=0.5)) == (0.1, "the task's optimizer (its first parameter group)")
    value, reason = rate(course(0.1, lr=0.5, lr_scaling="linear"))
    assert (value, "the task's optimizer" in reason) == (0.2, True)
    assert "0.1 × 64/32 (linear" in reason


@pytest.mark.parametrize("task_lr", [None, 0.5])
@pytest.mark.parametrize("scaling", ["none", "linear", "sqrt"])
def test_a_schedule_knows_the_rate_before_scaling(task_lr: float | None, scaling: str) -> None:
    schedule = course(task_lr, lr=0.5, lr_scaling=scaling).schedule
    assert schedule.base_lr == pytest.approx(0.5)
    assert schedule.lr == pytest.approx({"none": 0.5, "linear": 1.0, "sqrt": 0.5 * 2**0.5}[scaling])


def test_a_run_that_ends_within_its_warm_up_says_so() -> None:
    def notes(**changes: Any) -> list[str]:
        found = resolve_course(resolve(changes), BATCH).notes
        return [note.text for note in found if note.key == "warmup_unfinished"]

    assert "all 20 steps" in notes(training={"epochs": 2}, scheduler={"warmup_epochs": 2})[0]
    assert notes(training={"max_steps": 5}, scheduler={"warmup_steps": 9})
    assert notes(training={"epochs": 3}, scheduler={"warmup_epochs": 2}) == []
    assert notes(training={"epochs": 1}, scheduler={"warmup_epochs": 0}) == []
    assert notes(training={"epochs": 1}, scheduler={"warmup_epochs": 2}, debug={"fast_dev_run": True}) == []


def test_the_default_warm_up_takes_at_most_a_tenth_of_the_run() -> None:
    def warmup(**changes: Any) -> int:
        return resolve_course(resolve(changes), BATCH).schedule.warmup_steps

    steps = BATCH.steps_per_epoch
    assert warmup(training={"epochs": 40}) == 2 * steps
    assert warmup(training={"epochs": 2}) == 2 * steps // 10
    assert warmup(training={"max_steps": 5}) == 0
    assert warmup(training={"epochs": 2}, scheduler={"warmup_epochs": 1}) == steps
