"""Every rank's step time and memory: who is slow, and what reaches the run folder."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lockstep
from lockstep.config import RunConfig
from lockstep.engine.diagnostics.stragglers import (
    JUDGED_ROWS,
    OwnTime,
    RankWatch,
    Throughput,
    memory,
    slow_rank,
)
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.rank_context import RankContext
from lockstep.events import Note, RanksLogged, RankState
from lockstep.hardware.world import World
from lockstep.planning import Plan
from lockstep.rundir.folder import RunDir
from tests.attempts import attempt
from tests.fakes import RecordingSink
from tests.gloo import run_ranks
from tests.toys import Toy


def rows(*own_ms: float, step_ms: float = 50.0, wait_ms: float = 0.0) -> list[list[RankState]]:
    """As many equal rows as a verdict needs."""
    states = [
        RankState(rank, step_ms / 1e3, wait_ms / 1e3, own / 1e3, 1.0, None, 1.0) for rank, own in enumerate(own_ms)
    ]
    return [states] * JUDGED_ROWS


@pytest.mark.parametrize(
    ("own_ms", "slow"),
    [
        ((30.0, 45.0), 1),
        ((45.0, 30.0, 30.0, 31.0), 0),
        ((30.0, 36.0), None),  # within the noise of a machine
        ((3.0, 5.0), None),  # more than that, but nothing to a step of 50 ms
        ((30.0,), None),
    ],
)
def test_the_slow_rank_is_the_one_that_works_longest(own_ms: tuple[float, ...], slow: int | None) -> None:
    assert (slow_rank(rows(*own_ms)) or (None, ""))[0] == slow


def test_a_single_slow_step_says_nothing() -> None:
    even, odd = rows(30.0, 30.0)[0], rows(30.0, 90.0)[0]
    assert slow_rank([even, odd, even, odd, even]) is None
    assert slow_rank([odd] * (JUDGED_ROWS - 1)) is None


@given(st.lists(st.floats(1e-4, 10.0), min_size=2, max_size=8), st.integers(0, 7))
def test_any_rank_that_takes_twice_as_long_as_all_is_named(own: list[float], place: int) -> None:
    place %= len(own)
    own[place] = 2 * max(own) + 0.01
    states = [RankState(rank, own[place], 0.0, value, 1.0, None, 1.0) for rank, value in enumerate(own)]
    found = slow_rank([states] * JUDGED_ROWS)
    assert found is not None
    assert found[0] == place


def test_the_message_names_rank_and_times_and_the_input_when_that_is_it() -> None:
    message = "rank 1 is slow: it works 45 ms on a step, the others 30 ms, and they wait for it"
    assert slow_rank(rows(30.0, 45.0)) == (1, message)
    assert "45 ms on a step (12 ms of it waiting for input)" in str(slow_rank(rows(30.0, 45.0, wait_ms=12.0)))


def test_own_time_ends_with_the_last_gradient_and_leaves_no_hook() -> None:
    model = nn.Linear(2, 1)
    own = OwnTime(model.parameters, torch.device("cpu"))
    own.start()
    before = time.perf_counter()
    model(torch.ones(1, 2)).backward()
    time.sleep(0.05)  # waiting for others
    assert 0 < own.stop() <= time.perf_counter() - before
    model(torch.ones(1, 2)).backward()
    assert own.stop() != own.stop(), "no gradient was seen: not a number"
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_other_processes_on_the_core_are_no_work_of_the_rank() -> None:
    cores = os.sched_getaffinity(0)
    core = {min(cores)}
    model = nn.Linear(400, 400)
    own = OwnTime(model.parameters, torch.device("cpu"))
    os.sched_setaffinity(threading.get_native_id(), core)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for process in busy:
            os.sched_setaffinity(process.pid, core)
        own.start()
        wall_s = time.perf_counter()
        cpu_s = time.thread_time()
        while time.thread_time() - cpu_s < 0.3:
            math.sqrt(2.0)
        model(torch.ones(1, 400)).sum().backward()
        cpu_s = time.thread_time() - cpu_s
        wall_s = time.perf_counter() - wall_s
        own_s = own.stop()
    finally:
        os.sched_setaffinity(threading.get_native_id(), cores)
        for process in busy:
            process.kill()
            process.wait()
    assert wall_s > 1.5 * cpu_s, "the others had the core, too"
    assert own_s == pytest.approx(cpu_s, rel=0.2)


def test_a_step_takes_the_time_since_the_last_row_also_after_an_epochs_end() -> None:
    now, heard = 0.0, RecordingSink()
    speed = Throughput(clock=lambda: now)
    place = RunDir(Path()), World(), RunConfig(), Plan.model_construct(), torch.device("cpu"), Collectives(World())
    watch = RankWatch(RankContext(*place, sink=heard), tuple, speed, step=0)
    for step in range(1, 101):
        now += 2.0
        speed.add(32, waited_s=0.5)
        if step % 50 == 0:
            watch.log(step, 1 + step // 40)
        if step % 40 == 0:
            watch.end_epoch(step, step // 40)
    found = [event for event in heard.events if isinstance(event, RanksLogged)]
    assert [event.step for event in found] == [40, 50, 80, 100]
    assert [event.ranks[0].step_s for event in found] == pytest.approx([2.0] * 4)
    assert [event.ranks[0].wait_s for event in found] == pytest.approx([0.5] * 4)


def test_memory_of_a_process() -> None:
    used, reserved, peak = memory(torch.device("cpu"))
    assert 10e6 < used <= peak
    assert reserved != reserved, "only GPUs reserve"


@pytest.mark.gpu
def test_memory_and_own_time_of_a_gpu() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)  # of tests before, whose memory may have gone back
    model = nn.Linear(1024, 1024, device=device)
    own = OwnTime(model.parameters, device)
    own.start()
    model(torch.ones(64, 1024, device=device)).sum().backward()
    assert own.stop() > 0
    used, reserved, peak = memory(device)
    assert 4 * 1024**2 <= used <= peak <= reserved


class Lame(Toy):
    """Rank 1 takes its time in each forward pass."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        if model.training and os.environ.get("RANK") == "1":
            time.sleep(0.05)
        return super().loss(model, batch)


@pytest.mark.slow
def test_a_run_names_its_slow_rank_and_shows_every_ranks_memory(on_two: Trained) -> None:
    found = RunDir.open(on_two.lame).ranks()
    assert [row["step"] for row in found] == list(range(1, 15))
    assert {row["epoch"] for row in found} == {1, 2}
    for row in found:
        assert [state["rank"] for state in row["ranks"]] == [0, 1]
        for state in row["ranks"]:
            assert 0 < state["memory_gb"] <= state["peak_gb"]
            assert state["step_s"] > 0
    assert found[-1]["ranks"][1]["own_s"] >= 0.05
    assert found[-1]["slow_rank"] == 1
    assert len(on_two.warnings) == 1
    assert on_two.warnings[0].startswith("rank 1 ")


def test_one_process_writes_its_epochs_memory(tmp_path: Path) -> None:
    config = {"save_dir": str(tmp_path / "run"), "hardware": {"selected_devices": "cpu"}}
    config["telemetry"] = {"log_interval": 1000, "tensorboard": "off", "progress": "off"}
    lockstep.train(Toy, config)
    found = RunDir.open(tmp_path / "run").ranks()
    assert [(row["step"], row["epoch"], len(row["ranks"])) for row in found] == [(13, 1, 1), (26, 2, 1)]
    assert {row["ranks"][0]["own_s"] for row in found} == {None}
    assert list((tmp_path / "run").glob("system-0.jsonl"))


class FrozenFirst(Toy):
    """Fine-tuning: the first layer keeps its weights."""

    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule("0").requires_grad_(False)
        return model


class Trained(NamedTuple):
    """What two ranks trained: the weights with a frozen layer, the folder of a run with a slow rank, its warnings."""

    frozen: list[dict[str, Any]]
    lame: Path
    warnings: list[str]


def trained(rank: int, ranks: int, folder: Path) -> Trained:
    kinds = ({}, {"distributed": {"bucket_cap_mb": 1}}, {"training": {"reproducibility": "exact"}})
    frozen = [
        attempt(FrozenFirst, folder / str(number), rank, ranks, **sections)[0] for number, sections in enumerate(kinds)
    ]
    _, events = attempt(Lame, folder / "lame", rank, ranks)
    notes = [event.text for event in events if isinstance(event, Note) and event.level == "warning"]
    return Trained(frozen, folder / "lame", notes)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    result: Trained = run_ranks(trained, 2, tmp_path_factory.mktemp("two"))[0]
    return result


def test_frozen_parameters_train_on_several_ranks_as_on_one(on_two: Trained, tmp_path: Path) -> None:
    """In one all-reduce, under DDP and in exact mode; every step is logged, so ranks time their own work."""
    alone, _ = attempt(FrozenFirst, tmp_path / "alone", training={"batch_size": 32})
    for found in on_two.frozen:
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value)


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
    speed.unpause()
    speed.pause()
    clock.now += 30
    speed.pause()
    clock.now += 30
    speed.unpause()
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
