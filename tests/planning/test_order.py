"""Which order a run takes: decided from the data and the settings, and then held."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.sections import DataConfig
from lockstep.errors import ConfigError
from lockstep.planning.order import MIN_WINDOW_SAMPLES, MIN_WINDOWS, WINDOW, OrderPlan, order_notes, resolve_order

BUCKETED = OrderPlan(window=1024, block=128, lanes=8)


def resolve(*, samples=10_000, lengths=True, lanes=8, held=None, **settings):
    return resolve_order(DataConfig(**settings), samples=samples, lengths=lengths, lanes=lanes, held=held)


def test_lengths_turn_bucketing_on_and_their_absence_leaves_a_shuffle():
    order, decision = resolve()
    assert order == OrderPlan(window=2048, block=256, lanes=8)
    assert "the task gives the lengths" in decision.reason
    order, decision = resolve(lengths=False)
    assert order == OrderPlan()
    assert "no lengths" in decision.reason
    assert resolve(bucketing="off")[0] == OrderPlan()
    assert resolve(bucketing="on")[0].bucketed


def test_bucketing_without_lengths_is_refused():
    with pytest.raises(ConfigError, match="the task gives no lengths"):
        resolve(bucketing="on", lengths=False)


@given(samples=st.integers(1, 10**12))
def test_default_windows_are_whole_blocks_and_several_make_an_epoch_unless_it_is_short(samples):
    order, _ = resolve(samples=samples)
    assert order.window % order.block == 0
    assert MIN_WINDOW_SAMPLES <= order.window <= WINDOW
    assert MIN_WINDOWS * order.window <= samples or order.window == MIN_WINDOW_SAMPLES
    assert 2 * MIN_WINDOWS * order.window > samples or order.window == WINDOW


def test_given_sizes_are_taken_and_the_other_one_fits():
    assert (resolve(bucket_window=80)[0].window, resolve(bucket_window=80)[0].block) == (80, 10)
    assert (resolve(bucket_block=33)[0].window, resolve(bucket_block=33)[0].block) == (264, 33)
    assert resolve(bucket_window=90, bucket_block=30)[0] == OrderPlan(window=90, block=30, lanes=8)
    assert "as configured" in resolve(bucket_window=80)[1].reason
    with pytest.raises(ConfigError, match="windows of 100 samples cannot be cut into blocks of 30"):
        resolve(bucket_window=100, bucket_block=30)


@pytest.mark.parametrize("settings", [{}, {"bucketing": "on"}, {"bucket_window": 1024}, {"bucket_block": 128}])
def test_a_resume_holds_the_runs_order(settings):
    assert resolve(held=BUCKETED, samples=10**6, **settings)[0] == BUCKETED


@pytest.mark.parametrize("settings", [{}, {"bucketing": "off"}, {"bucket_window": 1024}])
def test_a_resume_holds_a_shuffle(settings):
    assert resolve(held=OrderPlan(), **settings)[0] == OrderPlan()


@pytest.mark.parametrize(
    ("held", "settings", "words"),
    [
        (BUCKETED, {"bucket_window": 2048}, ["windows of 1024 samples", "windows of 2048 samples"]),
        (BUCKETED, {"bucket_block": 64}, ["blocks of 128", "blocks of 64"]),
        (BUCKETED, {"bucketing": "off"}, ["windows of 1024 samples", "asked for is shuffled"]),
        (OrderPlan(), {"bucketing": "on"}, ["the run's order is shuffled", "windows of 2048 samples"]),
    ],
)
def test_a_resume_with_another_order_is_refused_naming_both(held, settings, words):
    with pytest.raises(ConfigError) as caught:
        resolve(held=held, **settings)
    assert all(word in caught.value.what for word in words)


def test_a_step_wider_than_a_block_and_sizes_without_effect_are_noted():
    assert not list(order_notes(DataConfig(), BUCKETED, 128))
    (note,) = order_notes(DataConfig(), BUCKETED, 129)
    assert note.key == "small_blocks" and "bucket_block of at least 129" in note.text
    assert not list(order_notes(DataConfig(), OrderPlan(), 4096))
    assert [note.key for note in order_notes(DataConfig(bucket_window=64), OrderPlan(), 1)] == ["settings_unused"]
