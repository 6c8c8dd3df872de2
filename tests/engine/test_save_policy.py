"""When to save and what to keep, with a clock of our own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.save_policy import SavePolicy, retained


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_are_counted_from_the_start_of_the_run() -> None:
    policy = SavePolicy(10, None, Clock(), step=15)
    assert [step for step in range(16, 45) if policy.due(step) and not policy.saved(step)] == [20, 30, 40]


def test_a_save_for_another_reason_does_not_shift_the_rhythm() -> None:
    policy = SavePolicy(10, None, Clock())
    policy.saved(7)
    assert not policy.due(9) and policy.due(10)
    policy.saved(10)
    assert not policy.due(10) and policy.due(20)


def test_time_counts_from_the_last_save() -> None:
    clock = Clock()
    policy = SavePolicy(None, 60, clock)
    clock.now += 59
    assert not policy.due(1)
    clock.now += 1
    assert policy.due(2)
    policy.saved(2)
    assert not policy.due(3)
    clock.now += 1000
    assert not policy.due(2), "nothing new to save"


def test_neither_means_never() -> None:
    assert not any(SavePolicy(None, None, Clock()).due(step) for step in range(100))


@given(st.integers(1, 20), st.lists(st.integers(1, 7), max_size=40), st.sets(st.integers(0, 200), max_size=10))
def test_no_more_than_the_asked_steps_are_ever_at_risk(every: int, strides: list[int], others: set[int]) -> None:
    policy = SavePolicy(every, None, Clock())
    step = saved = 0
    for stride in strides:
        step += stride
        if policy.due(step) or step in others:
            policy.saved(step)
            saved = step
        assert step - saved < every, "and a step that is passed over is made up for"


@given(st.lists(st.integers(0, 1000)), st.integers(1, 5), st.none() | st.integers(0, 1000))
def test_retention_keeps_the_newest_and_the_best_and_nothing_else(
    steps: list[int], keep_last: int, best: int | None
) -> None:
    kept = retained(steps, keep_last, best)
    there = set(steps)
    assert kept <= there and len(kept) <= keep_last + 1
    assert len(kept) >= min(keep_last, len(there))
    assert best not in there or best in kept
    dropped = there - kept
    assert all(sum(other > step for other in kept) >= keep_last for step in dropped)
    assert retained(kept, keep_last, best) == kept, "asking twice changes nothing"
