"""Collectives, buckets, steps of many devices and memory: pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.lab.forecast.collectives import (
    LEVELS,
    Cluster,
    Level,
    all_gather,
    all_reduce,
    cluster_of,
)
from lockstep.lab.forecast.footprint import Work
from lockstep.lab.forecast.memory import check_strategy, choose_strategy, largest_batch, parse_memory
from lockstep.lab.forecast.roofline import gpu_machines, seconds
from lockstep.lab.forecast.scaling import (
    COUNT_BYTES,
    Setting,
    Step,
    buckets,
    expected_max,
    exposed,
    predict,
    with_error_bars,
)
from lockstep.planning.resolve import FIRST_BUCKET_BYTES

SIZES = st.integers(1, 1 << 34)
DEVICES = st.integers(1, 4096)
CLUSTERS = st.builds(
    cluster_of, st.sampled_from(["nvlink", "pcie", "25gbe", "ib400", "pcie,25gbe"]), st.integers(1, 16)
)
TIMES = st.floats(1e-4, 1.0)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    sizes = draw(st.lists(st.integers(4, 200 << 20), min_size=1, max_size=20))
    ready = tuple((place + 1) / len(sizes) for place in range(len(sizes)))
    return Step(
        batch_size=draw(st.integers(1, 512)),
        forward_s=draw(TIMES),
        backward_s=draw(TIMES),
        optimizer_s=draw(TIMES),
        gradients=tuple(sizes),
        ready=ready,
        data_s=draw(TIMES),
        jitter_s=draw(st.floats(0, 0.1)),
        spread=draw(st.floats(0, 0.5)),
        blocks=tuple(sizes),
    )


def pair(alpha: float, beta: float) -> Cluster:
    """Two devices whose all-reduce of n bytes takes alpha + beta·n seconds."""
    level = Level("", (alpha / 2,) * 3, (1 / beta,) * 3, "")
    return Cluster(2, level, level, launch_s=(0.0,) * 3)


def faster(cluster: Cluster, factor: float) -> Cluster:
    slow, middle, fast = cluster.node.bandwidth
    node = replace(cluster.node, bandwidth=(slow * factor, middle * factor, fast * factor))
    slow, middle, fast = cluster.network.bandwidth
    return replace(
        cluster, node=node, network=replace(cluster.network, bandwidth=(slow * factor, middle * factor, fast * factor))
    )


@given(SIZES, st.integers(2, 4096), st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_a_ring_moves_every_byte_twice_but_its_own_part(size: int, n: int, alpha: float, bandwidth: float) -> None:
    expected = 2 * (n - 1) / n * size / bandwidth + 2 * (n - 1) * alpha
    level = Level("", (alpha,) * 3, (bandwidth,) * 3, "")
    assert all_reduce(size, n, Cluster(n, level, level, launch_s=(0.0,) * 3)) == pytest.approx(expected)


@given(SIZES, CLUSTERS)
def test_one_device_sends_nothing(size: int, cluster: Cluster) -> None:
    assert all_reduce(size, 1, cluster) == all_gather(size, 1, cluster) == 0.0


@given(SIZES, DEVICES, CLUSTERS, st.floats(1, 100))
def test_more_bandwidth_never_costs_time(size: int, devices: int, cluster: Cluster, factor: float) -> None:
    for collective in (all_reduce, all_gather):
        assert collective(size, devices, faster(cluster, factor)) <= collective(size, devices, cluster)


@given(SIZES, SIZES, DEVICES, CLUSTERS)
def test_more_bytes_never_take_less_time(one: int, other: int, devices: int, cluster: Cluster) -> None:
    assert all_reduce(min(one, other), devices, cluster) <= all_reduce(max(one, other), devices, cluster)


def test_a_network_is_shared_by_a_node() -> None:
    cluster = cluster_of("nvlink,25gbe", 8)
    assert cluster.bandwidth(8) == LEVELS["nvlink"].bandwidth[1]
    assert cluster.bandwidth(16) == LEVELS["25gbe"].bandwidth[1]
    assert cluster_of("ib400", 8).bandwidth(16) == 8 * LEVELS["ib400"].bandwidth[1]
    assert cluster_of("ib400", 8).bandwidth(9) == LEVELS["ib400"].bandwidth[1], "the ring passes the second node's one"


@pytest.mark.parametrize("names", ["", "token-ring", "nvlink,pcie", "25gbe,ib400"])
def test_links_that_make_no_cluster_are_refused(names: str) -> None:
    with pytest.raises(UsageError, match="--interconnect"):
        cluster_of(names, 8)


@given(st.lists(st.integers(1, 4 << 20).map(lambda n: 4 * n), min_size=1, max_size=40), st.none() | st.integers(1, 64))
def test_buckets_are_those_of_torch(sizes: list[int], cap_mb: int | None) -> None:
    ready = [(place + 1) / len(sizes) for place in range(len(sizes))]
    cap = None if cap_mb is None else cap_mb << 20
    found = buckets(sizes, ready, cap)
    tensors = [torch.empty(size // 4, device="meta") for size in sizes]
    limits = [FIRST_BUCKET_BYTES, 25 << 20] if cap is None else [cap]
    assignment, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    assert [bucket.size for bucket in found] == [sum(sizes[place] for place in places) for places in assignment]
    assert [bucket.ready for bucket in found] == [ready[places[-1]] for places in assignment]


def test_messages_go_one_at_a_time_and_not_before_they_are_ready() -> None:
    assert exposed([(0.0, 1.0), (0.5, 1.0)], backward_s=3.0) == 0.0
    assert exposed([(0.0, 2.0), (0.5, 2.0)], backward_s=3.0) == 1.0
    assert exposed([(3.0, 0.25)], backward_s=3.0) == 0.25


@given(steps(), CLUSTERS, st.sampled_from(["ddp", "fsdp"]))
def test_one_gpu_has_no_communication_and_waits_for_nobody(step: Step, cluster: Cluster, strategy: str) -> None:
    found = predict(step, 1, Setting(cluster, strategy=strategy))
    assert found.efficiency == pytest.approx(1.0)
    assert found.parts["communication"] == found.sent == 0.0
    assert found.parts["straggler"] == pytest.approx(0.0, abs=1e-12)


@given(steps(), DEVICES, CLUSTERS, st.sampled_from(["ddp", "fsdp"]), st.integers(1, 8))
def test_parts_add_up_and_efficiency_is_a_share(
    step: Step, devices: int, cluster: Cluster, strategy: str, accumulate: int
) -> None:
    found = predict(step, devices, Setting(cluster, strategy=strategy, accumulate=accumulate))
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert min(found.parts.values()) >= -1e-12
    alone = predict(step, 1, Setting(cluster, strategy=strategy, accumulate=accumulate)).step_s
    # What fsdp divides of the optimizer's work is gained.
    gained = step.optimizer_s * (1 - 1 / devices) if strategy == "fsdp" else 0.0
    assert 0 < found.efficiency <= alone / (alone - gained) * (1 + 1e-9)
    assert found.samples_per_s * found.step_s == pytest.approx(step.batch_size * accumulate * devices)


@given(steps(), DEVICES, CLUSTERS, st.floats(1, 100), st.sampled_from(["ddp", "fsdp"]))
def test_a_faster_network_never_slows_a_step(
    step: Step, devices: int, cluster: Cluster, factor: float, strategy: str
) -> None:
    setting = Setting(cluster, strategy=strategy)
    quick = predict(step, devices, replace(setting, cluster=faster(cluster, factor)))
    assert quick.step_s <= predict(step, devices, setting).step_s * (1 + 1e-12)


@given(steps(), DEVICES, CLUSTERS)
def test_error_bars_hold_the_prediction(step: Step, devices: int, cluster: Cluster) -> None:
    row = with_error_bars(step, devices, Setting(cluster))
    assert row["samples_per_s_low"] <= row["samples_per_s"] <= row["samples_per_s_high"]
    assert row["efficiency_low"] <= row["efficiency"] + 1e-9
    assert row["efficiency_high"] >= min(1.0, row["efficiency"] - 1e-9)


@given(st.integers(1, 5000))
def test_more_devices_wait_longer_for_the_slowest(devices: int) -> None:
    assert expected_max(devices) < expected_max(devices + 1)
    assert expected_max(1) == pytest.approx(0.0, abs=1e-12)


def test_the_largest_of_two_normal_numbers() -> None:
    assert expected_max(2) == pytest.approx(1 / math.sqrt(math.pi), rel=0.05)


def test_messages_that_cannot_hide_cost_their_whole_time() -> None:
    step = Step(32, 0.01, 0.02, 0.0, (4 << 20, 4 << 20), (0.5, 1.0))
    cluster = pair(1e-3, 1e-9)
    hidden, open_ = (predict(step, 2, Setting(cluster, overlap=share)).parts["communication"] for share in (1.0, 0.0))
    assert open_ == pytest.approx(3e-3 + 2 * (4 << 20) * 1e-9, rel=1e-3)
    assert hidden < open_


def test_a_small_model_on_cpus_sends_one_message_after_the_backward() -> None:
    step = Step(32, 0.01, 0.02, 0.0, (4096, 4096), (0.5, 1.0))
    setting = Setting(pair(1e-3, 1e-9), joint=True)
    assert predict(step, 2, setting).parts["communication"] == pytest.approx(1e-3 + (8192 + 40) * 1e-9)


def test_of_fsdp_nothing_hides_the_root_and_the_ends_of_each_pass() -> None:
    sizes = (1 << 20, 2 << 20, 4 << 20, 64 << 20)  # three blocks, and the root
    step = Step(1, 10.0, 20.0, 1.0, sizes, (0.25, 0.5, 0.75, 1.0), blocks=sizes)
    cluster = cluster_of("nvlink,ib400", 8)
    found = predict(step, 16, Setting(cluster, strategy="fsdp"))
    first, _, last, root = (all_gather(size, 16, cluster) for size in sizes)
    # Gathered for both passes, and scattered at the end: the root and the first block; gathered there: the last block.
    short = all_reduce(COUNT_BYTES, 16, cluster)  # loss and count; the norm
    assert found.parts["communication"] == pytest.approx(3 * root + 2 * first + last + 2 * short)
    assert found.parts["compute"] == pytest.approx(30 + 1 / 16), "each device updates its part of the weights"


def test_synchronised_batchnorm_waits_for_its_messages() -> None:
    step = Step(32, 0.01, 0.02, 0.0, (4096,), (1.0,))
    plain = Setting(pair(1e-3, 1e-9))
    more = predict(step, 2, replace(plain, blocking=6)).step_s - predict(step, 2, plain).step_s
    assert more == pytest.approx(6e-3, rel=0.01)
    assert predict(step, 1, replace(plain, blocking=6)).step_s == step.seconds


@given(st.floats(0, 1e9), st.floats(1, 1e7), st.floats(1e6, 1e10), st.integers(1, 5000), st.integers(1, 100_000))
def test_the_largest_batch_fits_and_the_next_does_not(
    fixed: float, each: float, limit: float, first: int, most: int
) -> None:
    found = largest_batch(lambda size: fixed + each * size, limit, first, most)
    assert 0 <= found <= most
    if found:
        assert fixed + each * found <= limit
    if found < most:
        assert fixed + each * (found + 1) > limit


def test_strategies_are_chosen_by_what_fits() -> None:
    totals = {"single": 50.0, "ddp": 60.0, "fsdp": 20.0}
    assert choose_strategy(totals, 1, 100)[0] == "single"
    assert choose_strategy(totals, 8, 100)[0] == "ddp"
    assert choose_strategy(totals, 8, 30)[0] == "fsdp"
    strategy, reason = choose_strategy(totals, 8, 10)
    assert strategy == "ddp"
    assert "nothing fits" in reason


@pytest.mark.parametrize(("text", "size"), [("80GB", 80e9), ("24GiB", 24 * 2**30), ("500 mb", 5e8), ("12", 12)])
def test_amounts_of_memory(text: str, size: float) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "much", "0GB", "-1GB", "3 parsecs"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        parse_memory(text)


def test_a_strategy_without_an_estimate_is_refused() -> None:
    for name in ("pipeline", "dp"):
        with pytest.raises(UsageError, match=rf"\b{name}\b"):
            check_strategy(name, speed=True)
        assert check_strategy(name) == name
    with pytest.raises(UsageError, match="'tp'"):
        check_strategy("tp")


def test_operators_are_bound_by_the_slowest_of_three() -> None:
    slow, machine, fast = gpu_machines("NVIDIA H100 80GB HBM3")
    assert seconds([Work(1e12, 0)], slow) > seconds([Work(1e12, 0)], machine) > seconds([Work(1e12, 0)], fast)
    assert seconds([Work(1e12, 0)], machine) == pytest.approx(1e12 / machine.flops)
    assert seconds([Work(0, 1e9)], machine) == pytest.approx(1e9 / machine.bandwidth)
    assert seconds([Work(1, 4), Work(0, 4)], machine) == pytest.approx(2 * machine.launch_s)
    assert seconds([Work(1e12, 0, half=True)], machine) < seconds([Work(1e12, 0)], machine)
    with pytest.raises(UsageError, match="data sheet"):
        gpu_machines("Riva TNT2")
