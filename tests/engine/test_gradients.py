"""Any split of a step over ranks and micro-batches gives the gradient of one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep import ArrayDataset, Loss, Task
from lockstep.data.requests import InOrder, Source, windows
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.engine.optim.precision import Precision
from lockstep.engine.strategies.base import Flags, Replica, Strategy
from lockstep.engine.strategies.ddp import DdpStrategy, FlatStrategy
from lockstep.planning import BatchPlan
from tests.gloo import run_ranks

CPU = torch.device("cpu")
Computed = Callable[[int], list[dict[str, Any]]]


class Weighted(Task):
    """Samples hold different numbers of items, so a mean of means would be wrong."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, items = batch
        errors = (model(inputs).squeeze(1) - 1.0) ** 2 * items
        return Loss(errors.sum(), items.sum())


def model_of(batchnorm: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8) if batchnorm else nn.Identity()
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 1)).double()


def data_of(samples: int) -> ArrayDataset:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    items = torch.randint(1, 9, (samples,), generator=generator).double()
    return ArrayDataset(inputs, items)


def gradients(
    rank: int, ranks: int, plan: BatchPlan, batchnorm: bool, poison: bool = False, flat: bool = False
) -> list[list[torch.Tensor]]:
    """The true gradient (sum over count) of every step of one epoch, at fixed weights."""
    model = model_of(batchnorm)
    if batchnorm and ranks > 1:
        model = convert(model, None)
    precision = Precision("32", CPU, 2.0**-4)
    dataset = data_of(plan.samples)
    if poison:
        dataset.tensors[0][0] = float("inf")
    strategy: Strategy
    replica = Replica(Weighted(), model, precision, CPU, 0, rank)
    if ranks == 1:
        strategy = Strategy(replica)
    elif flat:
        strategy = FlatStrategy(replica)
    else:
        strategy = DdpStrategy(replica)
    source = Source(dataset, Weighted().collate, 0, InOrder())
    found = []
    for step, window in enumerate(windows(plan, rank=rank, epoch=0, position=0, epochs=1, ghosts=batchnorm)):
        batches = (source.batch(request) for request in window.requests)
        reduced = strategy.gradients(window, batches, step, Flags())
        factor = reduced.divisor / (precision.seed_value() * float(reduced.count))
        found.append([p.grad * factor for p in model.parameters() if p.grad is not None])
    return found


def cases(ranks: int, number: int) -> list[BatchPlan]:
    draw = random.Random(ranks)
    plans = []
    for _ in range(number):
        batch, accumulate = draw.randint(1, 5), draw.randint(1, 3)
        plans.append(
            BatchPlan(
                samples=draw.randint(2, 4 * ranks * batch * accumulate),
                global_batch=batch * accumulate * ranks,
                batch_size=batch,
                accumulate=accumulate,
                ranks=ranks,
                least_window=2,
            )
        )
    return plans


def synchronised_cases(ranks: int) -> list[BatchPlan]:
    """Windows of every size from two samples on: with fewer samples than ranks one of them replays a ghost.

    A sample too few for a step joins the one before, and several micro-batches are those of one process.
    """
    sizes = [(4, 1, samples) for samples in (2, 3, 4 * ranks, 4 * ranks + 1, 4 * ranks + 2, 4 * ranks + 3)]
    sizes += [(batch, 2, samples) for batch in (1, 3) for samples in (ranks + 1, 2 * batch * ranks + 1, 11)]
    return [
        BatchPlan(
            samples=samples, global_batch=batch * accumulate * ranks, batch_size=batch, accumulate=accumulate,
            ranks=ranks, least_window=2,
        )
        for batch, accumulate, samples in sizes
    ]  # fmt: skip


#: Of three ranks, one has no sample of the last step, or two have none of the only one.
POISONED = [BatchPlan(samples=n, global_batch=6, batch_size=2, accumulate=1, ranks=3) for n in (7, 1)]


def computed(rank: int, ranks: int) -> dict[str, Any]:
    """What a rank computes of the cases of that many ranks, by DDP and in one all-reduce."""
    torch.set_num_threads(1)
    plain, synchronised = cases(ranks, 12), synchronised_cases(ranks) if ranks < 4 else []
    found: dict[str, Any] = {
        name: [gradients(rank, ranks, plan, batchnorm, flat=flat) for flat in (False, True) for plan in plans]
        for name, plans, batchnorm in (("plain", plain, False), ("synchronised", synchronised, True))
    }
    found["poisoned"] = [poisoned(rank, ranks, plan) for plan in POISONED if ranks == 3]
    found["reductions"] = [count_reductions(rank, ranks, accumulate) for accumulate in (1, 4) if ranks == 2]
    return found


@pytest.fixture(scope="module")
def by_rank() -> Computed:
    """What each of N ranks computes; they are started once."""
    return cache(lambda ranks: run_ranks(computed, ranks, timeout_s=120.0))


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-12)


def poisoned(rank: int, ranks: int, plan: BatchPlan) -> list[list[bool]]:
    return [
        [all(torch.isfinite(g).all().item() for g in step) for step in gradients(rank, ranks, plan, False, True, flat)]
        for flat in (False, True)
    ]


def count_reductions(rank: int, ranks: int, accumulate: int) -> int:
    plan = BatchPlan(
        samples=8 * accumulate, global_batch=8 * accumulate, batch_size=4, accumulate=accumulate, ranks=ranks
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        gradients(rank, ranks, plan, False)
    dist.barrier()
    return sum(event.count for event in profile.key_averages() if event.key == "gloo:all_reduce")


@pytest.mark.parametrize("ranks", [2, 3, *(pytest.param(ranks, marks=pytest.mark.drill) for ranks in (4, 5))])
def test_any_split_gives_the_gradient_of_one_process(by_rank: Computed, ranks: int) -> None:
    for index, plan in enumerate(2 * cases(ranks, 12)):
        alone = gradients(0, 1, plan.model_copy(update={"ranks": 1}), False)
        for rank in range(ranks):
            found = by_rank(ranks)[rank]["plain"][index]
            assert len(found) == len(alone)
            for ours, theirs in zip(found, alone, strict=True):
                assert_equal(ours, theirs)


@pytest.mark.parametrize("ranks", [2, 3])
def test_synchronised_batchnorm_gives_the_gradient_of_the_whole_batch(by_rank: Computed, ranks: int) -> None:
    for index, plan in enumerate(2 * synchronised_cases(ranks)):
        whole = plan.model_copy(update={"ranks": 1, "batch_size": plan.batch_size * ranks, "least_part": 2})
        alone = gradients(0, 1, whole, True)
        for rank in range(ranks):
            for ours, theirs in zip(by_rank(ranks)[rank]["synchronised"][index], alone, strict=True):
                assert_equal(ours, theirs)


def test_an_infinite_sample_on_one_rank_is_seen_by_all_ranks_and_by_the_empty_ones(by_rank: Computed) -> None:
    for found in by_rank(3):
        assert found["poisoned"] == [[[False, True]] * 2, [[False]] * 2]


def test_accumulation_reduces_once_however_many_micro_batches_there_are(by_rank: Computed) -> None:
    one, four = by_rank(2)[0]["reductions"]
    assert one == four > 0
