"""A small model's step in one all-reduce: numbers that ride along, when it is taken, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.data.loader import Request, Window
from lockstep.engine.flat import FIRST_BUCKET_BYTES, FlatStrategy, fits, pack, unpack
from lockstep.engine.precision import Precision
from lockstep.engine.strategy import Flags
from lockstep.engine.task import Loss, Task
from lockstep.launch.causes import find_cause
from tests.gloo import run_ranks

CPU = torch.device("cpu")


def summed(rows: list[list[float]]) -> list[float]:
    """As ranks sum them: in float32."""
    return np.asarray(rows, dtype=np.float32).sum(axis=0, dtype=np.float32).tolist()


@given(st.lists(st.integers(0, 2**36 // 64), min_size=1, max_size=64))
def test_any_counts_of_items_come_through_exactly(counts: list[int]) -> None:
    _, count, _ = unpack(summed([pack(0.0, float(n), Flags()) for n in counts]))
    assert count == sum(counts)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e9)), min_size=1, max_size=8))
def test_any_sums_come_through_to_rounding(ranks: list[tuple[float, float]]) -> None:
    total, count, flags = unpack(summed([pack(t, c, Flags(stop=1.0)) for t, c in ranks]))
    assert total == pytest.approx(sum(t for t, _ in ranks), rel=1e-6, abs=1e-30 + 1e-6 * max(abs(t) for t, _ in ranks))
    assert count == pytest.approx(sum(c for _, c in ranks), rel=1e-6, abs=1e-30)
    assert flags == Flags(stop=float(len(ranks)))


def test_it_is_for_models_that_fill_one_bucket() -> None:
    numbers = FIRST_BUCKET_BYTES // 4
    assert fits(nn.Linear(numbers, 1, bias=False), CPU)
    assert not fits(nn.Linear(numbers, 1), CPU)
    assert not fits(nn.Linear(2, 2).bfloat16(), CPU)
    assert not fits(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), CPU)
    assert not fits(nn.Linear(2, 2), torch.device("cuda"))
    assert not fits(nn.Linear(2, 2).requires_grad_(False), CPU)


class Half(Task):
    """Its loss leaves out the second layer where the batch says so."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, whole = batch
        return Loss((model(inputs) if whole else model[0](inputs)).sum(), len(inputs))


def strategy(rank: int) -> FlatStrategy:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank)  # type: ignore[operator, union-attr]
    return FlatStrategy(Half(), model, Precision("32", CPU, 1.0), CPU, seed=0, rank=rank, collective_forward=False)


def start(rank: int, ranks: int) -> Any:
    ours = strategy(rank)
    return {name: value.tolist() for name, value in ours.module.state_dict().items()}


def test_all_ranks_start_from_the_first_ones_weights_and_buffers() -> None:
    first, second = run_ranks(start, 2)
    assert first == second
    assert second["1.running_mean"] == [0.0, 0.0, 0.0]


def leave_out(rank: int, ranks: int) -> str:
    window = Window(0, 0, 4, (Request(0, 0, 2 * rank, 2 * rank + 2),), irregular=False)
    try:
        strategy(rank).gradients(window, iter([(torch.ones(2, 3), False)]), 0, Flags())
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    return ""


def test_a_parameter_without_a_gradient_is_refused_as_under_ddp() -> None:
    for message in run_ranks(leave_out, 2):
        cause = find_cause(message)
        assert cause is not None
        assert "find_unused_parameters" in cause.fix
