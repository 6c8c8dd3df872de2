"""Speed over any number of windows, with a clock of our own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.telemetry.throughput import Throughput


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_samples_per_second_and_waiting_share_of_a_window() -> None:
    clock = Clock()
    speed = Throughput(clock)
    mark = speed.mark()
    for _ in range(4):
        clock.now += 0.5
        speed.add(32, waited_s=0.1)
    assert speed.since(mark) == pytest.approx((64.0, 0.2, 2.0))


def test_windows_are_independent_of_each_other() -> None:
    clock = Clock()
    speed = Throughput(clock)
    epoch = speed.mark()
    clock.now += 1
    speed.add(10)
    interval = speed.mark()
    clock.now += 1
    speed.add(30)
    assert speed.since(interval).samples_per_s == pytest.approx(30)
    assert speed.since(epoch).samples_per_s == pytest.approx(20)


def test_a_pause_is_left_out() -> None:
    clock = Clock()
    speed = Throughput(clock)
    mark = speed.mark()
    clock.now += 1
    speed.add(8)
    with speed.paused():
        clock.now += 60
    assert speed.since(mark) == pytest.approx((8.0, 0.0, 1.0))


def test_no_time_is_no_speed() -> None:
    speed = Throughput(Clock())
    mark = speed.mark()
    speed.add(5)
    assert speed.since(mark) == (0.0, 0.0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0.001, 10), st.floats(0, 20)), min_size=1, max_size=20))
def test_the_share_is_a_share_for_any_steps(steps: list[tuple[int, float, float]]) -> None:
    clock = Clock()
    speed = Throughput(clock)
    mark = speed.mark()
    for samples, seconds, waited in steps:
        clock.now += seconds
        speed.add(samples, waited)
    result = speed.since(mark)
    assert 0 <= result.data_wait_share <= 1
    assert result.samples_per_s * result.seconds == pytest.approx(sum(samples for samples, _, _ in steps))
