"""Weights, balanced classes and epochs of any length: statistics, and the same samples on any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import ConcatDataset, Subset, TensorDataset, WeightedRandomSampler

import lockstep
from lockstep.config.sections import DataConfig
from lockstep.data.mixture import Mixture
from lockstep.data.requests import Request, Source, windows
from lockstep.data.sampling import SampleOrder, logarithm, resolve_sampling, select
from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.planning.batch import BatchPlan, resolve_batch
from lockstep.telemetry.rundir import RunDir
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.samples import used_samples
from tests.toys import Toy, arrays


def order_of(weights: Any, samples: int, seed: int = 3, positions: int | None = None, **data: Any) -> SampleOrder:
    sampling = resolve_sampling(range(samples), weights, DataConfig(**data))
    assert sampling is not None
    return sampling.order(positions or sampling.facts.positions, seed)


def assert_in_proportion(counts: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> None:
    """A chi-square test of fixed seeds: it passes always or never."""
    expected = weights / weights.sum() * counts.sum()
    assert not counts[expected == 0].any()
    drawn = expected > 0
    statistic = float(((counts - expected)[drawn] ** 2 / expected[drawn]).sum())
    p = stats.chi2.sf(statistic, drawn.sum() - 1)
    assert 1e-5 < p < 1 - 1e-5, p


WEIGHTS = np.array([0.0, 1, 2, 3, 0, 10, 0.5, 0] * 25)


def test_with_replacement_samples_come_in_proportion_to_their_weights() -> None:
    order = order_of(WEIGHTS, 200, positions=100_000)
    epochs = [order.slice(epoch, 0, 100_000) for epoch in (0, 1)]
    for epoch in epochs:
        assert_in_proportion(np.bincount(epoch, minlength=200), WEIGHTS)
    # Neighbours, and the same position of two epochs, have no more in common than two draws do.
    equal = 100_000 * ((WEIGHTS / WEIGHTS.sum()) ** 2).sum()
    for same in (epochs[0] == epochs[1], epochs[0][1:] == epochs[0][:-1]):
        assert abs(same.sum() - equal) < 5 * np.sqrt(equal)


def test_without_replacement_heavy_samples_come_first() -> None:
    """The first sample of an epoch has the probabilities of one draw, and no sample comes twice."""
    weights, firsts = WEIGHTS[:8], []
    order = order_of(weights, 8, replacement=False)
    for epoch in range(4_000):
        drawn = order.slice(epoch, 0, 5)
        assert len(set(drawn.tolist())) == 5
        firsts.append(drawn[0])
    assert_in_proportion(np.bincount(firsts, minlength=8), weights)
    with pytest.raises(ConfigError, match="6 samples cannot be drawn without replacement"):
        lockstep.plan(Weighing(weights=weights), {"data": {"replacement": False, "epoch_samples": 6}})


@given(st.floats(2**-54, 1, exclude_max=True))
def test_the_logarithm_is_one(value: float) -> None:
    assert logarithm(np.array([value]))[0] == pytest.approx(np.log(value), rel=1e-14)


def test_every_class_is_drawn_equally_often() -> None:
    labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)
    whole = TensorDataset(torch.zeros(1000, 1), labels)
    for dataset in (whole, Subset(ConcatDataset([whole, whole]), range(500, 1500))):
        sampling = resolve_sampling(dataset, None, DataConfig(sampling="balanced"))
        assert sampling is not None
        drawn = sampling.order(30_000, 1).slice(0, 0, 30_000)
        classes = torch.stack([dataset[i][1] for i in drawn.tolist()])
        assert_in_proportion(classes.bincount(minlength=3).numpy(), np.ones(3))


def test_a_curriculum_has_the_weights_of_its_epoch() -> None:
    order = order_of(lambda epoch: np.eye(4)[epoch % 4], 4)
    assert [set(order.slice(epoch, 0, 4).tolist()) for epoch in range(4)] == [{0}, {1}, {2}, {3}]


def test_a_curriculum_is_asked_for_the_epochs_of_the_run_alone() -> None:
    weights = [np.ones(4)]
    assert sorted(order_of(lambda epoch: weights[epoch], 4).slice(0, 0, 4).tolist())


@pytest.mark.parametrize("positions", [3, 10, 17, 40])
def test_epochs_of_another_length_show_each_sample_once_before_any_again(positions: int) -> None:
    order = order_of(None, 10, positions=positions)
    run = np.concatenate([order.slice(epoch, 0, positions) for epoch in range(30)])
    rounds = run[: len(run) // 10 * 10].reshape(-1, 10)
    assert (np.sort(rounds) == np.arange(10)).all()
    assert len({tuple(row) for row in rounds.tolist()}) > 1


def test_torchs_sampler_is_taken_over() -> None:
    sampler = WeightedRandomSampler([1.0, 2.0, 0.0], 1000, replacement=True)
    sampling = resolve_sampling(range(3), sampler, DataConfig())
    assert sampling is not None
    assert (sampling.facts.positions, sampling.facts.kind) == (1000, "weighted, with replacement")
    assert_in_proportion(np.bincount(sampling.order(1000, 0).slice(0, 0, 1000), minlength=3), np.array([1.0, 2.0, 0.0]))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0, 2.0], r"shape \(2,\) do not fit 3"),
        ([1.0, -1.0, 1.0], "weight of sample 1 is -1"),
        ([1.0, 1.0, float("nan")], "weight of sample 2 is nan"),
        ([0, 0, 0], "sum of all weights is 0"),
        (["a", "b", "c"], "are not numbers"),
        (lambda epoch: [1.0], "of epoch"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        order_of(weights, 3)


def test_settings_that_lack_what_they_need_are_refused() -> None:
    with pytest.raises(ConfigError, match="gives no weights"):
        order_of(None, 3, sampling="weighted")
    with pytest.raises(ConfigError, match="labels of range are not known"):
        order_of(None, 3, sampling="balanced")


def test_a_predicate_chooses_samples() -> None:
    chosen = select(range(10), lambda number: number % 3 == 0)
    assert [chosen[i] for i in range(len(chosen))] == [0, 3, 6, 9]


# --- The same samples on any number of ranks -------------------------------------------------------------------------

KINDS = ["uniform", "cycled", "weighted", "without", "curriculum", "mixture"]


def some_order(kind: str, samples: int, positions: int, seed: int) -> SampleOrder:
    weights = np.arange(1, samples + 1) % 7 + 0.5
    if kind == "mixture":
        mixture = Mixture({"a": range(samples), "b": range(2)}, {"a": 0.6, "b": 0.4})
        return mixture.sampling().order(positions, seed)
    given: Any = {"weighted": weights, "without": weights, "curriculum": lambda epoch: weights + epoch}.get(kind)
    positions = samples if kind == "uniform" else min(samples, positions) if kind == "without" else positions
    return order_of(given, samples, seed, positions, replacement=kind != "without")


def batch_of(samples: int, ranks: int, global_batch: int) -> BatchPlan:
    plan, _ = resolve_batch(
        samples=samples, ranks=ranks, devices_per_rank=1, batch_size=4, accumulate=1, global_batch_size=global_batch,
        tail="spread", lanes=None, has_batchnorm=False, sync_batchnorm=False,
    )  # fmt: skip
    return plan


def attempts(order: SampleOrder, stops: list[tuple[int, int]], global_batch: int) -> Iterator[tuple[int, list[int]]]:
    """(epoch, samples) of each step of attempts on ``ranks`` that are killed after ``steps``, over all ranks."""
    epoch = position = 0
    source = Source(range(10**6), None, 3, order)  # type: ignore[arg-type]
    for ranks, steps in stops:
        batch = batch_of(order.samples, ranks, global_batch)
        walks = [
            windows(batch, rank=rank, epoch=epoch, position=position, epochs=3, ghosts=False) for rank in range(ranks)
        ]
        for _, of_ranks in zip(range(steps), zip(*walks, strict=True), strict=False):
            requests = [request for window in of_ranks for request in window.requests]
            yield of_ranks[0].epoch, [int(i) for request in requests for i in source.indices(request)]
            epoch, position = of_ranks[0].epoch, of_ranks[0].stop


@given(
    kind=st.sampled_from(KINDS),
    samples=st.integers(3, 60),
    positions=st.integers(3, 90),
    global_batch=st.integers(3, 12),
    steps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    seed=st.integers(0, 2**40),
)
def test_no_sample_is_lost_or_repeated_over_1_3_and_2_ranks(
    kind: str, samples: int, positions: int, global_batch: int, steps: tuple[int, int], seed: int
) -> None:
    order = some_order(kind, samples, positions, seed)
    again = some_order(kind, samples, positions, seed)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for epoch, indices in attempts(order, [(1, steps[0]), (3, steps[1]), (2, 1000)], global_batch):
        found[epoch] += indices
    for epoch, indices in found.items():
        assert indices == again.slice(epoch, 0, order.samples).tolist()


class Drawing:
    """Draws in each of the two ways."""

    def __len__(self) -> int:
        return 4

    def sample(self, index: int, rng: np.random.Generator) -> tuple[int, float]:
        return index, rng.random()


class Draws:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


@pytest.mark.parametrize("dataset", [Drawing(), Draws()])
def test_a_sample_that_comes_twice_draws_twice(dataset: Any) -> None:
    order = order_of([1.0, 0, 0, 0], 4, positions=12)
    source = Source(dataset, torch.utils.data.default_collate, 3, order)
    whole = source.batch(Request(0, 0, 0, 12))
    parts = [source.batch(Request(0, 0, start, start + 4)) for start in (0, 4, 8)]
    assert len(set(whole[1].tolist())) == 12
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])


class Weighing(Toy):
    """The toy with weights; the last of three classes is rare in them."""

    class Config(Toy.Config):
        weights: Any = None

    def __init__(self, config: Any = None, weights: Any = None) -> None:
        super().__init__(config)
        self.weights = weights

    def datasets(self) -> lockstep.Datasets:
        given = super().datasets()
        if self.weights is not None:
            return lockstep.Datasets(range(len(self.weights)), weights=self.weights)
        weights = WeightedRandomSampler((arrays(200, 1)[1] != 2).double() + 0.01, 120)
        return lockstep.Datasets(given.train, given.val, weights=weights)


def runs(rank: int, size: int, folder: Path) -> dict[str, Any] | None:
    """On two ranks: the first half of a run, and another one whole; returns the weights of that on rank 0."""
    settings: dict[str, Any] = {"telemetry": {"record_samples": True}, "checkpoint": {"every_steps": 1}}
    attempt(Weighing, folder / "parts", rank, size, training={"max_steps": 5, "global_batch_size": 16}, **settings)
    exact = {"reproducibility": "exact", "global_batch_size": 16, "lanes": 4}
    return attempt(Weighing, folder / "exact", rank, size, training=exact, **settings)[0]


def test_weighted_training_on_ranks_resumes_on_one_and_has_equal_bits(tmp_path: Path) -> None:
    weights = run_ranks(runs, 2, tmp_path)[0]
    attempt(Weighing, tmp_path / "parts", resume=True, training={"max_steps": 16})
    plan = RunDir(tmp_path / "parts").plan()
    assert (plan["batch"]["samples"], plan["order"]["sampling"]) == (120, "weighted, with replacement")
    order = order_of(Weighing().datasets().weights, 200, seed=42)
    assert used_samples(RunDir(tmp_path / "parts")) == {
        epoch + 1: Counter(order.slice(epoch, 0, 120).tolist()) for epoch in (0, 1)
    }
    exact = {"reproducibility": "exact", "global_batch_size": 16, "lanes": 4}
    alone, _ = attempt(Weighing, tmp_path / "alone", training=exact)
    assert all(torch.equal(weights[name], alone[name]) for name in alone)
    with pytest.raises((ConfigError, CheckpointError), match="weights"):
        attempt(Toy, tmp_path / "parts", resume=True, training={"max_steps": 20})
