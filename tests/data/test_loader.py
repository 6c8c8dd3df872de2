"""From windows to batches: every sample once, the same lanes on any ranks, the same augmentation anywhere."""

from __future__ import annotations

import multiprocessing
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset, default_collate

from lockstep import ArrayDataset, Order
from lockstep.data import filled
from lockstep.data.loader import _groups, make_loader
from lockstep.data.order import WorkerInit
from lockstep.data.requests import BatchRequest, InOrder, SampleOrder, Source, windows
from lockstep.data.sampling import BucketedOrder
from lockstep.errors import SampleError
from lockstep.planning import BatchPlan, LoaderPlan
from tests.sequences import Recordings, pad

EPOCHS = 2


def requests(batch: BatchPlan, rank: int, epochs: int = EPOCHS) -> Iterator[BatchRequest]:
    walk = windows(batch, rank=rank, epoch=0, position=0, epochs=epochs, ghosts=False)
    return chain.from_iterable(window.requests for window in walk)


def fast(samples: int, ranks: int, global_batch: int, batch_size: int) -> BatchPlan:
    return BatchPlan(samples=samples, global_batch=global_batch, batch_size=batch_size, accumulate=1, ranks=ranks)


def exact(samples: int, ranks: int, global_batch: int) -> BatchPlan:
    return BatchPlan(
        samples=samples, global_batch=global_batch, batch_size=global_batch, accumulate=1, ranks=ranks, lanes=8
    )


def bucketed(lengths: np.ndarray, window: int = 64, block: int = 32) -> BucketedOrder:
    return BucketedOrder(Order(len(lengths), 1), lengths, window, block)


@given(
    samples=st.integers(1, 300),
    ranks=st.integers(1, 5),
    global_batch=st.integers(5, 60),
    batch_size=st.integers(1, 16),
    lanes=st.sampled_from([1, 2, 8, 16]),
)
def test_on_any_ranks_a_step_has_the_samples_of_the_order_dealt_or_not(
    samples: int, ranks: int, global_batch: int, batch_size: int, lanes: int
) -> None:
    order, batch = bucketed(np.arange(samples) * 7 % 31), fast(samples, ranks, global_batch, batch_size)
    for dealt in (None, lanes):
        source = Source(None, list, 1, order, dealt)
        steps: dict[tuple[int, int], list[int]] = {}
        for rank in range(ranks):
            for window in windows(batch, rank=rank, epoch=0, position=0, epochs=EPOCHS, ghosts=False):
                for request in window.requests:
                    steps.setdefault((window.epoch, window.start), []).extend(source.indices(request).tolist())
        for (epoch, start), indices in steps.items():
            expected = order.slice(epoch, start, min(start + global_batch, samples)).tolist()
            assert sorted(indices) == sorted(expected)
            assert dealt or indices == expected


def lane_requests(samples: int, ranks: int, global_batch: int) -> list[BatchRequest]:
    """The requests of all lanes, step after step, whichever rank has them."""
    batch = exact(samples, ranks, global_batch)
    by_rank = [list(requests(batch, rank)) for rank in range(ranks)]
    share = 8 // ranks
    return [r for first in range(0, len(by_rank[0]), share) for mine in by_rank for r in mine[first : first + share]]


@given(samples=st.integers(1, 300), global_batch=st.integers(8, 60))
def test_a_lane_holds_the_same_samples_on_any_ranks(samples: int, global_batch: int) -> None:
    source = Source(None, list, 1, bucketed(np.arange(samples) * 7 % 31), 8)
    alone = [source.indices(request).tolist() for request in lane_requests(samples, 1, global_batch)]
    for ranks in (2, 4, 8):
        assert [source.indices(r).tolist() for r in lane_requests(samples, ranks, global_batch)] == alone


def test_lanes_are_collated_and_padded_alone_so_their_batches_are_the_same_bytes_on_any_ranks() -> None:
    data = Recordings(90, 1)
    source = Source(data, pad, 1, bucketed(data.lengths), 8)
    alone = [source.batch(request) for request in lane_requests(90, 1, 28)]
    for ranks in (2, 4, 8):
        for request, theirs in zip(lane_requests(90, ranks, 28), alone, strict=True):
            if request.size == 0:
                assert source.batch(request) == theirs == ()
                continue
            frames, labels = source.batch(request)
            assert torch.equal(frames, theirs[0])
            assert torch.equal(labels, theirs[1])
            assert frames.shape[1] == data.lengths[source.indices(request)].max(), "no longer than its own longest"


def shares(order: SampleOrder, lanes: int | None, lengths: np.ndarray, batch: BatchPlan) -> tuple[float, float]:
    """Padding as a share of all frames, and how much more frames the busiest rank of a step has than the mean."""
    source = Source(None, list, 1, order, lanes)
    padded, unequal = 0.0, []
    walks = [
        list(windows(batch, rank=rank, epoch=0, position=0, epochs=1, ghosts=False)) for rank in range(batch.ranks)
    ]
    for step in zip(*walks, strict=True):
        micro_batches = [[lengths[source.indices(request)] for request in window.requests] for window in step]
        padded += sum(part.max() * len(part) for rank in micro_batches for part in rank)
        work = [sum(part.sum() for part in rank) for rank in micro_batches]
        unequal.append(max(work) / np.mean(work) - 1)
    return 1 - lengths.sum() / padded, float(np.mean(unequal))


def test_the_order_by_length_pads_little_and_dealing_makes_ranks_equal() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.6, 8192)
    batch = fast(8192, 4, 128, 32)
    plain, buckets = Order(8192, 1), BucketedOrder(Order(8192, 1), lengths, 2048, 256)
    shuffled, in_order, dealt = (
        shares(order, lanes, lengths, batch) for order, lanes in ((plain, None), (buckets, None), (buckets, 8))
    )
    assert dealt[0] < 0.2 < 0.6 < shuffled[0]
    assert dealt[1] < 0.01 < 0.05 < in_order[1]


class Augmented:
    """Samples that are what ``rng`` draws, with their index."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def sample(self, index: int, rng: np.random.Generator) -> tuple[int, torch.Tensor]:
        return index, torch.from_numpy(rng.standard_normal(6))


def augmented(batch: BatchPlan, workers: int) -> dict[tuple[int, int], bytes]:
    """The bytes of every (epoch, index), over all ranks."""
    data = Augmented(batch.samples)
    source = Source(data, torch.utils.data.default_collate, 5, Order(batch.samples, 5))
    plan = LoaderPlan(num_workers=workers, prefetch_factor=2, pin_memory=False)
    found: dict[tuple[int, int], bytes] = {}
    for rank in range(batch.ranks):
        mine = [request for request in requests(batch, rank) if request.size]
        loader = make_loader(source, mine, plan, rank, largest=batch.batch_size)
        try:
            for request, (indices, drawn) in zip(mine, loader, strict=True):
                for index, row in zip(indices.tolist(), drawn, strict=True):
                    key = (request.epoch, index)
                    assert key not in found
                    found[key] = row.numpy().tobytes()
        finally:
            loader.close()
    assert len(found) == EPOCHS * batch.samples
    return found


@given(samples=st.integers(1, 80), ranks=st.integers(1, 5), global_batch=st.integers(5, 40), lanes=st.booleans())
def test_augmented_samples_are_byte_equal_on_any_ranks_and_differ_between_epochs(
    samples: int, ranks: int, global_batch: int, lanes: bool
) -> None:
    alone = augmented(fast(samples, 1, samples, samples), 0)
    batch = exact(samples, 2 ** (ranks // 2), global_batch) if lanes else fast(samples, ranks, global_batch, 7)
    assert augmented(batch, 0) == alone
    assert all(alone[0, index] != alone[1, index] for index in range(samples))
    assert len(set(alone.values())) == len(alone)


@pytest.fixture
def sigchld() -> Iterator[None]:
    """A DataLoader with workers leaves a handler of its own behind."""
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.usefixtures("sigchld")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than there are cores here
@pytest.mark.parametrize("workers", [1, 3])
def test_augmented_samples_are_byte_equal_with_any_number_of_workers(workers: int) -> None:
    assert augmented(fast(37, 2, 10, 3), workers) == augmented(fast(37, 1, 10, 10), 0)


@pytest.mark.usefixtures("sigchld")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_and_gathers_take_the_dealt_items() -> None:
    lengths = np.arange(90) * 7 % 31
    source = Source(ArrayDataset(torch.arange(90)), list, 1, bucketed(lengths), 8)
    mine = list(requests(fast(90, 1, 24, 7), 0))
    expected = [source.indices(request).tolist() for request in mine]
    for workers in (0, 2):
        plan = LoaderPlan(num_workers=workers, prefetch_factor=2, pin_memory=False)
        loader = make_loader(source, mine, plan, 0, largest=7)
        try:
            assert [batch[0].tolist() for batch in loader] == expected
        finally:
            loader.close()
        padded = make_loader(replace(source, pad=filled, full=9), mine, plan, 0, largest=7)
        try:
            assert [batch[0].tolist() for batch in padded] == [row + (9 - len(row)) * row[-1:] for row in expected]
        finally:
            padded.close()


@pytest.mark.slow
@pytest.mark.usefixtures("sigchld")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_worker_that_does_not_come_up_is_replaced_and_no_batch_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one that was forked while another thread held a lock."""
    before, comes_up = set(multiprocessing.active_children()), WorkerInit.__call__

    def hangs_once(init: WorkerInit, worker_id: int) -> None:
        with suppress(FileExistsError):
            (tmp_path / "hung").touch(exist_ok=False)
            time.sleep(600)
        comes_up(init, worker_id)

    monkeypatch.setattr(WorkerInit, "__call__", hangs_once)
    monkeypatch.setattr("lockstep.data.loader.START_S", (1.0, 10.0))
    with pytest.warns(RuntimeWarning, match=r"\bworker\b.*\b1 s"):
        found = augmented(fast(37, 1, 10, 3), 2)
    assert found == augmented(fast(37, 1, 10, 10), 0)
    assert set(multiprocessing.active_children()) <= before


def without_workers(source: Source, mine: list[BatchRequest], largest: int) -> list[list[int]]:
    plan = LoaderPlan(num_workers=0, prefetch_factor=2, pin_memory=False)
    with closing(make_loader(source, mine, plan, 0, largest=largest)) as loader:
        return [batch[0].flatten().tolist() if batch else [] for batch in loader]


def test_rows_gathered_in_place_beside_the_step_or_from_a_mapped_file_are_the_same(tmp_path: Path) -> None:
    rows = np.arange(87, dtype=np.float32)
    np.save(tmp_path / "rows.npy", rows)
    mapped = ArrayDataset(np.load(tmp_path / "rows.npy", mmap_mode="r")[:, None])
    mine = list(requests(exact(87, 1, 9), 0))
    assert any(request.size == 0 for request in mine), "an empty lane has no rows"
    order = Order(87, 1)
    expected = [rows[order.slice(r.epoch, r.start, r.stop)].tolist() for r in mine]
    for data in (ArrayDataset(rows[:, None]), mapped):
        for largest in (2, 10**6):
            assert without_workers(Source(data, list, 1, order), mine, largest) == expected
    assert not mapped.is_in_memory


@pytest.mark.parametrize("kind", ["tensors", "rows", "subset", "range"])
def test_batches_cut_out_of_a_gather_of_tensors_are_those_read_one_by_one(kind: str) -> None:
    rows = torch.arange(174.0).view(87, 2)
    data: Any = rows if kind == "rows" else TensorDataset(rows)
    if kind in ("subset", "range"):
        data = Subset(data, range(70) if kind == "range" else [*range(70)])
    source = Source(data, default_collate, 1, Order(len(data), 1))
    mine = list(requests(fast(len(data), 1, 9, 4), 0))
    assert max(map(len, _groups(source, mine))) == (1 if kind == "range" else 16), "NumPy does not index a range"
    plan = LoaderPlan(num_workers=0, prefetch_factor=2, pin_memory=False)
    with closing(make_loader(source, mine, plan, 0, largest=4)) as loader:
        for batch, request in zip(loader, mine, strict=True):
            alone = source.batch(request)
            assert type(batch) is type(alone)
            torch.testing.assert_close(batch, alone, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [TensorDataset, ArrayDataset])
def test_batches_cut_out_of_a_gather_begin_where_tensors_of_their_own_do(kind: type[TensorDataset]) -> None:
    """Matrix products of other alignment round differently, and exact mode would not be."""
    source = Source(kind(torch.zeros(87, 3)), default_collate, 1, Order(87, 1))
    mine = list(requests(fast(87, 1, 5, 5), 0, epochs=1))
    plan = LoaderPlan(num_workers=0, prefetch_factor=2, pin_memory=False)
    with closing(make_loader(source, mine, plan, 0, largest=5)) as loader:
        assert {batch[0].data_ptr() % 64 for batch in loader} == {0}


@pytest.mark.usefixtures("sigchld")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("kind", "largest", "workers"),
    [(TensorDataset, 4, 0), (ArrayDataset, 10**6, 0), (TensorDataset, 4, 2)],
    ids=["in place", "in a thread", "in workers"],
)
def test_what_is_written_into_tensors_between_epochs_is_in_the_next_one(kind: Any, largest: int, workers: int) -> None:
    rows = torch.zeros(30, 2)
    source = Source(kind(rows), default_collate, 1, Order(30, 1))
    mine = list(requests(fast(30, 1, 4, 4), 0, epochs=3))
    plan = LoaderPlan(num_workers=workers, prefetch_factor=2, pin_memory=False)
    with closing(make_loader(source, mine, plan, 0, largest=largest)) as loader:
        for request, (batch,) in zip(mine, loader, strict=True):
            assert bool((batch == request.epoch).all())
            if request.stop == 30:
                rows += 1


def test_gathers_ahead_are_bounded_by_their_bytes() -> None:
    """Sixteen batches of images would be gigabytes, and the second step would wait for them."""
    data = ArrayDataset(torch.zeros(64, 2**18))  # a mebibyte each
    source = Source(data, list, 1, Order(64, 1))
    groups = list(_groups(source, requests(fast(64, 1, 2, 2), 0, epochs=1)))
    assert [len(group) for group in groups[:4]] == [1, 2, 2, 2]
    assert sum(map(len, groups)) == 32


@pytest.mark.parametrize("kind", [TensorDataset, ArrayDataset])
def test_for_a_gpu_tensors_are_gathered_and_pinned_ahead_of_the_step(
    monkeypatch: pytest.MonkeyPatch, kind: type[TensorDataset]
) -> None:
    threads: set[str] = set()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    pinned: Any = lambda batch: (threads.add(threading.current_thread().name), batch)[1]  # noqa: E731
    monkeypatch.setattr("lockstep.data.loader._pinned", pinned)
    plan = LoaderPlan(num_workers=0, prefetch_factor=2, pin_memory=True)
    mine = [BatchRequest(0, 0, start, start + 8) for start in range(0, 64, 8)]
    for data, name in ((kind(torch.arange(64)), "lockstep-loader_0"), (Augmented(64), "MainThread")):
        threads.clear()
        source = Source(data, torch.utils.data.default_collate, 5, InOrder())
        with closing(make_loader(source, mine, plan, 0, largest=8)) as loader:
            assert [index for batch in loader for index in batch[0].tolist()] == list(range(64))
        assert threads == {name}


class Records:
    """Samples in a database that only the thread may use which has opened it."""

    def __init__(self, samples: int) -> None:
        self.samples, self.file = samples, sqlite3.connect(":memory:")
        self.file.execute("create table records (number integer primary key, value real)")
        self.file.executemany("insert into records values (?, ?)", [(n, random.random()) for n in range(samples)])

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, self.file.execute("select value from records where number = ?", (index,)).fetchone()[0]


@pytest.mark.parametrize("prefetch", [2, 8])
def test_without_workers_a_data_set_is_read_where_the_step_is_and_not_before(prefetch: int) -> None:
    """A thread beside it would read the file that validation reads, or may not read it at all."""
    data = Records(65)
    read: list[int] = []
    source = Source(data, lambda samples: read.append(len(samples)) or samples, 1, InOrder())  # type: ignore[func-returns-value]
    plan = LoaderPlan(num_workers=0, prefetch_factor=prefetch, pin_memory=False)
    mine = [BatchRequest(0, 0, start, start + 8) for start in range(0, 72, 8)]
    with closing(make_loader(source, mine, plan, 0, largest=8)) as loader:
        for number, batch in enumerate(islice(loader, 8)):
            assert [index for index, _ in batch] == list(range(8 * number, 8 * number + 8))
            assert len(read) == number + 1


@pytest.mark.usefixtures("sigchld")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_ends_too_early_ends_no_training_in_silence(workers: int) -> None:
    class Short(Augmented):
        def sample(self, index: int, rng: np.random.Generator) -> tuple[int, torch.Tensor]:
            if index == 5:
                raise StopIteration
            return super().sample(index, rng)

    source = Source(Short(8), torch.utils.data.default_collate, 5, InOrder())
    plan = LoaderPlan(num_workers=workers, prefetch_factor=2, pin_memory=False)
    mine = [BatchRequest(0, 0, 0, 4), BatchRequest(0, 0, 4, 8)]
    with closing(make_loader(source, mine, plan, 0, largest=4)) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(SampleError, match=r"sample 5 .*\bShort\b") as caught:
            next(batches)
    assert "StopIteration" in caught.value.why
    assert "in sample" in caught.value.why


@pytest.mark.usefixtures("sigchld")
def test_closing_ends_the_workers_even_while_an_error_is_looked_at() -> None:
    source = Source(Augmented(64), torch.utils.data.default_collate, 5, Order(64, 5))
    plan = LoaderPlan(num_workers=1, prefetch_factor=2, pin_memory=False)
    loader = make_loader(source, requests(fast(64, 1, 8, 8), 0), plan, 0, largest=8)
    before = set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    assert set(multiprocessing.active_children()) - before
    loader.close()
    assert set(multiprocessing.active_children()) <= before
    assert next(batches, None) is None
