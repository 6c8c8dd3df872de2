"""Windows and splits: every sample once, on any ranks, and the same steps on all of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.sections import DataConfig
from lockstep.errors import ConfigError, DataError
from lockstep.planning.batch import (
    MIN_WINDOW_SAMPLES,
    MIN_WINDOWS,
    WINDOW,
    BatchPlan,
    OrderPlan,
    order_notes,
    parts,
    resolve_batch,
    resolve_order,
)


def resolve(**changes):
    settings = {
        "samples": 1000,
        "ranks": 2,
        "devices_per_rank": 1,
        "batch_size": 32,
        "accumulate": 1,
        "global_batch_size": None,
        "tail": "spread",
        "lanes": None,
        "has_batchnorm": False,
        "sync_batchnorm": False,
    }
    return resolve_batch(**{**settings, **changes})[0]


def all_windows(plan: BatchPlan) -> list[tuple[int, int]]:
    found, position = [], 0
    while (span := plan.window(position)) is not None:
        found.append(span)
        position = span[1]
    return found


sizes = {
    "samples": st.integers(1, 300),
    "ranks": st.integers(1, 5),
    "batch_size": st.integers(1, 9),
    "accumulate": st.integers(1, 4),
}


@given(**sizes, tail=st.sampled_from(["spread", "merge"]), has_batchnorm=st.booleans())
def test_an_epoch_is_cut_into_windows_without_gap_or_overlap(
    samples, ranks, batch_size, accumulate, tail, has_batchnorm
):
    if has_batchnorm and (samples < 2 or ranks * batch_size * accumulate < 2):
        return
    plan = resolve(
        samples=samples,
        ranks=ranks,
        batch_size=batch_size,
        accumulate=accumulate,
        tail=tail,
        has_batchnorm=has_batchnorm,
    )
    windows = all_windows(plan)
    assert [start for start, _ in windows] == [0, *[stop for _, stop in windows][:-1]]
    assert windows[-1][1] == samples
    assert len(windows) == plan.steps_per_epoch
    if has_batchnorm:
        assert all(stop - start >= 2 for start, stop in windows)


@given(**sizes)
def test_dropping_leaves_full_steps_only(samples, ranks, batch_size, accumulate):
    if samples < ranks * batch_size * accumulate:
        with pytest.raises(ConfigError, match=rf"\bdrop\b.*\b{samples} samples"):
            resolve(samples=samples, ranks=ranks, batch_size=batch_size, accumulate=accumulate, tail="drop")
        return
    plan = resolve(samples=samples, ranks=ranks, batch_size=batch_size, accumulate=accumulate, tail="drop")
    assert {stop - start for start, stop in all_windows(plan)} == {plan.global_batch}
    assert len(all_windows(plan)) == plan.steps_per_epoch


@given(size=st.integers(1, 300), ranks=st.integers(1, 5), limit=st.integers(1, 9), least=st.sampled_from([1, 2]))
def test_every_item_of_a_window_goes_to_one_micro_batch_in_order(size, ranks, limit, least):
    if size < least:
        return
    plan = BatchPlan(samples=size, global_batch=size, batch_size=limit, accumulate=1, ranks=ranks, least_part=least)
    shares = plan.split(size)
    assert len(shares) == ranks
    items = [item for share in shares for start, stop in share for item in range(start, stop)]
    assert items == list(range(size))
    lengths = [stop - start for share in shares for start, stop in share]
    assert min(lengths) >= least
    # A micro-batch grows beyond the limit only where a part too small for BatchNorm joined its neighbour.
    assert max(lengths) <= max(limit, 2 * least - 1)


@given(size=st.integers(1, 300), ranks=st.integers(1, 8))
def test_no_rank_is_empty_while_there_are_enough_samples(size, ranks):
    plan = BatchPlan(samples=size, global_batch=size, batch_size=4, accumulate=1, ranks=ranks)
    held = [sum(stop - start for start, stop in share) for share in plan.split(size)]
    assert max(held) - min(held) <= 1


@given(size=st.integers(0, 500), count=st.sampled_from([1, 2, 4]), factor=st.sampled_from([1, 2, 4]))
def test_finer_parts_refine_coarser_ones(size, count, factor):
    """Lanes belong to the run: the ranks' boundaries are among the lanes' on any world size."""
    fine = {start for start, _ in parts(size, count * factor)} | {size}
    assert {start for start, _ in parts(size, count)} <= fine


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_lanes_are_the_same_on_every_world_size(ranks):
    plan = BatchPlan(samples=99, global_batch=50, batch_size=8, accumulate=1, ranks=ranks, lanes=8)
    for size in (50, 49, 5, 1):
        flat = [span for share in plan.split(size) for span in share]
        assert flat == list(parts(size, 8))


def test_item_j_of_n_goes_to_lane_floor_j_l_over_n():
    for size in range(1, 40):
        lane_of = {j: lane for lane, (a, b) in enumerate(parts(size, 8)) for j in range(a, b)}
        if size >= 8:
            assert lane_of == {j: j * 8 // size for j in range(size)}


@pytest.mark.parametrize(
    ("ranks", "batch_size", "accumulate"), [(1, 32, 4), (2, 32, 2), (3, 22, 2), (4, 32, 1), (8, 16, 1)]
)
def test_a_held_global_batch_gives_each_device_count_its_own_batch(ranks, batch_size, accumulate):
    plan = resolve(ranks=ranks, global_batch_size=128)
    assert (plan.global_batch, plan.batch_size, plan.accumulate) == (128, batch_size, accumulate)


def test_a_full_step_has_exactly_the_configured_micro_batches():
    plan = resolve(ranks=2, batch_size=8, accumulate=4)
    assert plan.split(64) == (((0, 8), (8, 16), (16, 24), (24, 32)), ((32, 40), (40, 48), (48, 56), (56, 64)))


def test_dp_puts_the_whole_devices_batch_through_one_rank():
    plan = resolve(ranks=1, devices_per_rank=4, batch_size=32)
    assert plan.global_batch == 128
    assert plan.split(128) == (((0, 128),),)


def test_one_left_over_sample_joins_its_neighbour_under_batchnorm():
    plan = resolve(samples=129, ranks=1, batch_size=64, has_batchnorm=True)
    assert all_windows(plan) == [(0, 64), (64, 129)]
    decisions = resolve_batch(
        samples=129, ranks=1, devices_per_rank=1, batch_size=64, accumulate=1, global_batch_size=None, tail="spread",
        lanes=None, has_batchnorm=True, sync_batchnorm=False,
    )[1]  # fmt: skip
    assert "BatchNorm" in decisions["tail"].reason


@pytest.mark.parametrize("samples", [0, 1])
def test_too_few_samples_for_batchnorm_are_refused(samples):
    with pytest.raises(DataError, match=f"{samples} sample"):
        resolve(samples=samples, has_batchnorm=True)


def test_a_global_batch_smaller_than_the_devices_is_refused():
    with pytest.raises(ConfigError, match=r"\b3 .*\b4 devices"):
        resolve(ranks=4, global_batch_size=3)


def test_a_global_batch_of_one_is_refused_under_batchnorm():
    with pytest.raises(ConfigError, match=r"\b1 .*BatchNorm"):
        resolve(ranks=1, batch_size=1, has_batchnorm=True)


def micro_batches(plan: BatchPlan, size: int) -> list[tuple[int, int]]:
    """What all ranks normalise together, micro-batch by micro-batch."""
    spans = [[span for span in spans if span[0] < span[1]] for spans in zip(*plan.split(size), strict=True)]
    assert all(a[1] == b[0] for together in spans for a, b in pairwise(together))
    return [(together[0][0], together[-1][1]) for together in spans]


@given(
    samples=st.integers(2, 200),
    batch_size=st.integers(1, 9),
    accumulate=st.integers(1, 4),
    ranks=st.integers(2, 6),
    others=st.integers(1, 6),
    tail=st.sampled_from(["spread", "merge"]),
)
def test_synchronised_batchnorm_normalises_the_same_samples_on_any_ranks(
    samples, batch_size, accumulate, ranks, others, tail
):
    plan = resolve(
        samples=samples, ranks=ranks, batch_size=batch_size, accumulate=accumulate, tail=tail,
        has_batchnorm=True, sync_batchnorm=True,
    )  # fmt: skip
    together = -(-plan.global_batch // plan.accumulate)
    if plan.global_batch < others:
        return
    other = resolve(
        samples=samples, ranks=others, batch_size=-(-together // others), global_batch_size=plan.global_batch,
        tail=tail, has_batchnorm=True, sync_batchnorm=others > 1,
    )  # fmt: skip
    windows = all_windows(plan)
    assert windows == all_windows(other)
    for size in {stop - start for start, stop in windows}:
        found = micro_batches(plan, size)
        assert [start for start, _ in found] + [size] == [0, *[stop for _, stop in found]]
        sizes = [stop - start for share in plan.split(size) for start, stop in share]
        # An odd sample joins another micro-batch: alone it has no statistics.
        assert max(sizes) <= batch_size + (size == plan.global_batch + 1 or (together == 2 and size % 2 == 1))
        # The plan of another number of devices may need more micro-batches; with as many, they are the same.
        if other.accumulate == plan.accumulate:
            assert micro_batches(other, size) == found


def test_a_merged_sample_makes_a_micro_batch_larger_and_no_further_one():
    """25 samples in steps of 24: one device normalised 13 and 12 of them, two devices 7 + 6 and 6 + 6."""
    for ranks in (1, 2, 3):
        for sync in (True, False):
            plan = resolve(
                samples=25, ranks=ranks, batch_size=24 // ranks, has_batchnorm=True, sync_batchnorm=sync and ranks > 1
            )
            assert [len(share) for share in plan.split(25)] == [1] * ranks


BUCKETED = OrderPlan(window=1024, block=128, lanes=8)


def ordered(*, samples=10_000, lengths=True, lanes=8, held=None, **settings):
    return resolve_order(DataConfig(**settings), samples=samples, lengths=lengths, lanes=lanes, saved_order=held)


def test_lengths_turn_bucketing_on_and_their_absence_leaves_a_shuffle():
    order, decision = ordered()
    assert order == OrderPlan(window=2048, block=256, lanes=8)
    assert "the task gives the lengths" in decision.reason
    order, decision = ordered(lengths=False)
    assert order == OrderPlan()
    assert "no lengths" in decision.reason
    assert ordered(bucketing="off")[0] == OrderPlan()
    assert ordered(bucketing="on")[0].bucketed


def test_bucketing_without_lengths_is_refused():
    with pytest.raises(ConfigError, match=r"data\.bucketing .*\blengths\b"):
        ordered(bucketing="on", lengths=False)


@given(samples=st.integers(1, 10**12))
def test_default_windows_are_whole_blocks_and_several_make_an_epoch_unless_it_is_short(samples):
    order, _ = ordered(samples=samples)
    assert order.window % order.block == 0
    assert MIN_WINDOW_SAMPLES <= order.window <= WINDOW
    assert MIN_WINDOWS * order.window <= samples or order.window == MIN_WINDOW_SAMPLES
    assert 2 * MIN_WINDOWS * order.window > samples or order.window == WINDOW


def test_given_sizes_are_taken_and_the_other_one_fits():
    assert (ordered(bucket_window=80)[0].window, ordered(bucket_window=80)[0].block) == (80, 10)
    assert (ordered(bucket_block=33)[0].window, ordered(bucket_block=33)[0].block) == (264, 33)
    assert ordered(bucket_window=90, bucket_block=30)[0] == OrderPlan(window=90, block=30, lanes=8)
    assert "as configured" in ordered(bucket_window=80)[1].reason
    with pytest.raises(ConfigError, match=r"\b100 samples .*\b30\b"):
        ordered(bucket_window=100, bucket_block=30)


@pytest.mark.parametrize("settings", [{}, {"bucketing": "on"}, {"bucket_window": 1024}, {"bucket_block": 128}])
def test_a_resume_holds_the_runs_order(settings):
    assert ordered(held=BUCKETED, samples=10**6, **settings)[0] == BUCKETED


@pytest.mark.parametrize("settings", [{}, {"bucketing": "off"}, {"bucket_window": 1024}])
def test_a_resume_holds_a_shuffle(settings):
    assert ordered(held=OrderPlan(), **settings)[0] == OrderPlan()


@pytest.mark.parametrize(
    ("held", "settings", "words"),
    [
        (BUCKETED, {"bucket_window": 2048}, ["windows of 1024 samples", "windows of 2048 samples"]),
        (BUCKETED, {"bucket_block": 64}, ["blocks of 128", "blocks of 64"]),
        (BUCKETED, {"bucketing": "off"}, ["windows of 1024 samples", "the configured order is shuffled"]),
        (OrderPlan(), {"bucketing": "on"}, ["the run's order is shuffled", "windows of 2048 samples"]),
    ],
)
def test_a_resume_with_another_order_is_refused_naming_both(held, settings, words):
    with pytest.raises(ConfigError) as caught:
        ordered(held=held, **settings)
    assert all(word in caught.value.what for word in words)


def test_a_step_wider_than_a_block_and_sizes_without_effect_are_noted():
    assert not list(order_notes(DataConfig(), BUCKETED, 128))
    (note,) = order_notes(DataConfig(), BUCKETED, 129)
    assert note.key == "small_blocks" and "129" in note.text
    assert not list(order_notes(DataConfig(), OrderPlan(), 4096))
    assert [note.key for note in order_notes(DataConfig(bucket_window=64), OrderPlan(), 1)] == ["settings_unused"]
