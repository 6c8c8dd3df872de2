"""A small model's step in one all-reduce: numbers that ride along, when it is taken, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep import Loss, Task
from lockstep.config import OptimizerConfig, RunConfig
from lockstep.data.requests import BatchRequest, Window
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision
from lockstep.engine.rank_context import RankContext
from lockstep.engine.strategies.base import Flags, Replica
from lockstep.engine.strategies.build import build_strategy
from lockstep.engine.strategies.ddp import FlatStrategy, joint_bytes
from lockstep.engine.strategies.reducers import pack, unpack
from lockstep.hardware.world import World
from lockstep.planning import Plan, Schedule
from lockstep.planning.decision import Decision
from tests.gloo import run_ranks
from tests.updates import update_for_model

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


def test_contiguous_parameters_of_one_kind_share_a_message() -> None:
    assert joint_bytes(nn.Linear(5, 1, bias=False)) == 20
    assert joint_bytes(nn.Linear(2, 2).double()) == 48
    assert joint_bytes(nn.Linear(2, 2).bfloat16()) == 0
    assert joint_bytes(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())) == 0
    assert joint_bytes(nn.Linear(2, 2).requires_grad_(False)) == 0
    assert joint_bytes(channels_last()) == 0


class Half(Task):
    """Its loss leaves out the second layer where the batch says so."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, whole = batch
        return Loss((model(inputs) if whole else model[0](inputs)).sum(), len(inputs))


def strategy(rank: int) -> FlatStrategy:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank)  # type: ignore[operator, union-attr]
    return FlatStrategy(Replica(Half(), model, Precision("32", CPU, 1.0), CPU, 0, rank))


class Squares(Task):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))


def channels_last() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def three_steps(rank: int, ranks: int) -> list[Tensor]:
    """The weights of a channels_last model afterwards, trained as the plan of so many devices says."""
    model, precision = channels_last(), Precision("32", CPU, 1.0)
    plan = Plan.model_construct(
        seed=0,
        decisions={"reproducibility": Decision("reproducibility", "", "fast", "")},
        placement={"strategy": "ddp" if ranks > 1 else "single", "world_size": ranks},
    )
    nothing: Any = None
    context = RankContext(nothing, World(rank, ranks, rank, ranks), RunConfig(), plan, CPU, nothing)
    trained = build_strategy(context, Squares(), model, precision, None)
    schedule = Schedule(name="constant", lr=0.01, total_steps=3, steps_per_epoch=3)
    update = update_for_model(model, build_optimizer(OptimizerConfig(), model, 0.01), schedule, precision, None)
    inputs = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    start, stop = (4 // ranks * number for number in (rank, rank + 1))
    for step in range(3):
        window = Window(step, 0, 4, (BatchRequest(step, 0, start, stop),), irregular=False)
        reduced = trained.gradients(window, iter([inputs[start:stop]]), step, Flags())
        update.apply(step, reduced.count, reduced.divisor, want_norm=False)
    return [parameter.detach() for parameter in model.parameters()]


def begin(rank: int, ranks: int) -> Any:
    ours = strategy(rank)
    return {name: value.tolist() for name, value in ours.module.state_dict().items()}


def on_each_rank(rank: int, ranks: int) -> tuple[Any, list[Tensor], list[bool]]:
    return begin(rank, ranks), three_steps(rank, ranks), leave_out(rank, ranks)


@pytest.fixture(scope="module")
def by_rank() -> list[tuple[Any, list[Tensor], list[bool]]]:
    return run_ranks(on_each_rank, 2)


def test_all_ranks_start_from_the_first_ones_weights_and_buffers(by_rank: list[Any]) -> None:
    first, second = (found[0] for found in by_rank)
    assert first == second
    assert second["1.running_mean"] == [0.0, 0.0, 0.0]


def test_a_channels_last_model_is_trained_as_on_one_device(by_rank: list[Any]) -> None:
    for _, weights, _ in by_rank:
        torch.testing.assert_close(weights, three_steps(0, 1))


def leave_out(rank: int, ranks: int) -> list[bool]:
    """Which parameters have a gradient, when the second layer is used by rank 1 alone, or by none."""
    ours, found = strategy(rank), []
    for used in (rank == 1, False):
        window = Window(0, 0, 4, (BatchRequest(0, 0, 2 * rank, 2 * rank + 2),), irregular=False)
        ours.gradients(window, iter([(torch.ones(2, 3), used)]), 0, Flags())
        found.append(all(p.grad is not None for p in ours.module[1].parameters()))  # type: ignore[index]
    return found


def test_a_parameter_has_a_gradient_where_any_rank_used_it(by_rank: list[Any]) -> None:
    assert [found for _, _, found in by_rank] == [[True, False]] * 2
