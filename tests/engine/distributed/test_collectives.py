"""The same calls on one process and on several; a rank that does not come, or comes to another call, is named."""

from __future__ import annotations

import math
import re
from itertools import chain
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.engine.distributed.collectives import CheckedCollectives, Collectives, shared
from lockstep.errors import CollectiveError
from lockstep.hardware.world import World
from tests.gloo import run_ranks

KINDS = [Collectives, CheckedCollectives]


def world(rank: int, ranks: int) -> World:
    return World(rank, ranks, rank, ranks)


def tensors(c: Collectives, rank: int) -> list[Any]:
    whole, matrix = c.sum(torch.tensor([rank, 1]), torch.zeros(1, 2))
    return [*((one.tolist(), str(one.dtype)) for one in (whole, matrix)), *c.max(0.1)]


def of_any_strides(rank: int) -> list[torch.Tensor]:
    """Parts of a larger tensor, of which a rank's may have one row."""
    whole = torch.arange(24.0).reshape(4, 6) + 100 * rank
    kinds = [whole, whole.bfloat16(), whole > 10, torch.complex(whole, -whole).conj()]
    return [
        part for one in kinds for part in (one[:1, 0], one[:, 1], one.t()[:1, :1], one[:0, 2], one[::2, ::3], one[0, 0])
    ]


def calls(rank: int, ranks: int, kind: type[Collectives]) -> dict[str, Any]:
    c = kind(world(rank, ranks))
    order: list[str] = []
    with c.main_first():
        order.append("body")
    c.barrier()
    parts = [c.broadcast(of_any_strides(rank), ranks - 1), *(c.gather(of_any_strides(rank), ranks - 1) or ())]
    return {
        "parts": all(map(torch.equal, chain(*parts), chain(*map(of_any_strides, [ranks - 1, *range(len(parts) - 1)])))),
        "broadcast": c.broadcast({"from": rank}),
        "all_gather": c.all_gather(rank),
        "gather": c.gather(rank),
        "sum": c.sum(rank, 1.0),
        "tensors": tensors(c, rank),
        "extremes": (*c.min(rank), *c.max(float(rank)), *c.mean(float(rank))),
        "mean": c.weighted_mean(float(rank), rank + 1.0),
        "nothing": math.isnan(c.weighted_mean(5.0, 0.0)),
        "any": (c.any(rank == ranks - 1), c.any(False)),
        "body": order,
    }


def expected(rank: int, ranks: int) -> dict[str, Any]:
    everyone = list(range(ranks))
    weights = [r + 1.0 for r in everyone]
    return {
        "parts": True,
        "broadcast": {"from": 0},
        "all_gather": everyone,
        "gather": everyone if rank == 0 else None,
        "sum": (sum(everyone), float(ranks)),
        "tensors": [([sum(everyone), ranks], "torch.int64"), ([[0.0, 0.0]], "torch.float32"), 0.1],
        "extremes": (0.0, ranks - 1.0, sum(everyone) / ranks),
        "mean": sum(r * w for r, w in zip(everyone, weights, strict=True)) / sum(weights),
        "nothing": True,
        "any": (True, False),
        "body": ["body"],
    }


def every_kind(rank: int, ranks: int) -> list[dict[str, Any]]:
    return [calls(rank, ranks, kind) for kind in KINDS]


def test_one_process_answers_as_several_do(by_rank: list[dict[str, Any]]) -> None:
    assert every_kind(0, 1) == [expected(0, 1)] * 2
    assert [found["calls"] for found in by_rank] == [[expected(rank, 3)] * 2 for rank in range(3)]


def share_a_gradient(rank: int, ranks: int) -> list[str]:
    c, weight = Collectives(world(rank, ranks)), torch.ones(2, requires_grad=True)
    found = []
    for call in (c.all_gather, c.gather, c.broadcast):
        try:
            call(weight * rank)
        except CollectiveError as error:
            found.append(error.fix)
    return [*found, str(c.all_gather((weight * rank).detach()))]


def test_a_tensor_whose_gradient_would_be_lost_is_refused(by_rank: list[dict[str, Any]]) -> None:
    for found in by_rank:
        *refusals, sent = found["gradients"]
        assert len(refusals) == 3
        assert "lockstep.Session" in refusals[0]
        assert sent == "[tensor([0., 0.]), tensor([1., 1.]), tensor([2., 2.])]"


def test_outside_a_run_a_process_is_alone() -> None:
    c = lockstep.collectives()
    assert (c.rank, c.size, c.is_main, c.all_gather("x")) == (0, 1, True, ["x"])


def failing_first(rank: int, ranks: int) -> str:
    c = Collectives(world(rank, ranks))
    try:
        with c.main_first():
            if rank == 0:
                raise ValueError("the download broke")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_waiters_are_released_when_the_first_rank_fails(by_rank: list[dict[str, Any]]) -> None:
    first, *others = (found["first fails"] for found in by_rank)
    assert first.startswith("ValueError: ")
    assert all("the first rank failed" in other for other in others)


def error_of(rank: int, ranks: int, body: Any, timeout_s: float = 2.0) -> str | None:
    """What ``body(collectives)`` raises inside a run; outside of it, afterwards, a process is alone again."""
    try:
        with shared(world(rank, ranks), timeout_s):
            assert lockstep.collectives().size == ranks
            body(lockstep.collectives())
    except CollectiveError as error:
        return str(error)
    finally:
        assert lockstep.collectives().size == 1
    return None


def only_rank_0(c: Collectives) -> None:
    c.barrier()
    if c.is_main:
        c.all_gather("where are you?")


def all_but_rank_1(c: Collectives) -> None:
    if c.rank != 1:
        c.weighted_mean(1.0, 2.0)


def lonely(rank: int, ranks: int, body: Any) -> str | None:
    return error_of(rank, ranks, body)


def line_of(function: Any, offset: int) -> str:
    return f"test_collectives.py:{function.__code__.co_firstlineno + offset}"


def test_a_rank_that_does_not_come_is_named_with_its_last_call() -> None:
    error, other = run_ranks(lonely, 2, only_rank_0, timeout_s=30.0)
    assert other is None
    assert re.search(rf"rank 1 .* all_gather \(call 2, {line_of(only_rank_0, 3)}\) .*\b2 s", error)
    assert re.search(rf"why: rank 1 .* barrier \(call 1, {line_of(only_rank_0, 1)}\)", error)
    assert "\nfix: " in error


def test_every_rank_that_waits_names_the_one_that_has_made_no_call() -> None:
    errors = run_ranks(lonely, 3, all_but_rank_1, timeout_s=30.0)
    for error in (errors[0], errors[2]):
        assert re.match(r"rank 1 .* weighted_mean \(call 1, .*\nwhy: rank 1 .* no call", error)


def different(rank: int, ranks: int) -> list[str | None]:
    def names(c: Collectives) -> None:
        if c.is_main:
            c.barrier()
        else:
            c.gather(c.rank)

    def sources(c: Collectives) -> None:
        c.broadcast("mine", source=c.rank)

    def lengths(c: Collectives) -> None:
        c.sum(*[1.0] * (c.rank + 1))

    return [error_of(rank, ranks, body, timeout_s=20.0) for body in (names, sources, lengths)]


def test_different_calls_are_an_error_on_every_rank_at_once(by_rank: list[dict[str, Any]]) -> None:
    first, *others = (found["different"] for found in by_rank)
    assert others == [first] * 2
    names, sources, lengths = first
    line = different.__code__.co_firstlineno
    assert f"rank 0 barrier (call 1, test_collectives.py:{line + 3})" in names
    assert f"rank 1 gather to 0 (call 1, test_collectives.py:{line + 5})" in names
    assert re.search(r"rank 0 broadcast .*\b0\b", sources)
    assert re.search(r"rank 1 broadcast .*\b1\b", sources)
    assert re.search(r"rank 1 sum .*\b2\b", lengths)


def leaves(rank: int, ranks: int) -> str | None:
    def body(c: Collectives) -> None:
        if c.is_main:
            c.barrier()

    error = error_of(rank, ranks, body, timeout_s=600.0)
    dist.destroy_process_group()
    return error


def test_a_rank_that_has_left_is_named_without_waiting() -> None:
    error, _ = run_ranks(leaves, 2, timeout_s=30.0)
    assert re.search(r"rank 1 .* barrier\b.* connection", error)


def in_a_child(rank: int, ranks: int) -> str | None:
    def body(c: Collectives) -> None:
        context = get_context("fork")
        queue = context.SimpleQueue()

        def child() -> None:
            try:
                c.barrier()
            except CollectiveError as error:
                queue.put((c.rank, str(error)))

        process = context.Process(target=child)
        process.start()
        process.join()
        found.append(queue.get())
        c.barrier()

    found: list[tuple[int, str]] = []
    assert error_of(rank, ranks, body) is None
    number, error = found[0]
    assert number == rank
    return error


def test_a_child_of_a_rank_must_not_use_its_connections(by_rank: list[dict[str, Any]]) -> None:
    assert all("a child of one" in found["in a child"] for found in by_rank)


def everything(rank: int, ranks: int) -> dict[str, Any]:
    """What most tests look at; one start of processes for all of them."""
    return {
        "calls": every_kind(rank, ranks),
        "gradients": share_a_gradient(rank, ranks),
        "first fails": failing_first(rank, ranks),
        "different": different(rank, ranks),
        "in a child": in_a_child(rank, ranks),
    }


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return run_ranks(everything, 3)
