"""Ranks that watch each other, in real processes; how a whole run ends by it is in tests/e2e/test_faults.py."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.hardware.world import World
from lockstep.launch.failure.hang import HangReport
from lockstep.launch.failure.watchdog import Watchdog, main_stack
from lockstep.launch.process.rank_log import log_file, stacks_on_request
from lockstep.rundir.heartbeat import Activity, pulse
from tests.gloo import run_ranks

TIMEOUT_S = 1.0
#: Bounds a failure.
PATIENCE_S = 60.0


def stand_still(rank: int, size: int, logs: Path) -> dict[str, Any]:
    """Rank 1 is at something untimed for long, while rank 0 waits; then neither moves; at last each watches alone."""
    port = [0]
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if store is not None:
        port = [store.port]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("localhost", port[0], is_master=False)
    reports: list[HangReport] = []
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, launcher="torchrun")
    watchdog = Watchdog(world, store, timeout_s=TIMEOUT_S, hung=reports.append, logs=logs)
    pulse.at(Activity.FIRST_STEP, 0)
    pulse.at(Activity.COMPUTING_METRICS if rank == 1 else Activity.HOOKS, 3)
    watchdog.start()
    time.sleep(3 * TIMEOUT_S)
    early = len(reports)
    dist.barrier()
    pulse.at(Activity.HOOKS, 3)
    wait_for(reports)
    dist.barrier()
    watchdog.end()
    pulse.at(Activity.HOOKS)
    alone = Watchdog(World(), None, timeout_s=TIMEOUT_S, hung=reports.append, logs=logs)
    alone.start()
    wait_for(reports, 2)
    alone.end()
    report, by_itself = reports
    ranks = [at.model_dump() for at in report.ranks]
    found = {"early": early, "by": report.by, "ranks": ranks, "alone": (by_itself.by, len(by_itself.ranks))}
    found["states"] = states_with_rank_1_stopped(world, dist.PrefixStore("stopped", store), logs)
    holding = place_of_rank_1_that_holds_the_interpreter(world, dist.PrefixStore("holding", store), logs)
    return found | {"holding": holding}


def place_of_rank_1_that_holds_the_interpreter(world: World, store: dist.Store, logs: Path) -> str:
    """As rank 0 sees it, soon after an activity of unknown length."""
    reports: list[HangReport] = []
    pulse.at(Activity.COMPUTING_METRICS, 4)
    watchdog = Watchdog(world, store, timeout_s=TIMEOUT_S, hung=reports.append, logs=logs)
    watchdog.start()
    dist.barrier()
    pulse.at(Activity.HOOKS, 5)
    time.sleep(0.2)
    if world.is_main:
        wait_for(reports)
    else:
        with log_file(logs, world.rank).open("a") as log, stacks_on_request(log):
            ctypes.PyDLL(None).sleep(int(PATIENCE_S))  # until it is asked for its stack
    dist.barrier()
    watchdog.end()
    return reports[0].ranks[1].place if world.is_main else ""


def states_with_rank_1_stopped(world: World, store: dist.Store, logs: Path) -> list[str]:
    """As rank 0 sees them."""
    reports: list[HangReport] = []
    pulse.at(Activity.HOOKS, 4)
    watchdog = Watchdog(world, store, timeout_s=TIMEOUT_S, hung=reports.append, logs=logs)
    watchdog.start()
    pids: list[int] = [0] * world.size
    dist.all_gather_object(pids, os.getpid())
    if world.is_main:
        os.kill(pids[1], signal.SIGSTOP)
        wait_for(reports)
        os.kill(pids[1], signal.SIGCONT)
    dist.barrier()
    watchdog.end()
    return [at.state for at in reports[0].ranks] if world.is_main else []


def wait_for(reports: list[HangReport], count: int = 1) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(reports) < count and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.slow
def test_nobody_hangs_while_one_is_at_something_long_and_all_hang_when_none_moves(tmp_path: Path) -> None:
    outcomes = run_ranks(stand_still, 2, tmp_path)
    assert [outcome["early"] for outcome in outcomes] == [0, 0]
    assert outcomes[0]["by"] == outcomes[1]["by"], "the ranks end with one report"
    assert outcomes[0]["states"] == ["running", "stopped"]
    assert " in place_of_rank_1_that_holds_the_interpreter" in outcomes[0]["holding"]
    for outcome in outcomes:
        assert [at["rank"] for at in outcome["ranks"]] == [0, 1]
        for at in outcome["ranks"]:
            assert (at["step"], at["doing"], at["state"]) == (3, "hooks and logging after step 3", "running")
            assert at["silent_s"] >= TIMEOUT_S
            assert " in wait_for" in at["place"]
        assert outcome["alone"] == (0, 1)


def test_the_stack_of_the_main_thread_begins_innermost() -> None:
    assert [frame.function for frame in main_stack()[:2]] == [
        "main_stack",
        "test_the_stack_of_the_main_thread_begins_innermost",
    ]
