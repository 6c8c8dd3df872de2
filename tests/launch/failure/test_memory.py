"""What a failed rank held, and the batch that needs less."""

from __future__ import annotations

import resource
import shlex

from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.launch.failure.records import MachineMemory, MemoryWatch, RankMemory, own_memory
from lockstep.launch.failure.report import advice, memory_in_rows, memory_table
from lockstep.planning.batch import BatchPlan, resolve_batch


@given(ranks=st.integers(1, 8), batch_size=st.integers(1, 64), accumulate=st.integers(1, 5))
def test_any_smaller_batch_keeps_the_global_batch_and_is_what_the_plan_makes_of_it(
    ranks: int, batch_size: int, accumulate: int
) -> None:
    def plan(size: int, held: int | None) -> BatchPlan:
        return resolve_batch(
            samples=10_000,
            ranks=ranks,
            devices_per_rank=1,
            batch_size=size,
            accumulate=1 if held else accumulate,
            global_batch_size=held,
            tail="spread",
            lanes=None,
            has_batchnorm=False,
            sync_batchnorm=False,
        )[0]

    batch = plan(batch_size, None)
    assume(batch.batch_size > 1)
    text = advice(batch, "run-1")
    arguments = shlex.split(text.rpartition(": ")[2])
    assert arguments[:3] == ["lockstep", "resume", "run-1"]
    settings = dict(pair.split("=") for pair in arguments[4::2])
    size = int(settings["training.batch_size"])
    assert size <= batch_size / 2
    assert int(settings["training.global_batch_size"]) == batch.global_batch
    again = plan(size, batch.global_batch)
    assert f"as batch size {again.batch_size} × {again.accumulate} micro-batches" in text


def test_nothing_smaller_than_one_sample_or_a_lane_is_proposed() -> None:
    def plan(**changes: object) -> object:
        settings = {"samples": 100, "ranks": 2, "devices_per_rank": 1, "batch_size": 1, "accumulate": 1, "lanes": None}
        settings |= {"global_batch_size": None, "tail": "spread", "has_batchnorm": False, "sync_batchnorm": False}
        return resolve_batch(**{**settings, **changes})[0]  # type: ignore[arg-type]

    for batch in (plan(), plan(batch_size=8, lanes=8)):
        assert "more devices" in advice(batch, "run-1")  # type: ignore[arg-type]


def test_own_memory_tells_of_a_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert own_memory().limit == (0 if before[0] == resource.RLIM_INFINITY else before[0])
    memory = own_memory()
    assert memory.resident > 0
    assert memory.peak_resident > 0
    assert "GB resident" in memory_table({0: memory}, MachineMemory())


def test_the_launcher_sees_its_ranks_until_they_are_gone() -> None:
    import os

    watch = MemoryWatch({0: os.getpid(), 1: 2**22 + 1}, clock=lambda: 0.0)
    watch.look([0, 1])
    assert watch.ranks.keys() == {0}
    assert watch.machine().total > watch.ranks[0].resident > 0


def test_what_a_rank_says_goes_over_what_others_saw() -> None:
    rows = [{"ranks": []}, {"ranks": [{"rank": 1, "memory_gb": 2.5, "reserved_gb": 3.0, "peak_gb": 2.75}]}]
    seen = memory_in_rows(rows, on_gpu=True)[1]
    assert (seen.allocated, seen.reserved, seen.peak) == (2_500_000_000, 3_000_000_000, 2_750_000_000)
    assert memory_in_rows(rows, on_gpu=False)[1].resident == 2_500_000_000
    assert memory_in_rows([], on_gpu=True) == {}
    both = RankMemory(allocated=10**9, total=8 * 10**9).over(seen)
    text = memory_table({1: both, 0: RankMemory()}, MachineMemory(total=16 * 10**9, free=10**9))
    assert "rank 0: not known" in text
    assert "rank 1: GPU: 1.00 GB allocated, 3.00 GB reserved, 2.75 GB at most, of 8.00 GB (fragmented: 67%" in text
    assert "16.00 GB, 1.00 GB of it free" in text
