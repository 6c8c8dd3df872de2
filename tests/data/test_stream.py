"""Iterable data sets: read once, the same items on any number of ranks, resumed at their cursor."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import lockstep
from lockstep.data.stream import EVERY, LAG, Stream, as_stream
from lockstep.errors import ConfigError, DataError, LockstepError, SampleError, TaskError, UnsupportedError
from lockstep.events import Note
from lockstep.hardware.world import World
from lockstep.rundir.files import read_jsonl
from lockstep.rundir.folder import RunDir
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.samples import used_samples
from tests.toys import Toy, arrays


class Numbers(IterableDataset[int]):
    """0, 1, … and a cursor."""

    def __init__(self, items: int) -> None:
        self.items, self.at, self.opened = items, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        while self.at < self.items:
            self.at += 1
            yield self.item(self.at - 1)
        self.at = 0

    def item(self, number: int) -> Any:
        return number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@given(
    items=st.integers(1, 300),
    batch=st.integers(1, 200),
    attempts=st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_attempts_go_through_the_stream_without_gaps(items: int, batch: int, attempts: list[int]) -> None:
    done, saved, found = 0, None, list[int]()
    for steps in attempts:
        stream = Stream(Numbers(items), 10**6)
        assert stream[0] == 0, "as the plan looks at it"
        stream.begin(Path("run"), 1, World(), done, batch, saved)
        for _ in range(steps):
            found += stream.__getitems__(range(done, done + batch))
            done += batch
        saved = stream.state_dict(done)
        # An attempt that is killed has fetched more than what its last checkpoint has.
        stream.__getitems__(range(done, done + batch + EVERY))
    assert found == [number % items for number in range(done)]


@pytest.mark.parametrize("looked", [0, 2])
def test_a_stream_that_begins_later_gives_its_first_item_whatever_the_plan_has_looked_at(looked: int) -> None:
    """Ranks do not look, and ``verify`` begins near the end of an epoch."""
    for stream in (Stream(Numbers(9), 10), Stream((number for number in range(9)), 10)):
        for number in range(looked):
            assert stream[number] == number
        stream.begin(Path("run"), 1, World(), 7, 4, None)
        assert stream.__getitems__(range(7, 11)) == [0, 1, 2, 3]
    resumed = Stream(Numbers(9), 10)
    first = Stream(Numbers(9), 10)
    first.begin(Path("run"), 1, World(), 7, 4, None)
    first.__getitems__(range(7, 11))
    resumed.begin(Path("run"), 2, World(), 11, 4, first.state_dict(11))
    assert resumed[11] == 4


def test_items_of_a_step_may_be_asked_for_in_any_order() -> None:
    """``verify`` reads batches backwards."""
    stream = Stream(Numbers(100), 10**6)
    stream.begin(Path("run"), 1, World(), 0, 8, None)
    assert [stream[number] for number in (7, 3, 0, 15, 8, 23, 16)] == [7, 3, 0, 15, 8, 23, 16]
    with pytest.raises(DataError, match=r"item 0\b"):
        stream[0]


class Noisy(Numbers):
    def item(self, number: int) -> Any:
        return torch.randn(8), number % 3


class Drawing(Toy):
    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(Noisy(200), super().datasets().val)


def test_a_stream_that_draws_from_the_global_generators_is_told_and_refused_by_exact_mode() -> None:
    """The process that reads for all ranks of a node trains meanwhile, and draws, too."""
    settings: Any = {"data": {"epoch_samples": 200}}
    assert any("random.Random" in note.text for note in lockstep.plan(Drawing(), settings).notes)
    assert all("random.Random" not in note.text for note in lockstep.plan(Streaming(), settings).notes)
    with pytest.raises(UnsupportedError, match="reproducibility: exact"):
        lockstep.plan(Drawing(), {**settings, "training": {"reproducibility": "exact"}})


class Loading(Toy):
    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(DataLoader(super().datasets().train))


def test_a_stream_without_a_cursor_begins_again_and_the_plan_says_so() -> None:
    class Plain:
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    stream = as_stream(Plain(), epoch_samples=5, max_steps=None)
    stream.begin(Path("run"), 2, World(), 7, 4, None)
    assert stream.__getitems__([7, 8, 9]) == [0, 1, 2]
    assert stream.state_dict(10) is None
    assert "load_state_dict()" in stream.remark


def rank_of_process() -> int:
    return int(os.environ.get("RANK", 0))


class Slotted:
    __slots__ = ()

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_a_stream_that_looks_at_the_rank_is_named() -> None:
    class ByRank(Numbers):
        def __iter__(self) -> Iterator[int]:
            rank = int(os.environ.get("RANK", 0))
            return iter(range(rank, 9, 2))

    class InAList(Numbers):
        def __init__(self) -> None:
            super().__init__(9)
            self.pipeline = [rank_of_process]

    assert "ByRank.__iter__ " in Stream(ByRank(9), 9).remark
    assert "rank_of_process " in Stream(InAList(), 9).remark
    assert "reads the rank" not in Stream(Numbers(9), 9).remark
    for plain in ((number for number in range(9)), map(abs, range(9)), Slotted()):
        assert "reads the rank" not in Stream(plain, 9).remark

    class Divided(Numbers):
        _distributed = SimpleNamespace(rank=1, world_size=2)  # as of split_dataset_by_node

    with pytest.raises(DataError, match=r"\b1 of 2\b"):
        as_stream(Divided(9), epoch_samples=5, max_steps=None)


def test_wrong_streams_are_refused() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise ValueError("line 2 is torn")

    with pytest.raises(ConfigError, match=r"\bBroken\b"):
        as_stream(Broken(), epoch_samples=None, max_steps=None)
    with pytest.raises(TaskError, match=r"DataLoader(.|\n)*fix: .*\bloader\.dataset"):
        lockstep.plan(Loading())
    once = Stream((number for number in range(3)), 10)
    assert once.__getitems__([0, 1, 2]) == [0, 1, 2]
    with pytest.raises(DataError, match=r"\bgenerator\b.*\nwhy: .* once"):
        once[3]
    with pytest.raises(SampleError, match=r"item 1 .*\bBroken\b"):
        Stream(Broken(), 10)[1]
    with pytest.raises(DataError, match=r"\bNumbers\b"):
        Stream(Numbers(0), 10)[0]


class Lines:
    """Numbers, of which some cannot be read: an iterator that goes on after an error."""

    torn = (7, 30, 31, 69)

    def __init__(self, items: int) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        def item(number: int) -> int:
            if number in self.torn:
                raise ValueError(f"line {number} is torn")
            return number

        return map(item, range(self.items))


def test_items_that_cannot_be_read_keep_their_number() -> None:
    stream = Stream(Lines(70), 70)
    for number in range(140):
        if number % 70 in Lines.torn:
            with pytest.raises(SampleError, match=rf"item {number} .*\bLines\b"):
                stream[number]
        else:
            assert stream[number] == number % 70


class Counted:
    alive = 0

    def __init__(self) -> None:
        Counted.alive += 1

    def __del__(self) -> None:
        Counted.alive -= 1


def test_a_rank_that_asks_for_nothing_does_not_keep_all_items(tmp_path: Path) -> None:
    class Endless:
        def __iter__(self) -> Iterator[Counted]:
            while True:
                yield Counted()

    stream = Stream(Endless(), 10**6)
    stream.begin(tmp_path, 1, World(0, 3, 0, 3), 0, 4, None)
    try:
        for step in range(500):
            assert len(stream.__getitems__(range(4 * step, 4 * step + 4))) == 4
            assert Counted.alive <= 4 * (LAG + 2)
    finally:
        stream.end()


class Items(Numbers):
    """Samples of the toy."""

    data = arrays(200, 1)

    def item(self, number: int) -> tuple[Tensor, Tensor]:
        if number == 1 and not RANKS:  # beyond what the plan looks at
            RANKS.append(self.opened)
        return self.data[0][number], self.data[1][number]


RANKS: list[int] = []


CONSTANT = {"name": "constant", "warmup_steps": 0}


class Streaming(Toy):
    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(Items(200), super().datasets().val)


class ByWorker(Items):
    """Divides itself among a loader's workers, as torch's documentation shows."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.item(number) for number in range(first, self.items, step))


class DividedByWorker(Toy):
    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(ByWorker(200), super().datasets().val)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_divides_itself_among_workers_gives_all_items(workers: int, tmp_path: Path) -> None:
    same: Any = {"training": {"max_steps": 10, "global_batch_size": 40}, "data": {"epoch_samples": 200}}
    whole, _ = attempt(Streaming, tmp_path / "whole", **same)
    divided, _ = attempt(
        DividedByWorker, tmp_path / "divided", **same | {"data": {"epoch_samples": 200, "num_workers": workers}}
    )
    assert all(torch.equal(whole[name], divided[name]) for name in whole)


class TornItems(Lines):
    data = arrays(200, 1)

    def __init__(self, items: int, *, ends: bool = False) -> None:
        super().__init__(items)
        self.ends = ends

    def __iter__(self) -> Iterator[Any]:
        found = ((self.data[0][number], self.data[1][number]) for number in super().__iter__())
        return found if self.ends else map(self.sample, super().__iter__())

    def sample(self, number: int) -> Any:
        return self.data[0][number], self.data[1][number]


class Tearing(Toy):
    ends = False

    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(TornItems(200, ends=self.ends), super().datasets().val)


class Ending(Tearing):
    ends = True


TORN: Any = {"training": {"max_steps": 8, "global_batch_size": 30}, "data": {"on_bad_row": "skip"}}


def skips(rank: int, size: int, folder: Path) -> Any:
    return attempt(Tearing, folder / "three", rank, size, scheduler=CONSTANT, **TORN)[0]


@pytest.mark.slow
def test_items_that_cannot_be_read_are_left_out_alike_on_one_and_three_ranks(tmp_path: Path) -> None:
    three = run_ranks(skips, 3, tmp_path)[0]
    one, events = attempt(Tearing, tmp_path / "one", scheduler=CONSTANT, **TORN)
    assert all(torch.allclose(one[name], three[name], atol=1e-5) for name in one)
    for run in ("one", "three"):
        rows = [row for file in (tmp_path / run).glob("skipped-rank*.jsonl") for row in read_jsonl(file)]
        assert sorted(row["index"] for row in rows) == [*Lines.torn, *(200 + number for number in Lines.torn[:3])]
    assert any(isinstance(event, Note) and event.key == "samples_skipped" and "7 " in event.text for event in events)
    with pytest.raises(LockstepError, match=r"line 7\b"):
        attempt(Tearing, tmp_path / "stops", training=TORN["training"])
    with pytest.raises(DataError, match=r"item 7 (.|\n)*\bwhy: "):
        attempt(Ending, tmp_path / "ends", **TORN)


class Torn(Items):
    """With a cursor; an iterator that goes on after an error."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.at += 1
        if self.at in (31, 32):
            raise ValueError("torn")
        return self.item((self.at - 1) % 200)


class TearingLater(Toy):
    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(Torn(200), super().datasets().val)


def test_a_resume_may_begin_with_items_that_cannot_be_read(tmp_path: Path) -> None:
    sections: Any = {"scheduler": CONSTANT, "data": {"on_bad_row": "skip", "epoch_samples": 20}}
    sections["training"] = {"max_steps": 30, "global_batch_size": 1}
    attempt(TearingLater, tmp_path, **sections)
    sections["training"]["max_steps"] = 34
    attempt(TearingLater, tmp_path, resume=True, **sections)
    assert [row["index"] for row in read_jsonl(tmp_path / "skipped-rank0.jsonl")] == [30, 31]


def runs(rank: int, size: int, folder: Path) -> int:
    """On three ranks: a run without an end, stopped between two steps of it; how often this rank read the stream."""
    sections: Any = {"telemetry": {"record_samples": True}, "checkpoint": {"every_steps": 3}, "scheduler": CONSTANT}
    attempt(Streaming, folder, rank, size, training={"max_steps": 8, "global_batch_size": 30}, **sections)
    return len(RANKS)


def test_three_ranks_and_then_one_see_every_item_once(tmp_path: Path) -> None:
    assert run_ranks(runs, 3, tmp_path / "run") == [1, 0, 0], "one rank reads"
    resumed, _ = attempt(Streaming, tmp_path / "run", resume=True, training={"max_steps": 20})
    plan = RunDir(tmp_path / "run").plan()
    assert plan["order"]["sampling"] == "in the order of the stream"
    assert any("stream" in note["text"] for note in plan["notes"])
    assert used_samples(RunDir(tmp_path / "run")) == {1: Counter(range(600))}
    whole, _ = attempt(
        Streaming, tmp_path / "whole", training={"max_steps": 20, "global_batch_size": 30}, scheduler=CONSTANT
    )
    for name in whole:
        assert torch.allclose(whole[name], resumed[name], atol=1e-5)


def test_a_shuffle_buffer_that_a_cursor_leaves_out_is_told() -> None:
    """As Hugging Face's streams have it, whose state_dict() says so only when it is loaded."""

    class Part:
        def __init__(self, inner: Any) -> None:
            self.ex_iterable = inner

    class BufferShuffledExamplesIterable(Part):
        pass

    class Cursor(Numbers):
        _ex_iterable = Part(BufferShuffledExamplesIterable(Part(None)))

    assert "shuffle" in Stream(Cursor(9), 9).remark
    assert "shuffle" not in Stream(Numbers(9), 9).remark
