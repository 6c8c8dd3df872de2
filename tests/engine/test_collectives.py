"""The same calls on one process and on several."""

from __future__ import annotations

import math
from typing import Any

from lockstep.engine.collectives import Collectives
from lockstep.hardware.world import World
from tests.gloo import run_ranks


def calls(rank: int, ranks: int) -> dict[str, Any]:
    c = Collectives(World(rank, ranks, rank, ranks))
    order: list[str] = []
    with c.main_first():
        order.append("body")
    c.barrier()
    return {
        "broadcast": c.broadcast({"from": rank}),
        "all_gather": c.all_gather(rank),
        "gather": c.gather(rank),
        "sum": c.sum(rank, 1.0),
        "mean": c.weighted_mean(float(rank), rank + 1.0),
        "nothing": math.isnan(c.weighted_mean(5.0, 0.0)),
        "any": (c.any(rank == ranks - 1), c.any(False)),
        "body": order,
    }


def expected(rank: int, ranks: int) -> dict[str, Any]:
    everyone = list(range(ranks))
    weights = [r + 1.0 for r in everyone]
    return {
        "broadcast": {"from": 0},
        "all_gather": everyone,
        "gather": everyone if rank == 0 else None,
        "sum": (sum(everyone), float(ranks)),
        "mean": sum(r * w for r, w in zip(everyone, weights, strict=True)) / sum(weights),
        "nothing": True,
        "any": (True, False),
        "body": ["body"],
    }


def test_one_process_answers_as_several_do() -> None:
    assert calls(0, 1) == expected(0, 1)
    assert run_ranks(calls, 3) == [expected(rank, 3) for rank in range(3)]


def failing_first(rank: int, ranks: int) -> str:
    c = Collectives(World(rank, ranks, rank, ranks))
    try:
        with c.main_first():
            if rank == 0:
                raise ValueError("the download broke")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_waiters_are_released_when_the_first_rank_fails() -> None:
    first, other = run_ranks(failing_first, 2)
    assert first == "ValueError: the download broke"
    assert "the first rank failed" in other


def lonely(rank: int, ranks: int) -> str:
    c = Collectives(World(rank, ranks, rank, ranks), timeout_s=2.0)
    if rank == 1:
        return "did not come"
    try:
        c.barrier()
    except RuntimeError:
        return "gave up"
    return "hung on"


def test_a_collective_that_one_rank_alone_calls_ends_in_an_error() -> None:
    assert run_ranks(lonely, 2, timeout_s=30.0)[0] == "gave up"
