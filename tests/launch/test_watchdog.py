"""Ranks that watch each other, in real processes; how a whole run ends by it is in tests/e2e/test_faults.py."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from lockstep.hardware.world import World
from lockstep.launch.hang import HangReport
from lockstep.launch.watchdog import Watchdog, main_stack
from lockstep.telemetry.pulse import Activity, pulse
from tests.gloo import run_ranks

TIMEOUT_S = 1.0
#: Bounds a failure.
PATIENCE_S = 60.0


def stand_still(rank: int, size: int, together: bool) -> dict[str, Any]:
    """Rank 1 is at something untimed for long, while rank 0 waits; then neither moves."""
    port = [0]
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if store is not None:
        port = [store.port]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("localhost", port[0], is_master=False)
    reports: list[tuple[HangReport, bool]] = []
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, launcher="torchrun")
    watchdog = Watchdog(
        world if together else World(), store if together else None, timeout_s=TIMEOUT_S,
        hung=lambda report, tells: reports.append((report, tells)),
    )  # fmt: skip
    pulse.at(Activity.FIRST_STEP, 0)
    pulse.at(Activity.COMPUTING_METRICS if rank == 1 else Activity.HOOKS, 3)
    watchdog.start()
    time.sleep(3 * TIMEOUT_S)
    early = len(reports)
    dist.barrier()
    pulse.at(Activity.HOOKS, 3)
    deadline = time.monotonic() + PATIENCE_S
    while not reports and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.barrier()
    watchdog.end()
    (report, tells) = reports[0]
    return {"early": early, "tells": tells, "ranks": [at.model_dump() for at in report.ranks]}


def test_nobody_hangs_while_one_is_at_something_long_and_all_hang_when_none_moves() -> None:
    outcomes = run_ranks(stand_still, 2, True)
    assert [outcome["early"] for outcome in outcomes] == [0, 0]
    assert [outcome["tells"] for outcome in outcomes] == [True, False]
    for outcome in outcomes:
        assert [at["rank"] for at in outcome["ranks"]] == [0, 1]
        for at in outcome["ranks"]:
            assert (at["step"], at["doing"], at["state"]) == (3, "hooks and logging after step 3", "running")
            assert at["silent_s"] >= TIMEOUT_S
            assert " in stand_still" in at["place"]


def test_one_rank_watches_itself() -> None:
    (outcome,) = run_ranks(stand_still, 1, False)
    assert outcome["tells"]
    assert [at["rank"] for at in outcome["ranks"]] == [0]


def test_the_stack_of_the_main_thread_begins_innermost() -> None:
    assert [frame.function for frame in main_stack()[:2]] == [
        "main_stack",
        "test_the_stack_of_the_main_thread_begins_innermost",
    ]
