"""A user's loaders in Lockstep's order: pure arithmetic, for any numbers."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep.data.loader import loader_processes
from lockstep.engine.state import TrainState
from lockstep.errors import ConfigError, DataError, UnsupportedError
from lockstep.hardware.world import World
from lockstep.lightning.dataloaders import (
    SharedBatches,
    TrainingLoader,
    epoch_steps,
    evaluation_loader,
)
from lockstep.planning.batch import BatchPlan, resolve_batch

SMALL = st.integers(1, 6)


def batch_plan(
    samples: int,
    ranks: int,
    batch_size: int,
    accumulate: int,
    *,
    has_batchnorm: bool = False,
    global_batch_size: int | None = None,
) -> BatchPlan:
    return resolve_batch(
        samples=samples,
        ranks=ranks,
        devices_per_rank=1,
        batch_size=batch_size,
        accumulate=accumulate,
        global_batch_size=global_batch_size,
        tail="spread",
        lanes=None,
        has_batchnorm=has_batchnorm,
        sync_batchnorm=False,
        even=True,
    )[0]


@given(
    more=st.integers(0, 200),
    ranks=SMALL,
    batch_size=SMALL,
    accumulate=SMALL,
    has_batchnorm=st.booleans(),
    held=st.none() | st.integers(1, 40),
    data=st.data(),
)
@example(more=56, ranks=1, batch_size=1, accumulate=8, has_batchnorm=True, held=None, data=None)
@example(more=60, ranks=2, batch_size=1, accumulate=1, has_batchnorm=False, held=3, data=None)
def test_ranks_share_every_step_evenly_and_each_sample_is_taken_once(
    more: int,
    ranks: int,
    batch_size: int,
    accumulate: int,
    has_batchnorm: bool,
    held: int | None,
    data: st.DataObject | None,
) -> None:
    """``held``: the global batch of a run that goes on with other devices."""
    least = 2 if has_batchnorm else 1
    global_batch = held or ranks * batch_size * accumulate
    samples = ranks * accumulate * least + global_batch + more
    if global_batch < ranks * least:
        with pytest.raises(ConfigError) as caught:
            batch_plan(samples, ranks, batch_size, accumulate, has_batchnorm=has_batchnorm, global_batch_size=held)
        assert caught.value.fix
        return
    plan = batch_plan(samples, ranks, batch_size, accumulate, has_batchnorm=has_batchnorm, global_batch_size=held)
    assert plan.global_batch == global_batch
    assert len(list(epoch_steps(plan, 0, 0))) == plan.steps_per_epoch
    first = data.draw(st.integers(0, plan.steps_per_epoch - 1)) if data else 0
    position = list(epoch_steps(plan, 0, 0))[first].start
    taken = []
    walks = [list(epoch_steps(plan, rank, position)) for rank in range(ranks)]
    for steps in zip(*walks, strict=True):
        assert {len(step.micro_batches) for step in steps} == {plan.accumulate}
        sizes = [stop - start for step in steps for start, stop in step.micro_batches]
        assert min(sizes) >= least
        # What is too little for a step of its own joins the one before.
        assert max(sizes) <= plan.batch_size + least + 1
        taken += [number for step in steps for span in step.micro_batches for number in range(*span)]
    assert sorted(taken) == list(range(position, samples))


def test_the_rest_of_an_epoch_that_other_devices_have_left_must_be_enough_for_every_micro_batch() -> None:
    """Fewer would be scaled as all of them: Lightning divides each loss by their number."""
    plan = batch_plan(samples=25, ranks=3, batch_size=2, accumulate=1, global_batch_size=10)
    with pytest.raises(DataError, match=r"5 samples.* 3 ranks, .*\b2 micro-batch") as caught:
        list(epoch_steps(plan, 0, 20))
    assert "devices" in caught.value.fix
    alone = batch_plan(samples=25, ranks=1, batch_size=2, accumulate=1, global_batch_size=10)
    assert [len(step.micro_batches) for step in epoch_steps(alone, 0, 20)] == [5]


@given(st.integers(1, 200), SMALL, SMALL, st.booleans())
def test_evaluation_counts_each_sample_once_in_the_loaders_own_batches(
    samples: int, batch_size: int, ranks: int, drop_last: bool
) -> None:
    worlds = [World(rank=rank, size=ranks) for rank in range(ranks)]
    loader = DataLoader(range(samples), batch_size, drop_last=drop_last)  # type: ignore[arg-type]
    whole = [batch.tolist() for batch in loader]
    if ranks > 1 and sum(map(len, whole)) < ranks:
        with pytest.raises(DataError, match=rf"\b{worlds[0].size} ranks"):
            SharedBatches(samples, batch_size, worlds[0], drop_last=drop_last)
        return
    shares = [SharedBatches(samples, batch_size, world, drop_last=drop_last) for world in worlds]
    dealt = [batch for turn in zip_longest(*shares) for batch in turn if batch is not None]
    lengths = [len(share) for share in shares]
    assert [*chain(*dealt)] == [*chain(*whole)], "in index order, to the ranks in turn"
    assert max(lengths) - min(lengths) <= 1
    assert all(share.rounds == min(lengths) and share.is_even == (len(set(lengths)) == 1) for share in shares)
    if len(whole) >= ranks or ranks == 1:
        assert dealt == whole
    else:
        assert lengths == [1] * ranks and all(share.is_cut for share in shares)


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


OWN_BATCHES = BatchSampler(RandomSampler(range(4)), 2, drop_last=False)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("loader", "size"),
    [
        (DataLoader(numbers(8), batch_sampler=[[0, 1, 2], [3, 4, 5], [6]]), 3),
        (DataLoader(numbers(8), batch_sampler=BatchSampler(RandomSampler(range(8)), 4, drop_last=False)), 4),
        ([DataLoader(numbers(4), batch_size=2), DataLoader(numbers(4), batch_size=3)], 5),
        (DataLoader(numbers(4), batch_size=None), 1),
    ],
)
def test_samples_of_a_loader_in_its_own_order_are_counted(loader: Any, size: int) -> None:
    assert TrainingLoader(loader, ranks=1).batch_size == size


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(Stream()), "iterable"),
        ([DataLoader(numbers(4)), DataLoader(numbers(4))], "ConcatDataset"),
        (DataLoader(numbers(4), batch_sampler=[[0, 1], [2, 3]]), "list"),
        (DataLoader(numbers(4), batch_sampler=OWN_BATCHES), "BatchSampler"),
    ],
)
def test_a_loader_whose_order_cannot_be_lockstep_s_is_refused(loader: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        TrainingLoader(loader, ranks=2)
    assert TrainingLoader(loader, ranks=1).keeps_order


def test_torchs_weighted_sampler_is_taken_over_on_any_number_of_ranks() -> None:
    sampler = WeightedRandomSampler([0.0, 1.0, 3.0, 0.0], 24)
    loader = DataLoader(numbers(4), batch_size=2, sampler=sampler)
    training = TrainingLoader(loader, ranks=3)
    assert not training.keeps_order
    drawn = []
    for ranks in (1, 3):
        plan = BatchPlan(samples=24, global_batch=6, batch_size=6 // ranks, accumulate=1, ranks=ranks)
        worlds = [World(rank, ranks, rank, ranks) for rank in range(ranks)]
        loaders = [training.planned(plan, 7, world, TrainState()) for world in worlds]
        steps = zip(*(mine.batch_sampler for mine in loaders), strict=True)  # type: ignore[union-attr]
        drawn.append([index for step in steps for batch in step for index in batch])
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {1, 2}


@pytest.mark.parametrize("own", [{"sampler": WeightedRandomSampler([1.0] * 4, 4)}, {"batch_sampler": OWN_BATCHES}])
def test_an_evaluation_loader_with_a_sampler_of_its_own_stays_on_one_rank_and_is_refused_on_two(
    own: dict[str, Any],
) -> None:
    loader = DataLoader(numbers(4), **own)
    assert evaluation_loader(loader, World(), 1) is loader
    with pytest.raises(UnsupportedError, match=r"\w+Sampler"):
        evaluation_loader(loader, World(size=2, local_size=2), 1)


class RandomInWorkers(TensorDataset):
    """What an augmentation in a worker draws from each library."""

    def __getitem__(self, index: int) -> Any:
        import random

        import numpy as np

        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def test_workers_and_generators_are_seeded_by_run_and_rank() -> None:
    def draws(rank: int) -> list[list[float]]:
        loader = DataLoader(RandomInWorkers(torch.zeros(4)), batch_size=2, num_workers=1)
        shared = evaluation_loader(loader, World(rank=rank, size=2, local_size=2), seed=7)
        with loader_processes():
            return [row for batch in shared for row in batch.tolist()]

    first = draws(0)
    assert draws(0) == first, "a run that is repeated draws the same"
    assert draws(1) != first, "ranks draw different numbers"
    assert len({value for row in first for value in row}) == 6, "so do the libraries"
